"""leading-signal: when a signal speaks, on curves that are made up, and claims that can fail."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from depthscope_lab.papers.yu2024 import leading_signal as study

CONFIG = replace(study.STUDY.full, steps=40)


def run(rate: str, seed: int, **curves: np.ndarray) -> pd.DataFrame:
    frames = [
        pd.DataFrame({"step": range(len(values)), "signal": name, "value": values}) for name, values in curves.items()
    ]
    return pd.concat(frames, ignore_index=True).assign(rate=rate, seed=seed)


def made_up(share_at: int = 10, ratio_at: int = 12, t_sim_at: int = 14, equal_at: int = 20) -> pd.DataFrame:
    """Two seeds of a world in which every signal speaks early, and never in a healthy run."""
    steps = np.arange(40)
    frames = []
    for seed in (0, 1):
        frames.append(run("healthy", seed, t_sim=steps * 0 + 0.7, share=steps * 0 + 0.9, ratio=steps * 0 + 0.2))
        t_sim = np.where(steps < t_sim_at, 0.6, np.where(steps < equal_at, 0.95, 0.999))
        share, ratio = np.where(steps < share_at, 0.8, 0.99), np.where(steps < ratio_at, 0.3, 0.01)
        frames.append(run("too large", seed, t_sim=t_sim, share=share, ratio=ratio))
    return pd.concat(frames, ignore_index=True)


def verdicts(frame: pd.DataFrame) -> list[str]:
    return [claim.verdict for claim in study.claims(frame, CONFIG)]


def test_all_claims_hold_where_they_should():
    frame = made_up()
    assert verdicts(frame) == ["reproduced"] * 5
    assert study.collapses(frame, "too large", 0) == 20
    assert [study.speaks(frame, "too large", 1, name) for name in ("t_sim", "share", "ratio")] == [14, 10, 12]
    assert study.speaks(frame, "healthy", 0, "share") is None


@pytest.mark.parametrize(
    ("late", "place"), [({"t_sim_at": 18}, 1), ({"share_at": 18}, 2), ({"ratio_at": 18}, 3), ({"equal_at": 40}, 0)]
)
def test_a_claim_fails_where_it_should(late: dict[str, int], place: int):
    assert verdicts(made_up(**late))[place] == "not reproduced"


def test_a_signal_that_speaks_in_a_healthy_run_is_told():
    frame = made_up()
    rows = (frame["rate"] == "healthy") & (frame["seed"] == 0) & (frame["signal"] == "share") & (frame["step"] > 30)
    frame.loc[rows, "value"] = 0.95
    assert verdicts(frame)[-1] == "not reproduced"


def test_one_look_alone_is_not_enough():
    holds = pd.Series([False, True, False, True, True, True, False])
    assert study.first_in_a_row(holds) == 3
    assert study.first_in_a_row(holds, looks=1) == 1
    assert study.first_in_a_row(holds, looks=4) is None


def test_tokens_that_come_apart_again_have_not_collapsed():
    frame = run("too large", 0, t_sim=np.array([0.5, 0.999, 0.5, 0.999, 0.999]))
    assert study.collapses(frame, "too large", 0) == 3
    assert study.collapses(frame[frame["step"] < 3], "too large", 0) is None


def test_the_quick_form_trains_draws_and_judges_nothing():
    shares: list[float] = []
    frame = study.STUDY.compute(study.STUDY.quick, shares.append)
    assert set(frame["signal"]) == {"loss", "t_sim", "share", "ratio"}
    assert frame["value"].notna().all()
    assert frame.groupby(["rate", "seed", "signal"]).size().eq(study.STUDY.quick.steps).all()
    assert shares[-1] == 1.0
    assert len(study.STUDY.draw(frame).axes) == 4
    assert {claim.verdict for claim in study.STUDY.claims(frame, study.STUDY.quick)} == {"not testable here"}
