"""The quick form of gradient-roles: what it computes, and verdicts that can fail."""

from functools import cache

import pandas as pd
import pytest

from depthscope_lab.papers import load
from depthscope_lab.papers.study import Study


@cache
def quick() -> tuple[Study, pd.DataFrame]:
    study = load("gradient-roles")
    return study, study.compute(study.quick, lambda _share: None)


def verdicts(frame: pd.DataFrame) -> dict[str, str]:
    study, _ = quick()
    return {claim.claim: claim.verdict for claim in study.claims(frame, study.quick)}


def changed(model: str, measure: str, change) -> set[str]:
    """The claims that another curve turns."""
    frame = quick()[1].copy()
    rows = (frame["model"] == model) & (frame["measure"] == measure)
    assert rows.any()
    frame.loc[rows, "value"] = change(frame.loc[rows, "value"])
    before, after = verdicts(quick()[1]), verdicts(frame)
    return {claim for claim, verdict in after.items() if verdict != before[claim]}


def test_roles_add_up_in_every_model():
    _, frame = quick()
    by_measure = frame.pivot_table(index=["model", "block"], columns="measure", values="value")
    parts = [f"{role}_gradient" for role in ("queries_keys", "values_output", "ffn", "norms")]
    whole = (by_measure[parts] ** 2).sum(axis=1) ** 0.5
    assert (whole / by_measure["weight_gradient"]).sub(1).abs().max() < 1e-9
    assert set(frame["model"]) == {"post-norm", "pre-norm", "de-escalated"}


def test_the_three_models_have_the_same_layers():
    """They read the same first tokens with the same weights: in block 1 of the two forms of BERT all is equal."""
    _, frame = quick()
    first = frame[(frame["block"] == 1) & (frame["measure"] == "read_token_diversity")].set_index("model")["value"]
    assert first["post-norm"] == pytest.approx(first["de-escalated"], rel=1e-6)
    assert first["post-norm"] == pytest.approx(first["pre-norm"], rel=1e-3)  # a norm of normed embeddings


def test_the_picture_is_drawn():
    study, frame = quick()
    assert len(study.draw(frame).axes) == 4


VANISH = "gradients do not vanish in post-norm, by role"
LAW = "the gradient of queries and keys goes like t_div: ratio to values and output = c·t_div"
LEARN = "de-escalation lets attention learn in every block, post-norm does not"
SIZE = "de-escalation does not discount self-attention: the size of its branch"
CARRIES = "de-escalation does not discount self-attention: what its branch carries"
PRE = "in pre-norm queries and keys lose their gradient too, but more slowly"


def test_verdicts_of_the_quick_form():
    found = verdicts(quick()[1])
    assert set(found) == {VANISH, LAW, LEARN, SIZE, CARRIES, PRE}
    refuted = {claim for claim, verdict in found.items() if verdict != "reproduced"}
    assert refuted == {VANISH, SIZE}


@pytest.mark.parametrize(
    ("model", "measure", "change", "turned"),
    [
        ("post-norm", "law", lambda v: 2 * v, {LAW}),
        ("post-norm", "law", lambda v: v**2, {LAW}),
        ("de-escalated", "queries_keys_gradient", lambda v: v / 100, {LEARN}),
        ("pre-norm", "queries_keys_gradient", lambda v: v.iloc[0], {PRE}),
        ("de-escalated", "branch_branch_ratio", lambda v: 0 * v + 1, {SIZE}),
        ("de-escalated", "branch_token_diversity", lambda v: 0 * v, {CARRIES}),
    ],
)
def test_claims_can_fail(model: str, measure: str, change, turned: set[str]):
    assert changed(model, measure, change) >= turned


def test_without_a_collapse_nothing_is_said():
    frame = quick()[1].copy()
    frame.loc[frame["measure"] == "read_token_similarity", "value"] = 0.3
    found = verdicts(frame)
    assert {claim for claim, verdict in found.items() if verdict == "not testable here"} == {
        VANISH,
        LAW,
        LEARN,
        SIZE,
        CARRIES,
    }
