"""Dong et al. 2021, Fig. 3: one attention layer, trained to move two points along a circle, applied again and again.

The paper shows that the two points fall together with attention alone, and that an MLP, a skip or a larger width slows
or stops this. In the authors' code the layer always has its *inner* skip, around attention; what is called "skip" there
is an *outer* one, which adds what the layer gives to the points. Here both are switches of their own, and each case is
run with several seeds: trained as the authors do, trained better, and not trained at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import pandas as pd

from depthscope import drawing
from depthscope.progress import Share
from depthscope_lab.papers.dong2021.toy_model import (
    BOTH,
    INNER,
    INNER_MLP,
    MLP,
    OUTER,
    PLAIN,
    PRINTED,
    TRAINED,
    UNTRAINED,
    VARIANTS,
    Training,
    arcs,
    run_free,
    train,
)
from depthscope_lab.papers.study import Claim, Study, Work, judge, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOGETHER = 0.01  # of the distance at the start: below it, until the end, two points have fallen together
MOST = 2 / 3  # of the runs
FAST = (0.1, 1e-6)  # the contraction is timed between these distances, in units of the first
_WINDOW = 0.56  # of the paper's panels


@dataclass(frozen=True)
class Config:
    widths: tuple[int, ...] = (32, 64, 128)
    trainings: tuple[Training, ...] = (UNTRAINED, PRINTED, TRAINED)
    steps: int = 300
    trials: int = 3  # seeds
    seed: int = 0  # the first; one more per trial


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per training, width, variant, seed and free-running step: the two points and their distance.

    `distance` is in units of the first; `together` is the step from which on it stays below `TOGETHER` (−1: never);
    `fall` is the number of steps from `FAST[0]` down to `FAST[1]` (−1: not reached); `off` is how far off the trained
    layer is on the arcs (see `toy_model.train`). Part `arc` has the two arcs themselves.
    """
    frames = [_arc_rows(config)]
    runs = list(product(config.trainings, config.widths, VARIANTS, range(config.seed, config.seed + config.trials)))
    work = Work(len(runs), progress)
    for training, width, variant, seed in runs:
        model, off = train(training, width, variant, seed)
        track = run_free(model, arcs(training.points)[0], config.steps)  # (steps + 1, 2, 2)
        distance = (track[:, 0] - track[:, 1]).norm(dim=-1)
        distances = (distance / distance[0]).tolist()
        about = {"part": "run", "training": training.name, "width": width, "variant": variant.name, "seed": seed}
        places = dict(zip(("x1", "y1", "x2", "y2"), track.flatten(1).T.tolist(), strict=True))
        ends = {"together": together_from(distances), "fall": fall(distances), "off": off}
        frames.append(pd.DataFrame({**about, "step": range(config.steps + 1), **places, "distance": distances, **ends}))
        work()
    return pd.concat(frames, ignore_index=True)


def _arc_rows(config: Config) -> pd.DataFrame:
    first, second = arcs(config.trainings[-1].points).unbind(dim=1)
    points = {"x1": first[:, 0], "y1": first[:, 1], "x2": second[:, 0], "y2": second[:, 1]}
    return pd.DataFrame({"part": "arc"} | {name: values.tolist() for name, values in points.items()})


def together_from(distances: list[float]) -> int:
    """The first step from which on the distance stays below `TOGETHER`; −1 if it does not (or is not a number)."""
    apart = [step for step, distance in enumerate(distances) if not distance < TOGETHER]
    first = apart[-1] + 1 if apart else 0
    return first if first < len(distances) else -1


def fall(distances: list[float]) -> int:
    """Steps from the last distance of at least `FAST[0]` to the first one behind it below `FAST[1]`; −1 if none."""
    if together_from(distances) < 0:
        return -1
    start = max(step for step, distance in enumerate(distances) if not distance < FAST[0])
    return next((step - start for step in range(start, len(distances)) if distances[step] < FAST[1]), -1)


def draw(frame: pd.DataFrame) -> Figure:
    """As Fig. 3, of the last training: variants from left to right, widths below each other.

    The title of a panel ends with how many of its runs have fallen together.
    """
    runs, arc = (rows(frame, part=part) for part in ("run", "arc"))
    shown = rows(runs, training=runs["training"].iloc[-1])
    widths, variants = sorted(shown["width"].unique()), list(shown["variant"].unique())
    figure, axes = drawing.panels(len(variants), rows=len(widths), width=2.5, height=2.7)
    places = [(width, variant) for width in widths for variant in variants]
    for ax, (width, variant) in zip(axes, places, strict=True):
        chosen = rows(shown, variant=variant, width=width)
        ends = rows(chosen, step=0)["together"]
        _draw_tracks(ax, arc, chosen, f"{variant}, d {width:.0f}: {(ends >= 0).sum()}/{len(ends)}")
    return figure


def _draw_tracks(ax: Axes, arc: pd.DataFrame, runs: pd.DataFrame, title: str) -> None:
    for x, y in (("x1", "y1"), ("x2", "y2")):
        ax.plot(arc[x], arc[y], color=drawing.LIGHT_GREY, linewidth=4, zorder=0.5)
    for _, run in runs.groupby("seed"):
        first = run["seed"].iloc[0] == runs["seed"].min()
        for x, y, colour in (("x1", "y1", drawing.BLUE), ("x2", "y2", drawing.VERMILION)):
            size, alpha = (7, 0.9) if first else (3, 0.35)
            ax.scatter(run[x], run[y], color=colour, s=size, alpha=alpha, linewidths=0)
            if first:
                ax.plot(run[x].iloc[-1:], run[y].iloc[-1:], color=drawing.BLACK, marker="x", markersize=6, zorder=3)
    ax.set(xlim=(-_WINDOW, _WINDOW), ylim=(-_WINDOW, _WINDOW), aspect="equal")
    drawing.label(ax, title, "x", "y")


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    starts = rows(frame, part="run", step=0)
    return [claim for training in config.trainings for claim in _judge(starts, training, config)]


def _judge(starts: pd.DataFrame, training: Training, config: Config) -> list[Claim]:
    chosen = rows(starts, training=training.name)
    fallen = {variant.name: _fallen(chosen, variant.name) for variant in VARIANTS}
    widths = sorted(chosen["width"].unique())
    by_width = {width: _fallen(rows(chosen, width=width), PLAIN.name) for width in widths}
    plain = rows(chosen, variant=PLAIN.name)
    caught = plain[plain["together"] >= 0]
    told = "; ".join(f"{name} {share:.0%}" for name, share in fallen.items())
    when = f"{training.name}: "
    off = chosen.groupby("variant")["off"].median()
    note = f"median of how far off a step is, squared, in squared steps: {_numbers(off)}" if training.epochs else ""
    return [
        judge(
            f"{when}with attention alone the two points fall together",
            paper="Fig. 3, “plain”, whose code has the inner skip" if training.epochs else "not in the paper; ours",
            ours=f"{fallen[PLAIN.name]:.0%} of {len(plain)} runs in {config.steps} steps, after "
            f"{_median(caught['together'])} steps (median), and from {FAST[0]:g} to {FAST[1]:g} of the first distance "
            f"in {_median(caught.loc[caught['fall'] >= 0, 'fall'])}; with the inner skip {fallen[INNER.name]:.0%}",
            tolerance=f"below {TOGETHER:.0%} of the first distance until the end, in at least {MOST:.0%} of the runs",
            holds=bool(fallen[PLAIN.name] >= MOST),
            note=note,
        ),
        judge(
            f"{when}skips slow or stop the fall",
            paper="Fig. 3: “convergence slows down or stops … when either MLP or skip connections are added”",
            ours=f"runs that fall together: {told}",
            tolerance="fewer runs than with attention alone, with the inner skip, with the outer one, and with both",
            holds=all(fallen[variant.name] < fallen[PLAIN.name] for variant in (INNER, OUTER, BOTH)),
        ),
        judge(
            f"{when}an MLP slows or stops the fall",
            paper="Fig. 3, as above; the authors' MLP comes with the inner skip",
            ours=f"runs that fall together: MLP {fallen[MLP.name]:.0%}, plain {fallen[PLAIN.name]:.0%}; with the inner "
            f"skip {fallen[INNER_MLP.name]:.0%} and {fallen[INNER.name]:.0%}",
            tolerance="fewer runs than without it",
            holds=fallen[MLP.name] < fallen[PLAIN.name],
        ),
        judge(
            f"{when}a larger width slows or stops the fall of attention alone",
            paper="Fig. 3: “convergence slows down or stops as the dimension increases”",
            ours="runs that fall together: "
            + ", ".join(f"d = {width:.0f} {share:.0%}" for width, share in by_width.items())
            + "; median steps "
            + ", ".join(_median(rows(caught, width=width)["together"]) for width in widths),
            tolerance="fewer runs, or as many in more steps, at the largest width than at the smallest",
            holds=_slower(caught, by_width, widths[0], widths[-1]),
        ),
    ]


def _slower(caught: pd.DataFrame, shares: dict[Any, float], small: Any, large: Any) -> bool:
    """Whether fewer runs fall together at the large width, or as many do so later."""
    if shares[small] != shares[large] or not shares[small]:
        return bool(shares[large] < shares[small])
    steps = caught.groupby("width")["together"].median()
    return bool(steps[large] > steps[small])


def _fallen(starts: pd.DataFrame, variant: str) -> float:
    return float((rows(starts, variant=variant)["together"] >= 0).mean())


def _median(steps: pd.Series) -> str:
    return f"{steps.median():.0f}" if len(steps) else "—"


def _numbers(values: pd.Series) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in values.items())


STUDY = Study(
    "dong2021-toy",
    full=Config(),
    quick=Config(
        widths=(16, 32),
        trainings=(UNTRAINED, Training("trained", points=200, batch=10**6, epochs=30, rate=3e-3, falling=True)),
        steps=60,
        trials=2,
    ),
    compute=compute,
    draw=draw,
    claims=claims,
)
