"""The study of the leak: what looks ahead is seen, what does not is not accused, and every verdict can fail."""

from functools import cache

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from depthscope_lab.papers import load
from depthscope_lab.papers.causal import leak
from depthscope_lab.papers.causal.leak import (
    CAUSAL,
    LEAKING,
    MODELS,
    Depth,
    Training,
    evaluate,
    losses_in_one_pass,
    losses_token_by_token,
    similarity,
    train,
    uniform_tokens,
)

STUDY = load("causal-leak")
BELOW = "with the mean of the whole sequence, the loss of a causal model goes below the floor"
NOT_BELOW = "without a remedy, and with each causal mean, the loss does not go below the floor"
CUT = "read token by token, without a future to look at, the leaking models lose their advantage"
SAME = "with each causal mean, one pass and token by token give the same loss"
TRUNK = "a mean taken away at the FFN input keeps tokens apart on the trunk, and not on the branch alone"
SHAPE = Training(vocabulary=4, tokens=4, width=16, heads=2, depth=1, steps=4, batch=8, test_sequences=64)


@cache
def quick() -> tuple[pd.DataFrame, tuple[float, ...]]:
    shares: list[float] = []
    return STUDY.compute(STUDY.quick, shares.append), tuple(shares)


def verdicts(frame: pd.DataFrame) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in STUDY.claims(frame, STUDY.quick)}


def refuted(part: str, case: str, quantity: str, value: float) -> set[str]:
    """The claims that fall if the quick form had found this value instead."""
    frame = quick()[0].copy()
    chosen = (frame["part"] == part) & (frame["case"] == case) & (frame["quantity"] == quantity)
    assert chosen.any()
    frame.loc[chosen, "value"] = value
    return {claim for claim, verdict in verdicts(frame).items() if verdict == "not reproduced"}


class Seer(nn.Module):
    """Knows the next token wherever it is among the inputs; says nothing at the last position."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        following = 20.0 * F.one_hot(ids[:, 1:], 4)
        return torch.cat([following, torch.zeros(len(ids), 1, 4)], dim=1)


def test_the_quick_form_reproduces_every_claim_and_draws():
    frame, shares = quick()
    assert verdicts(frame) == dict.fromkeys((BELOW, NOT_BELOW, CUT, SAME, TRUNK), "reproduced")
    assert list(shares) == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0
    before = frame.copy()
    figure = STUDY.draw(frame)
    pd.testing.assert_frame_equal(frame, before)
    assert len(figure.axes) > 1
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend() is not None


def test_the_cases_are_what_they_are_called():
    assert LEAKING == ("full mean", "full mean, at output")
    assert {(MODELS[case].mixing.kind, MODELS[case].allow_leak) for case in CAUSAL} == {("causal", False)}


def test_one_pass_sees_a_seer_and_token_by_token_does_not():
    """ln V where there is no future to see, next to nothing where there is."""
    ids = uniform_tokens(SHAPE, 32, torch.Generator().manual_seed(0))
    whole, cut = losses_in_one_pass(Seer(), ids), losses_token_by_token(Seer(), ids)
    floor = torch.tensor(4.0).log()
    assert_close(whole[:, -1], floor.expand(32))
    assert whole[:, :-1].max() < 1e-6
    assert_close(cut, floor.expand(32, 4))


def test_the_error_is_over_sequences():
    model, _ = train(SHAPE, None, 0, lambda: None)
    again = Training(**vars(SHAPE) | {"test_sequences": 64 * 16})
    smaller = list(evaluate(again, model, 0))[1]["error"] / list(evaluate(SHAPE, model, 0))[1]["error"]
    assert 0.15 < smaller < 0.4  # 1/√16, give or take what 64 sequences know of a spread


def test_equal_seeds_give_equal_runs_and_other_seeds_others():
    runs = [train(SHAPE, MODELS["EMA"], seed, lambda: None)[1] for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    depth = Depth(blocks=3, tokens=8, width=16, heads=2, samples=1)
    assert similarity(depth, "EMA", 3) == similarity(depth, "EMA", 3)


def test_a_change_of_the_branch_leaves_the_trunk():
    """One block: the branch alone differs from nothing at all, and from the trunk."""
    depth = Depth(blocks=1, tokens=8, width=16, heads=2, samples=1)
    found = {case: similarity(depth, case, 0)[0] for case in ("no remedy", "prefix", "prefix, branch alone")}
    assert len(set(found.values())) == 3
    assert found["prefix"] < found["prefix, branch alone"]


@pytest.mark.parametrize("case", LEAKING)
def test_a_leak_that_is_not_learnt_is_not_claimed(case: str):
    assert refuted("test", case, "one pass", 1.3863) == {BELOW}
    assert refuted("test", case, "token by token", 1.2) == {CUT}


@pytest.mark.parametrize("case", CAUSAL)
def test_a_causal_form_that_leaks_is_seen(case: str):
    assert refuted("test", case, "one pass", 1.3) == {NOT_BELOW}
    assert refuted("test", case, "largest difference", 0.01) == {SAME}


def test_the_stacks_can_fail():
    for case in ("no remedy", "EMA", "prefix", "prefix, branch alone"):
        assert refuted("stack", case, "token_similarity", 0.5) == {TRUNK}


def test_the_test_sequences_are_not_those_of_training(monkeypatch: pytest.MonkeyPatch):
    drawn: list[torch.Tensor] = []

    def keep(*arguments) -> torch.Tensor:
        drawn.append(uniform_tokens(*arguments))
        return drawn[-1]

    monkeypatch.setattr(leak, "uniform_tokens", keep)
    model, _ = train(SHAPE, None, 0, lambda: None)
    trained = len(drawn)
    list(evaluate(SHAPE, model, 0))
    assert len(drawn) == trained + 1
    first = min(len(drawn[0]), len(drawn[-1]))
    assert not torch.equal(drawn[0][:first], drawn[-1][:first])
