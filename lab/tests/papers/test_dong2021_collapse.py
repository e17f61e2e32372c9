"""The collapse of BERT, ALBERT and XLNet with and without skips: the numbers, and verdicts that can fail."""

import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from hypothesis import given
from torch import Tensor

from depthscope.measures import composite_norm, composite_residual
from depthscope_lab.papers import load
from depthscope_lab.papers import subjects as pretrained
from depthscope_lab.papers.dong2021.collapse import VARIANTS, Config, left_out, plain_residual, residuals_of
from depthscope_lab.papers.study import Study
from samples import seeded, token_matrices
from zoo import IDS, make


@cache
def quick(name: str) -> tuple[Study, pd.DataFrame]:
    study = load(name)
    return study, study.compute(study.quick, lambda _share: None)


def verdicts(name: str, frame: pd.DataFrame | None = None) -> dict[str, str]:
    study, computed = quick(name)
    return {claim.claim: claim.verdict for claim in study.claims(computed if frame is None else frame, study.quick)}


# --- the measure ------------------------------------------------------------------------------------


def test_the_composite_norm_by_hand():
    x = torch.tensor([[1.0, -2.0, 0.0], [3.0, 1.0, -1.0]])
    assert float(composite_norm(x)) == pytest.approx(np.sqrt(4 * 5))  # columns 4, 3, 1; rows 3, 5


@given(token_matrices())
def test_the_composite_norm_is_numpys(x: Tensor):
    a = x.numpy()
    assert float(composite_norm(x)) == pytest.approx(
        np.sqrt(np.linalg.norm(a, 1) * np.linalg.norm(a, np.inf)), rel=1e-12
    )


def test_equal_tokens_have_no_residual():
    x = torch.randn(1, 16, generator=seeded(0)).expand(7, 16)
    assert float(composite_residual(x)) == 0.0
    assert 0 < float(plain_residual(x)) < 1e-6 or float(plain_residual(x)) == 0.0


# --- the variants -----------------------------------------------------------------------------------


def test_variants_are_those_of_the_authors():
    assert left_out("bert", "SAN") == left_out("xlnet", "SAN") == ("attention_skip", "ffn_step")
    assert left_out("albert", "SAN") == ("attention_skip", "ffn_linears")
    assert left_out("bert", "SAN+MLP") == ("attention_skip",)
    assert left_out("albert", "SAN+skip") == ("ffn_linears",)
    assert left_out("bert", "full") == ()


@pytest.mark.parametrize("family", ["bert", "albert", "xlnet"])
def test_residuals_are_those_of_the_hidden_states(family: str):
    model, _ = make(family)
    model.eval()
    with torch.no_grad():
        states = model(input_ids=IDS, output_hidden_states=True).hidden_states
    plain, exact = residuals_of(model, IDS, batch=1)
    expected = torch.stack([plain_residual(state).double() for state in states])
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-6)


def test_the_papers_curves_are_complete():
    known = json.loads((files("depthscope_lab.papers.dong2021") / "collapse_in_the_paper.json").read_text())
    assert known["bert"]["init"]["SAN"]["mean"][1] == 0.0176
    for by_weights in known.values():
        for by_variant in by_weights.values():
            assert tuple(by_variant) == tuple(VARIANTS)
            assert all(len(curve["mean"]) == len(curve["spread"]) == 13 for curve in by_variant.values())


# --- pretrained weights -----------------------------------------------------------------------------


def saved(folder: Path, depth: int = 3) -> Path:
    config = hf.BertConfig(
        vocab_size=9000, hidden_size=16, num_hidden_layers=depth, num_attention_heads=2, intermediate_size=32
    )
    hf.BertModel(config).save_pretrained(folder)
    return folder


def test_a_folder_of_weights_is_found_and_a_wrong_one_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"got no config\.json"):
        pretrained.given(str(tmp_path))
    hf.GPT2Config(n_layer=1).save_pretrained(tmp_path / "gpt")
    with pytest.raises(ValueError, match=r"gpt \(gpt2\)"):
        pretrained.given(str(tmp_path))
    saved(tmp_path / "mine")
    assert [(model.name, model.family) for model in pretrained.given(str(tmp_path))] == [("mine", "bert")]
    (tmp_path / "mine" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json that can be read"):
        pretrained.given(str(tmp_path))
    assert pretrained.given(None) == []


def test_given_weights_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("depthscope_lab.papers.dong2021.collapse.FAMILIES", ("bert",))
    monkeypatch.setattr("depthscope_lab.papers.dong2021.collapse.minilm", list)
    study = load("dong2021-collapse")
    config = Config(depth=2, width=64, tokens=8, samples=2, few=1, draws=0, data=str(saved(tmp_path / "b")))
    frame = study.compute(config, lambda _share: None)
    own = frame[(frame["model"] == "b") & (frame["source"] == "float32")]
    assert set(own["block"]) == {0, 1, 2, 3}
    assert set(VARIANTS) <= set(own["variant"])
    assert own["value"].notna().all()


# --- the studies ------------------------------------------------------------------------------------


def test_quick_verdicts():
    found = verdicts("dong2021-collapse")
    assert found["in float64 the collapse goes on below the floor of float32"] == "reproduced"
    assert found["BERT without skips and MLPs loses rank doubly exponentially"] == "reproduced"
    assert found["XLNet without skips and MLPs loses rank doubly exponentially"] == "not reproduced"
    alone = "XLNet without skips and MLPs, and without scores of relative positions, loses rank doubly exponentially"
    assert found[alone] == "reproduced"
    assert sum(verdict == "not testable here" for verdict in found.values()) >= 4


@pytest.mark.parametrize(
    ("chosen", "factor", "claim"),
    [
        ({"source": "float64", "variant": "SAN"}, 1e6, "in float64 the collapse goes on below the floor of float32"),
        (
            {"model": "bert", "variant": "SAN", "source": "float32"},
            1e9,
            "without attention's skip, BERT with fresh weights collapses, with MLPs or without",
        ),
        (
            {"model": "bert", "variant": "full", "source": "float32"},
            1e-3,
            "BERT with fresh weights keeps its rank as it is",
        ),
    ],
)
def test_another_frame_turns_the_verdict(chosen: dict[str, str], factor: float, claim: str):
    frame = quick("dong2021-collapse")[1].copy()
    rows = np.logical_and.reduce([frame[column] == value for column, value in chosen.items()])
    frame.loc[rows, "value"] = frame.loc[rows, "value"].clip(lower=1e-16) * factor
    assert verdicts("dong2021-collapse", frame)[claim] == "not reproduced"


def test_at_the_papers_shape_its_numbers_are_asked_for():
    """A frame that has the paper's own means for ours is reproduced, and one that is far off is not."""
    study, frame = quick("dong2021-collapse")
    mine = frame[(frame["source"] != "paper") & (frame["weights"] == "init")].copy()
    paper = frame[(frame["source"] == "paper") & (frame["weights"] == "init")]
    means = paper.set_index(["model", "variant", "block"])["value"].to_dict()
    keys = list(zip(mine["model"], mine["variant"], mine["block"], strict=True))
    mine["value"] = [means.get(key, value) for key, value in zip(keys, mine["value"], strict=True)]
    config = replace(study.quick, width=768, tokens=128)
    claim = "ALBERT with fresh weights keeps its rank with skips alone"

    def verdict(rows: pd.DataFrame) -> str:
        found = study.claims(pd.concat([rows, frame[frame["source"] == "paper"]]), config)
        return next(each.verdict for each in found if each.claim == claim)

    assert verdict(mine) == "reproduced"
    assert verdict(mine.assign(value=mine["value"] * 0.5)) == "not reproduced"


def test_the_figure_is_drawn(tmp_path: Path):
    study, frame = quick("dong2021-collapse")
    study.draw(frame).savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
