"""`depth-1000`: its wiring is the remedies', its runs are kept, and its claims can fail."""

import pandas as pd
import pytest
import torch

from depthscope import apply
from depthscope.models import BlockConfig, Encoder
from depthscope.remedies import DeEscalate, ResidualWeight
from depthscope_lab.papers.deep import narrow_vits as runs
from depthscope_lab.papers.deep.depth_1000 import COLUMNS, LABELS, STUDY, claims, rows_of
from depthscope_lab.papers.deep.narrow_vits import same_as, weighted_post_norm, wiring_for

TINY = runs.Shape(width=8, ffn_width=8, heads=2, patch_size=4, batch=4, steps=3, left_out_on=4)


def encoder(wiring="post") -> Encoder:
    return Encoder(3, BlockConfig(8, 2, 12, placement=wiring), generator=torch.Generator().manual_seed(0)).double()


def test_its_wiring_is_what_the_remedies_make_of_post_norm():
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    remedied = apply(encoder(), ResidualWeight(alpha=0.3), DeEscalate(tau=0.4))
    torch.testing.assert_close(encoder(weighted_post_norm(0.3, 0.4))(x), remedied(x))
    assert not torch.allclose(encoder(weighted_post_norm(0.3, 0.5))(x), remedied(x))


def test_where_one_is_prescribed_for_alpha_two_variants_are_others():
    shallow, deep = runs.Shape().prescription(50), runs.Shape().prescription(1000)
    assert shallow.alpha == 1
    assert [same_as(name, shallow) for name in ("prescribed", "alpha", "tau", "pre")] == [
        "prescribed",
        "post",
        "prescribed",
        "pre",
    ]
    assert 0 < deep.alpha < 1 > deep.tau > 0
    assert all(same_as(name, deep) == name for name in LABELS)
    assert wiring_for("pre", deep).name == "pre"


def test_a_run_is_trained_once_and_then_read(tmp_path, monkeypatch):
    run = runs.Run("prescribed", 4, 1e-3, 1, counts=True)
    monkeypatch.setattr(runs, "LEARNED", 2.0)  # three steps teach nothing
    first = runs.found_or_trained(run, TINY, tmp_path, lambda _share: None)
    assert len(first["losses"]) == 3
    assert len(first["without"][1]) == 4
    assert [look["step"] for look in first["looks"]] == [0, 1, 2]
    monkeypatch.setattr(runs, "trained", lambda *_: pytest.fail("trained again"))
    assert runs.found_or_trained(run, TINY, tmp_path, lambda _share: None) == first
    rows = pd.DataFrame(list(rows_of(first)), columns=COLUMNS)
    assert set(rows["quantity"]) == {"train_loss", "loss", "accuracy", "t_sim", "roles", "without"}


def test_leaving_blocks_out_is_a_model_without_them():
    config = runs.settings(runs.Run("pre", 3, 1e-3, 1, True), TINY)
    task = runs.ImageClassification(config, runs.load_digits())
    model = runs.build("pre", task, TINY).eval()
    images = task.normalised(task.data.test_images[:4])
    whole = model(images)
    with runs.skipping(runs.blocks_of(model)[1:2]):
        without = model(images)
    assert torch.equal(model(images), whole)
    del model.encoder.blocks[1]
    assert torch.equal(model(images), without)
    assert not torch.allclose(without, whole)


def made_up(**progress: float) -> pd.DataFrame:
    """Three seeds each; t_sim, roles and costs as the claims say they are."""
    rows = []

    def put(variant, seed, quantity, value, step=0, block=0, depth=1000):
        rows.append([variant, depth, 1e-4, seed, True, quantity, step, block, value])

    for variant, gained in progress.items():
        name = variant.replace("_", "-")
        for seed in (1, 2, 3):
            put(name, seed, "loss", runs.CHANCE - gained)
            put(name, seed, "accuracy", 0.1 + gained / 2)
            for block in (500, 1000):
                put(name, seed, "t_sim", 0.5, 1, block)
                put(name, seed, "t_sim", 0.999 if name == "alpha" else 0.3, 40, block)
                put(name, seed, "roles", 1e-4 if name == "post" else 0.5, 40, block)
                if name in ("prescribed", "pre"):
                    put(name, seed, "without", 0.1 if name == "prescribed" or block == 500 else 0.0, 0, block)
    put("prescribed", 1, "loss", runs.CHANCE - 1.2, depth=50)
    return pd.DataFrame(rows, columns=COLUMNS)


GOOD = {"prescribed": 1.0, "alpha": 0.1, "tau": 0.2, "post": 0.0, "pre": 1.1, "deep_norm": 0.9, "layer_scale": 0.2}


def verdicts(**changes: float) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in claims(made_up(**GOOD | changes), STUDY.full)}


def test_the_claims_hold_where_they_should():
    assert set(verdicts().values()) == {"reproduced"}


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({"prescribed": 0.1}, "the prescription trains 1000 post-norm blocks"),
        ({"alpha": 0.9}, "both α and τ are needed"),
        ({"post": 0.5}, "classic post-norm does not train"),
        ({"deep_norm": 1.9}, "the prescription is as good as the best published control"),
        ({"prescribed": 0.5}, "the prescription holds its progress from 50 to 1000 blocks"),
    ],
)
def test_the_claims_fail_where_they_should(changes, fails):
    assert verdicts(**changes)[fails] == "not reproduced"
