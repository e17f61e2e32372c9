"""Dovonon et al.'s figures: columns, claims and pictures of the quick forms; claims fail where they should."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from depthscope.anatomy import anatomy_of
from depthscope.models.families import build_family
from depthscope.text import read_text
from depthscope_lab.papers import subjects
from depthscope_lab.papers.dovonon2025 import fig2, fig3, fig4, fig5, theory, three_papers
from depthscope_lab.papers.dovonon2025.repeated import draw_attention, draw_normal, repeat, with_spectrum
from depthscope_lab.papers.dovonon2025.theory import SETS, attend, measured_rate
from depthscope_lab.papers.study import Claim, Study

F64 = torch.float64
STUDIES = (theory.STUDY, fig4.STUDY, fig2.STUDY, three_papers.STUDY, fig5.STUDY, fig3.STUDY)
NOT_REPRODUCED: dict[str, set[str]] = {  # in the quick form; everything else is reproduced
    "dovonon2025-fig4": {
        "in pre-norm, A fixed, the sign of LN's weights decides whether a positive H smooths",
        "in post-norm, A fixed, a positive H smooths and a negative one does not",
    },
}
NOT_TESTABLE: dict[str, set[str]] = {
    "three-papers": {
        "skips delay the collapse without ending the collapse: Dong et al.'s own residual shrinks with depth",
        "Dovonon et al.'s update with each block's own A and H gives the measured rate, without norms and FFNs",
        *three_papers.RATES.values(),
    },
    "dovonon2025-fig3": {
        "after training, tokens stay more different where H sharpens than where H smooths (input convergence)",
        "after training, the other two definitions agree: smaller angles and a lower rank if H smooths",
        "after training, a model whose H smooths makes tokens more alike over its depth",
        "after training, a model whose H sharpens makes tokens more different over its depth",
        "smoothing helps images: it raises the test accuracy against the control with both signs",
        "sharpening raises the test accuracy against the control with both signs",
    },
    "dovonon2025-fig5": {
        "pretrained models of vision skew to the negatives",
    },
}


@pytest.fixture(scope="module")
def frames() -> dict[str, pd.DataFrame]:
    return {study.name: study.compute(study.quick, lambda _share: None) for study in STUDIES}


def judged(study: Study, frame: pd.DataFrame) -> dict[str, Claim]:
    return {claim.claim: claim for claim in study.claims(frame, study.quick)}


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_the_quick_form_has_its_claims_and_figure(study: Study, frames: dict[str, pd.DataFrame]):
    frame = frames[study.name]
    found = judged(study, frame)
    for claim in found.values():
        assert any(character.isdigit() for character in claim.ours), claim
        assert claim.paper
        assert claim.tolerance
    by_verdict = {
        verdict: {name for name, claim in found.items() if claim.verdict == verdict}
        for verdict in ("not reproduced", "not testable here")
    }
    assert by_verdict["not reproduced"] == NOT_REPRODUCED.get(study.name, set())
    assert by_verdict["not testable here"] == NOT_TESTABLE.get(study.name, set())
    before = frame.copy()
    figure = study.draw(frame)
    figure.canvas.draw()
    pd.testing.assert_frame_equal(frame, before)
    assert sum(bool(ax.get_xlabel()) for ax in figure.axes) >= 2


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_progress_ends_at_one(study: Study, frames: dict[str, pd.DataFrame]):
    shares: list[float] = []
    again = study.compute(study.quick, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    pd.testing.assert_frame_equal(again, frames[study.name])  # a seed fixes the numbers


# --- the theory -----------------------------------------------------------------------------------


def verdict_of(study: Study, frame: pd.DataFrame, words: str) -> str:
    (claim,) = (claim for claim in study.claims(frame, study.quick) if words in claim.claim)
    return claim.verdict


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.assign(inside=f["inside"] == False), "outside the disc"),  # noqa: E712
        (lambda f: f.assign(input_seen=True), "never makes tokens equal"),
        (lambda f: f.assign(rate_seen=f["rate_seen"] ** 1.2), "at the rate"),
        (lambda f: f.assign(limit_seen=f["limit_seen"] * 1.01), "does not raise"),
        *((lambda f: f.assign(agrees=False), f"if {name}") for name in SETS),
    ],
)
def test_a_theory_that_fails_is_seen(frames: dict[str, pd.DataFrame], change, words: str):
    frame = frames["dovonon2025-theory"]
    assert verdict_of(theory.STUDY, frame, words) == "reproduced"
    assert verdict_of(theory.STUDY, change(frame), words) == "not reproduced"


def test_the_drawn_matrices_are_what_they_are_called():
    for kind in ("similar", "free", "causal"):
        a = draw_attention(kind, 20, 6, (1,))
        torch.testing.assert_close(a.sum(dim=-1), torch.ones(20, 6, dtype=F64))
        values = torch.linalg.eigvals(a)
        if kind == "similar":
            assert values.imag.abs().max() < 1e-9
            assert values.real.min() > -1e-9
        if kind == "free":
            assert values.imag.abs().max() > 0.01
        if kind == "causal":
            assert (a.triu(1) == 0).all()
    wanted = torch.tensor([[-1.0, -0.5, 0.0, 2.0]], dtype=F64)
    torch.testing.assert_close(torch.linalg.eigvalsh(with_spectrum(wanted, (2,))), wanted)


def test_the_rate_of_a_known_curve_is_found_within_what_can_be_seen():
    depths = tuple(range(0, 200, 2))
    at = torch.tensor(depths, dtype=F64)
    falling, short, flat = 0.9**at, 0.001**at, torch.full_like(at, torch.nan)
    falling[60:] = torch.nan  # beyond it the ratio is rounding noise
    found = measured_rate(depths, torch.stack([falling, short, flat], dim=1))
    assert found[0].item() == pytest.approx(0.9)
    assert found[1:].isnan().all()  # two points of the second are within range, none of the third


def test_rescaling_changes_no_ratio():
    a, x = draw_attention("free", 3, 5, (3,)), draw_normal(3, 5, 4, seed=(4,))
    step = attend(a, 0.3 * torch.eye(4, dtype=F64))
    (plain,), (scaled,) = (repeat(step, x, (20,), rescale=rescale) for rescale in (False, True))
    unit = [y / torch.linalg.matrix_norm(y, keepdim=True) for y in (plain, scaled)]
    torch.testing.assert_close(*unit)


# --- layer norm -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "sign", "words"),
    [
        ("pre", "γ < 0", "the same as a negated H"),
        ("post", "γ < 0", "without bias, the sign of LN's weights changes nothing"),
        ("pre", "γ > 0", "in pre-norm, A of the tokens, the sign of LN's weights decides"),
        ("post", "γ > 0", "in post-norm, A of the tokens, a positive H smooths"),
    ],
)
def test_a_sign_that_matters_otherwise_is_seen(frames: dict[str, pd.DataFrame], placement: str, sign: str, words: str):
    frame = frames["dovonon2025-fig4"]
    chosen = (frame["placement"] == placement) & (frame["sign"] == sign)
    other = frame.assign(ratio=frame["ratio"].where(~chosen, 1000 * frame["ratio"] + 1))
    assert verdict_of(fig4.STUDY, frame, words) == "reproduced"
    assert verdict_of(fig4.STUDY, other, words) == "not reproduced"


def test_without_bias_the_post_norm_layer_is_odd_and_with_one_it_is_not():
    drawn = fig4.draw_all(fig4.Config(trials=3))
    for setting in fig4.SETTINGS:
        layer = fig4.layer(drawn, "post", setting, 1, 1)
        odd = torch.allclose(layer(-drawn.tokens), -layer(drawn.tokens), atol=1e-12, rtol=0)
        assert odd == (setting in fig4.WITHOUT_BIAS)


# --- the three definitions over depth -------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.assign(frequency_ratio=1.0 + f["block"]), "there are models in which tokens grow alike"),
        (lambda f: f.assign(stable_rank=f["stable_rank"] + f["frequency_ratio"] ** 2), "implies rank collapse"),
        (lambda f: f.assign(effective_rank=-f["effective_rank"]), "nearly the same order"),
    ],
)
def test_other_curves_are_seen(frames: dict[str, pd.DataFrame], change, words: str):
    frame = frames["dovonon2025-fig2"]
    assert verdict_of(fig2.STUDY, frame, words) == "reproduced"
    assert verdict_of(fig2.STUDY, change(frame), words) == "not reproduced"


def test_photographs_are_real_and_differ():
    pixels = subjects.photographs(4, 32)["pixel_values"]
    assert pixels.shape == (4, 3, 32, 32)
    assert abs(pixels.mean().item()) < 1e-5
    assert pixels.std().item() == pytest.approx(1, abs=1e-5)
    for one in range(4):
        for other in range(one):
            assert (pixels[one] - pixels[other]).abs().mean() > 0.1


def test_a_folder_without_models_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected weights of a model in .* got no config\.json"):
        subjects.given(str(tmp_path), None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"expected a config\.json that can be read"):
        subjects.given(str(tmp_path), None)


def test_a_given_vision_model_is_looked_at_with_photographs(tmp_path: Path):
    build_family("vit", 2, 64, seed=3).save_pretrained(tmp_path / "mine")
    found = subjects.given(str(tmp_path), None)[-1]
    frame = fig2.measured(subjects.loaded(found, read_text(None), 16, 2))
    assert set(frame["field"]) == {"vision"}
    assert set(frame["model"]) == {"mine"}
    assert frame["block"].max() == 2
    assert frame["frequency_ratio"].notna().all()


# --- where the three papers meet ------------------------------------------------------------------


def curves(bert: float, albert: float, alone: float) -> pd.DataFrame:
    """A frame of 60 blocks whose ratio shrinks by these factors; Yu & Zhang say .95, Dovonon et al. .77."""
    frames = []
    for model, factor in zip(three_papers.MODELS, (bert, albert, alone), strict=True):
        blocks = pd.Series(range(61), dtype=float)
        ratio = factor**blocks
        root = (ratio**2 / (1 + ratio**2)) ** 0.5
        columns = {"ratio": ratio, "residual": root, "similarity": 1 / (1 + ratio**2), "dong": 1.0}
        update = factor**blocks
        frame = pd.DataFrame({**columns, "yu": 0.95**blocks, "dovonon": 0.77**blocks, "update": update})
        frames.append(frame.assign(model=model, block=range(61), sample=0))
    return pd.concat(frames, ignore_index=True)


def test_who_is_right_hangs_on_the_numbers():
    def verdicts(frame: pd.DataFrame) -> list[str]:
        return [claim.verdict for claim in three_papers.claims(frame, three_papers.STUDY.full)]

    assert verdicts(curves(0.95, 0.77, 0.77)) == ["reproduced"] * 5
    swapped = verdicts(curves(0.77, 0.95, 0.95))
    assert swapped[2:4] == ["not reproduced"] * 2
    assert verdicts(curves(1.0, 1.0, 1.0))[1] == "not reproduced"
    apart = curves(0.95, 0.77, 0.77).assign(update=1.0, similarity=0.5)
    assert verdicts(apart)[0] == verdicts(apart)[4] == "not reproduced"


def test_the_value_weights_are_what_the_branch_does_to_equal_tokens():
    """Equal tokens are their own mean under any attention: the branch is x(Σ_h W_V W_O) and biases."""
    model = build_family("bert", 1, 64, seed=1).double()
    attention = model.encoder.layer[0].attention
    for module in attention.modules():
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()
    x = draw_normal(1, 1, 64, seed=(1,)).expand(1, 5, 64)
    branch = attention.output.dense(attention.self(x)[0])
    expected = x @ three_papers.value_weights(anatomy_of(model).blocks[0])
    torch.testing.assert_close(branch, expected)


# --- eigenvalues of H -----------------------------------------------------------------------------


def test_spectra_that_skew_are_seen(frames: dict[str, pd.DataFrame]):
    skewed = frames["dovonon2025-fig5"].assign(negative_share=0.9)
    assert verdict_of(fig5.STUDY, skewed, "fresh weights are symmetric") == "not reproduced"
    assert verdict_of(fig5.STUDY, skewed, "pretrained models of language") == "not reproduced"
    assert verdict_of(fig5.STUDY, skewed.assign(field="vision"), "pretrained models of vision") == "reproduced"


def test_the_histogram_holds_every_eigenvalue(frames: dict[str, pd.DataFrame]):
    sums = frames["dovonon2025-fig5"].groupby(["model", "state", "block"])["share"].sum()
    assert sums.between(1 - 1e-9, 1 + 1e-9).all()
