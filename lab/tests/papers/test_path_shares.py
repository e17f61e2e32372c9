"""The study of path lengths in real models: what its claims rest on, and that they can fail."""

from functools import cache

import pandas as pd
import pytest

from depthscope_lab.papers import load
from depthscope_lab.papers.dong2021.shares import STUDY, mean_length


@cache
def quick() -> pd.DataFrame:
    return STUDY.compute(STUDY.quick, lambda _share: None)


def verdicts(frame: pd.DataFrame) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in STUDY.claims(frame, STUDY.quick)}


def test_shares_and_counts_add_up():
    assert load("path-shares") is STUDY
    sums = quick().groupby(["model", "sample"])[["projection_share", "counted"]].sum()
    assert sums.to_numpy() == pytest.approx(1, abs=1e-5)


def test_the_mean_length_is_weighed():
    rows = pd.DataFrame({"length": [-1, 0, 1, 2], "share": [0.5, 0.1, 0.1, 0.2]})
    assert mean_length(rows, "share") == pytest.approx(0.5 / 0.4)  # the constant part has no length


def test_its_claims_can_fail_and_hold():
    frame = quick()
    found = verdicts(frame)
    first, majority, *uniform = found
    as_counted = frame.assign(projection_share=frame["counted"].where(frame["length"] >= 0, 0.0))
    assert verdicts(as_counted)[first] == "reproduced"
    assert verdicts(as_counted)[majority] == "not reproduced"
    alike = frame.assign(composite_residual=0.5 ** frame["length"].clip(lower=0))
    unlike = frame.assign(composite_residual=1.0)
    for claim in uniform:
        assert verdicts(alike)[claim] in ("reproduced", "not testable here")
        assert verdicts(unlike)[claim] in ("not reproduced", "not testable here")


def test_without_a_pretrained_model_nothing_is_said_of_one():
    fresh = quick()[quick()["weights"] == "fresh"]
    assert list(verdicts(fresh).values())[-1] == "not testable here"
