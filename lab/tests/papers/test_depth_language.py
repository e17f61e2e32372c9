"""depth-language: the quick form, what its claims rest on, and that they can fail."""

import math
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import torch

import depthscope
from depthscope.models import BlockConfig, CausalLM
from depthscope.remedies import DeEscalate
from depthscope_lab.papers import load
from depthscope_lab.papers.deep import language, letters
from depthscope_lab.papers.deep.language import VARIANTS
from depthscope_lab.papers.deep.letters import (
    ALPHA,
    POST,
    PRE,
    PRESCRIBED,
    SPARSE,
    TAU,
    UNTOLD,
    Training,
    carriers,
    hidden_difference,
    letter_frequencies,
    notation,
    prescribed,
    tell_frequencies,
)
from depthscope_lab.training.data.characters import load_characters
from depthscope_lab.training.recipes import lm_manual

STUDY = load("depth-language")
DEPTH, SEEDS = 4, (0, 1, 2)
# Losses and similarities of a world in which every claim holds; the floor is 3.
LOSS = {
    PRESCRIBED: 2.0,
    PRE: 2.05,
    POST: 2.9,
    TAU: 2.5,
    ALPHA: 2.6,
    "DeepNorm": 2.1,
    "LayerScale": 2.2,
    SPARSE: 2.3,
    UNTOLD: 2.8,
}
SIMILAR = dict.fromkeys(VARIANTS, 0.3) | {POST: 0.99, UNTOLD: 0.9}


def made_up(loss: dict[str, float], similar: dict[str, float], learns: float = 0.5, skip: float = 0.1) -> pd.DataFrame:
    rows = []
    for name in VARIANTS:
        for seed in SEEDS:
            about = {"variant": name, "rate": 1e-3, "seed": seed, "held_out": "test", "step": 9}
            rows.append({**about, "block": -1, "quantity": "held_out", "value": loss[name] + 0.01 * seed})
            rows.append({**about, "block": -1, "quantity": "hidden", "value": 1e-7})
            for block in range(1, DEPTH + 1):
                rows.append({**about, "block": block, "quantity": "token_similarity", "value": similar[name]})
                rows.append({**about, "block": block, "quantity": "learns", "value": 0 if name == POST else learns})
                cost = skip if name == PRESCRIBED or block == 1 else 0.0
                rows.append({**about, "block": block, "quantity": "skip", "value": cost})
    frame = pd.DataFrame(rows)
    floor = {"variant": "letter frequencies", "seed": -1, "held_out": "test", "quantity": "floor", "value": 3.0}
    tuned = {"variant": PRE, "rate": 3e-3, "held_out": "validation", "quantity": "held_out", "value": 2.0}
    return pd.concat([frame, language.intervals(frame), pd.DataFrame([floor, tuned])], ignore_index=True)


def fallen(frame: pd.DataFrame) -> set[int]:
    """The claims, by their place, that are not reproduced."""
    verdicts = [claim.verdict for claim in STUDY.claims(frame, STUDY.quick)]
    assert len(verdicts) == 11
    return {place for place, verdict in enumerate(verdicts) if verdict != "reproduced"}


def test_all_claims_hold_where_they_should():
    assert fallen(made_up(LOSS, SIMILAR)) == set()


@pytest.mark.parametrize(
    ("change", "places"),
    [
        ({"loss": LOSS | {POST: 2.01}}, {1}),
        ({"loss": LOSS | {ALPHA: 2.0}}, {2}),
        ({"loss": LOSS | {TAU: 2.02}}, {3}),
        ({"loss": LOSS | {PRE: 1.8}}, {4, 5}),
        ({"loss": LOSS | {"DeepNorm": 1.9}}, {5}),
        ({"similar": SIMILAR | {POST: 0.9}}, {6}),
        ({"similar": SIMILAR | {PRESCRIBED: 0.6}}, {6, 8}),
        ({"similar": SIMILAR | {UNTOLD: 0.4}}, {8}),
        ({"learns": 0.001}, {7}),
        ({"skip": 0.0}, {9}),
    ],
)
def test_a_claim_fails_where_it_should(change: dict[str, object], places: set[int]):
    assert fallen(made_up(**{"loss": LOSS, "similar": SIMILAR, **change})) == places


def test_nothing_is_compared_where_nothing_was_learnt():
    verdicts = [claim.verdict for claim in STUDY.claims(made_up(dict.fromkeys(LOSS, 2.95), SIMILAR), STUDY.quick)]
    assert verdicts[:6] == ["not reproduced"] + ["not testable here"] * 5


def test_a_failed_run_loses_and_one_seed_decides_nothing():
    frame = made_up(LOSS, SIMILAR)
    frame.loc[(frame["variant"] == POST) & (frame["quantity"] == "held_out") & (frame["seed"] == 2), "value"] = None
    assert fallen(frame) == set()
    one = made_up(LOSS, SIMILAR)
    one = one[one["seed"].isin([-1, 0]) | one["seed"].isna()]
    one.loc[one["quantity"].isin(["low", "high"]), "value"] = None
    assert fallen(one) == {1, 2, 3, 5}


def test_a_run_that_failed_has_an_infinite_loss():
    ends = [pd.DataFrame({"quantity": ["loss", "held_out"], "value": [9.0, value]}) for value in (1.5, math.nan)]
    assert [language.held_out_loss(found) for found in ends] == [1.5, math.inf]


def test_carriers_are_the_fewest_blocks():
    assert carriers([0.0, 3.0, -5.0, 1.0], 0.75) == 1
    assert carriers([1.0, 1.0, 1.0, 1.0], 0.75) == 3
    assert carriers([-1.0, 0.0], 0.75) == 0


def test_a_look_at_the_future_is_seen():
    generator = torch.Generator().manual_seed(0)
    model = CausalLM(2, BlockConfig(8, 2), vocabulary=5, context=6, generator=generator).eval()
    ids = torch.randint(5, (3, 6), generator=generator)
    assert hidden_difference(model, ids) < 1e-6  # float32 in other sums
    depthscope.apply(model, DeEscalate(1.0, mixing="full", allow_leak=True))
    assert hidden_difference(model, ids) > 1e-4


def test_the_head_is_told_how_frequent_letters_are():
    data = load_characters()
    model = CausalLM(1, BlockConfig(8, 2), vocabulary=data.symbols, context=4)
    torch.nn.init.zeros_(model.embedding.weight)  # such a model knows nothing
    tell_frequencies(model, data)
    found = torch.log_softmax(model(data.test[:4][None]), dim=-1)[0, 0]
    assert torch.allclose(found, letter_frequencies(data), atol=1e-6)  # sums of float32
    assert found.exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_every_variant_is_one_of_the_recipe():
    shape = Training(depth=100, context=32)
    alpha, tau = prescribed(shape)
    assert 0 < alpha < 1
    assert 0 < tau < 1
    assert [remedy.name for remedy in lm_manual(notation(PRESCRIBED, shape)).remedies] == [
        "de-escalation",
        "residual-weight",
    ]
    for name in VARIANTS:
        assert lm_manual(notation(name, shape)).initialiser == "xavier"


@cache
def quick(folder: Path) -> tuple[pd.DataFrame, list[float]]:
    shares: list[float] = []
    return STUDY.compute(STUDY.quick, shares.append, folder), shares


def test_the_quick_form_is_computed_once_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    frame, shares = quick(tmp_path)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    drawn = STUDY.draw(frame)
    assert len(drawn.axes) >= 12
    assert {claim.claim: claim.verdict for claim in STUDY.claims(frame, STUDY.quick)}["no model sees the future"] == (
        "reproduced"
    )

    def refuse(*_: object) -> pd.DataFrame:
        raise AssertionError("trained again")

    monkeypatch.setattr(letters, "trained", refuse)
    again = STUDY.compute(STUDY.quick, lambda _share: None, tmp_path)
    pd.testing.assert_frame_equal(again, frame)
