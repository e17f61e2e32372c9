"""The mean of the whole sequence lets a causal model see the future; a causal mean does not. Ours.

Yu & Zhang 2024 subtract the mean over all tokens also in Transformer-XL, a language model. On independent
uniform tokens no model that sees only the past can have a loss below ln V, so whatever goes below has looked
ahead. Causal language models, post-norm, are trained with each form; and 60-block stacks at initialisation show
that the causal forms keep tokens apart all the same, if they act on the trunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import pandas as pd

from depthscope import drawing
from depthscope.progress import Share
from depthscope_lab.papers.causal.leak_runs import (
    CAUSAL,
    LEAKING,
    MODELS,
    NONE,
    STACKS,
    Depth,
    Training,
    evaluate,
    rows,
    similarity,
    train,
)
from depthscope_lab.papers.study import Claim, Study, judge

STACKS_SHARE = 0.1  # of the time
BELOW, NOT_BELOW = 10, 3  # standard errors
APART, COLLAPSED = 0.2, 0.95
_STYLES: dict[str, dict[str, Any]] = {
    NONE: {"color": drawing.BLACK, "linewidth": 3.2},
    "full mean": {"color": drawing.VERMILION},
    "full mean, at output": {"color": drawing.ORANGE},
    "prefix": {"color": drawing.BLUE},
    "prefix, at output": {"color": drawing.SKY, "linestyle": "--"},
    "prefix, κ = 1": {"color": drawing.GREEN, "linestyle": "--"},
    "EMA": {"color": drawing.PURPLE, "linestyle": ":", "linewidth": 2.2},
    "full mean, branch alone": {"color": drawing.VERMILION, "linestyle": "--"},
    "prefix, branch alone": {"color": drawing.BLUE, "linestyle": "--"},
}


@dataclass(frozen=True)
class Config:
    seed: int = 0
    training: Training = field(default_factory=Training)
    stacks: Depth = field(default_factory=Depth)


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: part, case, step, position, block, draw (−1 where none), quantity, value, error (nan where none).

    `training`: the loss of every step. `training, smooth`: its means over fiftieths of the training. `test`: on fresh
    tokens, all positions in one pass and token by token. `stack`: t_sim behind every block. `floor`: ln V.
    """
    frames = [rows("floor", "uniform tokens", quantity=["loss"], value=math.log(config.training.vocabulary))]
    smooth: list[pd.DataFrame] = []
    shape, done = config.training, 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress((1 - STACKS_SHARE) * done / (shape.steps * len(MODELS)))

    for case, remedy in MODELS.items():
        model, losses = train(shape, remedy, config.seed, advance)
        frames.append(rows("training", case, step=range(1, shape.steps + 1), quantity="loss", value=losses))
        smooth.append(rows("training, smooth", case, quantity="loss", **_smooth(losses)))
        frames.append(pd.DataFrame(evaluate(shape, model, config.seed)).assign(part="test", case=case))
    depth = config.stacks
    for place, (case, stack) in enumerate(STACKS.items(), start=1):
        for draw in range(depth.draws):
            found = similarity(depth, stack, config.seed * depth.draws + draw)
            blocks = range(1, depth.blocks + 1)
            frames.append(rows("stack", case, block=blocks, draw=draw, quantity="token_similarity", value=found))
        progress(1 - STACKS_SHARE * (1 - place / len(STACKS)))
    frame = pd.concat([*frames, *smooth], ignore_index=True)
    for column in ("step", "position", "block", "draw"):
        frame[column] = frame[column].fillna(-1).astype(int)
    return frame[["part", "case", "step", "position", "block", "draw", "quantity", "value", "error"]]


def _smooth(losses: list[float]) -> dict[str, list[Any]]:
    """Means over some fifty windows of steps; each stands at the step in the middle of its window."""
    window = max(1, len(losses) // 50)
    windows = [range(start, min(start + window, len(losses))) for start in range(0, len(losses), window)]
    return {
        "step": [1 + (steps[0] + steps[-1]) // 2 for steps in windows],
        "value": [fmean(losses[step] for step in steps) for steps in windows],
    }


def draw(frame: pd.DataFrame) -> Any:
    figure, (learning, testing, stack) = drawing.panels(3, width=4.2, height=4.2)
    floor = _floor(frame)
    smooth = frame[frame["part"] == "training, smooth"]
    for case in MODELS:
        losses = smooth[smooth["case"] == case]
        learning.plot(losses["step"], losses["value"], label=case, **{"linewidth": 1.6} | _STYLES[case])
    learning.axhline(floor, color=drawing.GREY, linewidth=1, linestyle="--", label="ln V, the floor")
    learning.set(ylim=(0, 1.1 * floor), xlim=(0, None))
    drawing.label(learning, "Training on random tokens", "step", "loss, nats per token")

    for place, (quantity, colour, name) in enumerate(
        (
            ("one pass", drawing.BLUE, "all positions in one pass"),
            ("token by token", drawing.ORANGE, "token by token: no future"),
        )
    ):
        values = [_test(frame, case, quantity).value for case in MODELS]
        heights = [number - 0.2 + 0.4 * place for number in range(len(MODELS))]
        testing.barh(heights, values, height=0.38, color=colour, label=name)
    testing.axvline(floor, color=drawing.GREY, linewidth=1, linestyle="--", label="ln V, the floor")
    testing.set_yticks(range(len(MODELS)), list(MODELS))
    testing.invert_yaxis()
    drawing.label(testing, "Tested on fresh tokens", "loss, nats per token", "remedy")

    for case in (case for case in STACKS if case in _STYLES):
        curve = _similarity(frame, case)
        stack.plot(curve.index, curve, label=case, **{"linewidth": 1.6} | _STYLES[case])
    stack.set_ylim(0, 1.02)
    drawing.block_axis(stack, int(frame["block"].max()))
    drawing.label(stack, "Causal stack at initialisation", "block", "t_sim")
    drawing.legend_below([learning, stack], columns=2)
    drawing.legend_below(testing, columns=1)
    return figure


def _floor(frame: pd.DataFrame) -> float:
    return float(frame.loc[frame["part"] == "floor", "value"].iloc[0])


@dataclass(frozen=True)
class _Loss:
    value: float
    error: float

    def above(self, floor: float) -> float:
        """In standard errors; negative below."""
        return (self.value - floor) / self.error

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.2g}"


def _test(frame: pd.DataFrame, case: str, quantity: str, position: int = -1) -> _Loss:
    row = frame[
        (frame["part"] == "test")
        & (frame["case"] == case)
        & (frame["quantity"] == quantity)
        & (frame["position"] == position)
    ].iloc[0]
    return _Loss(float(row["value"]), float(row["error"]))


def _similarity(frame: pd.DataFrame, case: str) -> pd.Series:
    """Mean over draws, per block."""
    stack = frame[(frame["part"] == "stack") & (frame["case"] == case)]
    return stack.groupby("block")["value"].mean()


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    return [*_judge_losses(frame, config.training), *_judge_stacks(frame, config.stacks)]


def _judge_losses(frame: pd.DataFrame, shape: Training) -> list[Claim]:
    floor = _floor(frame)
    whole, cut = (
        {case: _test(frame, case, quantity) for case in MODELS} for quantity in ("one pass", "token by token")
    )
    last = {case: _test(frame, case, "one pass, position", shape.tokens) for case in LEAKING}
    same = {case: _test(frame, case, "largest difference").value for case in (NONE, *CAUSAL)}
    honest = f"at most {NOT_BELOW} standard errors (over sequences) below ln V = {floor:.4f}"
    return [
        judge(
            "with the mean of the whole sequence, the loss of a causal model goes below the floor",
            paper="its Transformer-XL subtracts that mean at the FFN input; no word on causality",
            ours=f"{_list(whole, LEAKING)}; floor {floor:.4f}",
            tolerance=f"more than {BELOW} standard errors (over sequences) below ln V",
            holds=all(whole[case].above(floor) < -BELOW for case in LEAKING),
            note=f"not 0 but ln V / n = {floor / shape.tokens:.3f} is left at best: the last target is in no input",
        ),
        judge(
            "without a remedy, and with each causal mean, the loss does not go below the floor",
            paper="not in the paper; ours: no one can guess a uniform token from those before it",
            ours=_list(whole, (NONE, *CAUSAL)),
            tolerance=honest,
            holds=all(whole[case].above(floor) >= -NOT_BELOW for case in (NONE, *CAUSAL)),
        ),
        judge(
            "read token by token, without a future to look at, the leaking models lose their advantage",
            paper="not in the paper; this is how a language model writes",
            ours=_list(cut, LEAKING),
            tolerance=honest,
            holds=all(cut[case].above(floor) >= -NOT_BELOW for case in LEAKING),
        ),
        judge(
            "at the last position, whose target is no input, the leaking models have no advantage",
            paper="not in the paper; a control: the advantage is the leak's, not the model's",
            ours=_list(last, LEAKING),
            tolerance=honest,
            holds=all(last[case].above(floor) >= -NOT_BELOW for case in LEAKING),
        ),
        judge(
            "with each causal mean, one pass and token by token give the same loss",
            paper="not in the paper; ours: no position sees a later one",
            ours=f"largest difference of a token's loss: {max(same.values()):.0e}",
            tolerance="1e-4 nats: rounding of float32 in sums of other lengths",
            holds=max(same.values()) < 1e-4,
        ),
    ]


def _list(found: dict[str, _Loss], cases: tuple[str, ...]) -> str:
    return "; ".join(f"{case} {found[case]}" for case in cases)


def _judge_stacks(frame: pd.DataFrame, shape: Depth) -> list[Claim]:
    end = {case: float(_similarity(frame, case).iloc[-1]) for case in STACKS}
    where = f"t_sim behind block {shape.blocks}"
    forms = [case for case in CAUSAL if case in STACKS]
    trunks = ("full mean", "prefix", "bidirectional, full mean")
    branches = [f"{case}, branch alone" for case in trunks]

    def told(cases: Any) -> str:
        return "; ".join(f"{case} {end[case]:.3f}" for case in cases)

    return [
        judge(
            f"a causal post-norm stack of {shape.blocks} blocks collapses without a remedy",
            paper="not in the paper for causal models",
            ours=f"{where}: {end[NONE]:.4f}",
            tolerance=f"above {COLLAPSED}",
            holds=end[NONE] > COLLAPSED,
        ),
        judge(
            "each causal mean keeps tokens apart, as the leaking mean does",
            paper="not in the paper for causal models",
            ours=f"{where}: {told([*forms, 'full mean'])}",
            tolerance=f"below {APART}; unrelated tokens have 1/n = {1 / shape.tokens:.3f}",
            holds=all(end[case] < APART for case in [*forms, "full mean"]),
        ),
        judge(
            "a mean taken away at the FFN input keeps tokens apart on the trunk, and not on the branch alone",
            paper="at the FFN input, for Transformer-XL; whether on the trunk is not said",
            ours=f"{where}: trunk: {told(trunks)}; branch: {told(branches)}",
            tolerance=f"below {APART} on the trunk, above {COLLAPSED} on the branch alone",
            holds=all(end[case] < APART for case in trunks) and all(end[case] > COLLAPSED for case in branches),
        ),
    ]


STUDY = Study(
    "causal-leak",
    full=Config(),
    quick=Config(
        training=Training(vocabulary=4, tokens=4, width=32, depth=2, steps=60, batch=32, rate=5e-3, test_sequences=512),
        stacks=Depth(tokens=32, width=64, heads=4, samples=2, draws=1),
    ),
    compute=compute,
    draw=draw,
    claims=claims,
)
