"""The study of Fig. 7: what it trains, that a look ahead shows, and verdicts that can fail."""

import math
import signal
from functools import cache

import pandas as pd
import pytest

from depthscope_lab.papers import load
from depthscope_lab.papers.yu2024 import fig7
from depthscope_lab.papers.yu2024.fig7 import (
    CAUSAL,
    LEAKING,
    POST,
    PRE,
    VARIANTS,
    Training,
    configured,
    run_case,
    unigram_loss,
)
from tiny_language import corpus, small

STUDY = load("yu2024-fig7")
(RATE,) = STUDY.quick.rates
AT = f"learning rate {RATE:g}: "
LEAK = f"{AT}with the future hidden, the model with the paper's de-escalation has a higher loss"
CAUSAL_REACHES = f"{AT}a causal de-escalation reaches pre-norm"
ALIKE = f"{AT}where post-norm fails, its tokens have become alike"


@cache
def quick() -> tuple[pd.DataFrame, tuple[float, ...]]:
    shares: list[float] = []
    return STUDY.compute(STUDY.quick, shares.append), tuple(shares)


def put(frame: pd.DataFrame, value: float, **where: str) -> None:
    chosen = pd.Series(True, index=frame.index)
    for column, wanted in where.items():
        chosen &= frame[column] == wanted
    assert chosen.any()
    frame.loc[chosen, "value"] = value


def as_in_the_paper() -> pd.DataFrame:
    """Numbers with which every claim holds."""
    frame = quick()[0].copy()
    put(frame, 6.0, part="floor")
    losses = {POST: 6.0, PRE: 4.0, LEAKING: 3.0, CAUSAL: 4.05}
    for name, loss in losses.items():
        put(frame, loss, part="training", case=name, quantity="loss")
        put(frame, 0.99 if loss == 6.0 else 0.5, part="training", case=name, quantity="token_similarity")
        put(frame, loss, part="validation", case=name)
    put(frame, 7.0, part="validation", case=LEAKING, quantity="future hidden")
    return frame


def verdicts(frame: pd.DataFrame) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in STUDY.claims(frame, STUDY.quick)}


def refuted(value: float, **where: str) -> set[str]:
    """The claims that fall if this number were another."""
    frame = as_in_the_paper()
    put(frame, value, **where)
    return {claim for claim, verdict in verdicts(frame).items() if verdict == "not reproduced"}


def test_the_quick_form_trains_every_case_and_draws():
    frame, shares = quick()
    assert list(shares) == sorted(shares)
    assert shares[-1] == 1.0
    assert set(frame.loc[frame["part"] == "training", "case"]) == set(VARIANTS)
    assert frame["value"].notna().all()
    told = verdicts(frame)
    assert set(told) == {LEAK, CAUSAL_REACHES, ALIKE}
    before = frame.copy()
    figure = STUDY.draw(frame)
    pd.testing.assert_frame_equal(frame, before)
    assert len(figure.axes) > 1
    for axes in (axes for axes in figure.axes if axes.axison):
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend() is not None


def test_every_verdict_can_fall():
    assert set(verdicts(as_in_the_paper()).values()) == {"reproduced"}
    loss = {"part": "training", "quantity": "loss"}
    assert refuted(4.2, case=CAUSAL, **loss) == {CAUSAL_REACHES}
    assert refuted(3.0, part="validation", case=LEAKING, quantity="future hidden") == {LEAK}
    assert refuted(0.5, part="training", case=POST, quantity="token_similarity") == {ALIKE}


def test_where_nobody_has_learnt_nothing_is_compared():
    frame = as_in_the_paper()
    put(frame, 4.05, part="floor")
    assert verdicts(frame)[CAUSAL_REACHES] == "not testable here"


def test_a_case_differs_in_its_variant_alone():
    for variant in VARIANTS.values():
        config = configured(Training(steps=50, width=64), variant, 1e-3, seed=3)
        assert config.width * config.init_std**2 == pytest.approx(410 * 0.02**2)
        assert (config.variant, config.lr, config.seed, config.steps, config.schedule) == (
            variant,
            1e-3,
            3,
            50,
            "cosine",
        )


def test_only_the_model_that_looks_ahead_has_two_losses():
    for variant, same in {"post": True, "deescalated": True, "deescalated-leaking": False}.items():
        rows = run_case(small(variant, init_std=0.5), corpus(), 2, lambda _share: None)
        ends = {row["quantity"]: row["value"] for row in rows if row["part"] == "validation"}
        assert (abs(ends["one pass"] - ends["future hidden"]) < 1e-5) == same


def test_a_training_that_breaks_off_is_a_failure_not_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fig7, "steps", lambda *_, **__: iter([(0, math.nan)]))
    rows = run_case(small(), corpus(), 2, lambda _share: None)
    assert [math.isnan(row["value"]) for row in rows] == [True] * 3


def test_interrupted_in_training_the_study_ends():
    def interrupt(share: float) -> None:
        if share > 0.3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_case(small(), corpus(), 2, interrupt)


def test_word_frequencies_give_the_entropy_of_independent_words():
    """Uniform words: ln V, but for what 116 words do not know of them."""
    assert unigram_loss(corpus()) == pytest.approx(math.log(13), rel=0.1)
