"""The study of Fig. 7: what it trains, that a look ahead shows, and verdicts that can fail."""

import math
import signal
from functools import cache

import pandas as pd
import pytest
import torch

from depthscope_lab.models import TransformerXL
from depthscope_lab.papers import load
from depthscope_lab.papers.yu2024 import fig7
from depthscope_lab.papers.yu2024.fig7 import (
    CASES,
    CAUSAL,
    CLIPPED,
    LEAKING,
    PLAIN,
    POST,
    PRE,
    WARM_UP,
    Training,
    configured,
    run_case,
    similarity_at_start,
    unigram_loss,
)
from tiny_language import corpus, small

STUDY = load("yu2024-fig7")
(RATE,) = STUDY.quick.rates
AT = f"learning rate {RATE:g}: "
FAILS = f"{AT}post-norm without warm-up and clipping fails"
REACHES = f"{AT}the paper's de-escalation, which sees the future, reaches pre-norm"
LEAK = f"{AT}with the future hidden, the model with the paper's de-escalation has a higher loss"
CAUSAL_REACHES = f"{AT}a causal de-escalation reaches pre-norm"
CONTROL = f"{AT}models that do not see the future have the same loss in one pass and with the future hidden"
ALIKE = f"{AT}where post-norm fails, its tokens have become alike"
REMEDY = f"{AT}what post-norm lacks is warm-up or clipping"
START = "at its own initialisation the post-norm model of 4 blocks has collapsed"
GPU = "the paper's own run, 201 M parameters on WikiText-103 for 50 000 steps, comes out as published"


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
    put(frame, 1.0, part="start", case=POST)
    losses = {POST: 6.0, PRE: 4.0, LEAKING: 3.0, CAUSAL: 4.05, WARM_UP: 4.2, CLIPPED: 6.0}
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
    assert set(frame.loc[frame["part"] == "training", "case"]) == set(CASES)
    assert set(frame.loc[frame["part"] == "start", "case"]) == set(PLAIN)
    assert frame["value"].notna().all()
    told = verdicts(frame)
    assert set(told) == {FAILS, REACHES, LEAK, CAUSAL_REACHES, CONTROL, ALIKE, REMEDY, START, GPU}
    assert (told[CONTROL], told[GPU]) == ("reproduced", "not testable here")
    before = frame.copy()
    figure = STUDY.draw(frame)
    pd.testing.assert_frame_equal(frame, before)
    assert len(figure.axes) > 1
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend() is not None


def test_every_verdict_can_fall():
    assert {name for name, verdict in verdicts(as_in_the_paper()).items() if verdict != "reproduced"} == {GPU}
    loss = {"part": "training", "quantity": "loss"}
    assert refuted(4.3, case=POST, **loss) == {FAILS, REMEDY}
    assert refuted(4.2, case=LEAKING, **loss) == {REACHES}
    assert refuted(4.2, case=CAUSAL, **loss) == {CAUSAL_REACHES}
    assert refuted(5.5, case=WARM_UP, **loss) == {REMEDY}
    assert refuted(3.0, part="validation", case=LEAKING, quantity="future hidden") == {LEAK}
    assert refuted(4.1, part="validation", case=CAUSAL, quantity="future hidden") == {CONTROL}
    assert refuted(0.5, part="training", case=POST, quantity="token_similarity") == {ALIKE}
    assert refuted(0.6, part="start", case=POST) == {START}


def test_where_nobody_has_learnt_nothing_is_compared():
    frame = as_in_the_paper()
    put(frame, 4.05, part="floor")
    told = verdicts(frame)
    assert {told[claim] for claim in (FAILS, REACHES, CAUSAL_REACHES)} == {"not testable here"}


def test_a_case_differs_in_what_its_name_says():
    shape = Training(steps=50, width=64)
    found = {name: configured(shape, case, 1e-3, seed=3) for name, case in CASES.items()}
    assert {name: config.warmup_steps for name, config in found.items() if config.warmup_steps} == {WARM_UP: 10}
    assert {name: config.clip_norm for name, config in found.items() if config.clip_norm} == {CLIPPED: 0.25}
    assert [found[name].variant for name in PLAIN] == ["post", "pre", "deescalated-leaking", "deescalated"]
    for config in found.values():
        assert config.width * config.init_std**2 == pytest.approx(410 * 0.02**2)
        assert (config.lr, config.seed, config.steps, config.schedule) == (1e-3, 3, 50, "cosine")


def test_only_the_model_that_looks_ahead_has_two_losses():
    for variant, same in {"post": True, "deescalated": True, "deescalated-leaking": False}.items():
        rows = run_case(small(variant, init_std=0.5), corpus(), 2, lambda _share: None)
        ends = {row["quantity"]: row["value"] for row in rows if row["part"] == "validation"}
        assert (abs(ends["one pass"] - ends["future hidden"]) < 1e-5) == same


def test_a_training_that_breaks_off_is_a_failure_not_an_error(monkeypatch: pytest.MonkeyPatch):
    def breaks(*_: object, **__: object):
        yield 0, math.nan, None

    monkeypatch.setattr(fig7, "train_carrying", breaks)
    rows = run_case(small(), corpus(), 2, lambda _share: None)
    assert [math.isnan(row["value"]) for row in rows] == [True] * 3
    frame = as_in_the_paper()
    put(frame, math.nan, part="validation", case=POST)
    assert verdicts(frame)[FAILS] == "reproduced"


def test_interrupted_in_training_the_study_ends():
    def interrupt(share: float) -> None:
        if share > 0.3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_case(small(), corpus(), 2, interrupt)


def test_word_frequencies_give_the_entropy_of_independent_words():
    """Uniform words: ln V, but for what 116 words do not know of them."""
    assert unigram_loss(corpus()) == pytest.approx(math.log(13), rel=0.1)


def test_similarity_at_the_start_sees_every_block_and_a_collapse(monkeypatch: pytest.MonkeyPatch):
    found = similarity_at_start(small("post"), corpus(), rows=2, tokens=5)
    assert len(found) == 2
    assert all(0 < value < 0.9 for value in found)
    alike = fig7.build_transformer_xl

    def all_words_equal(*arguments) -> TransformerXL:
        model = alike(*arguments)
        with torch.no_grad():
            model.softmax.weight.copy_(model.softmax.weight[:1].expand_as(model.softmax.weight).clone())
        return model

    monkeypatch.setattr(fig7, "build_transformer_xl", all_words_equal)
    assert similarity_at_start(small("post"), corpus(), rows=2, tokens=5) == pytest.approx([1.0, 1.0])
