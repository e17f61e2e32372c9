"""Dong et al. 2021, Fig. 3: one attention layer, trained to move two points along a circle, applied again and again.

The paper shows that the two points fall together with attention alone, and that an MLP, a skip or a larger width slows
or stops this. In the authors' code the layer always has its *inner* skip, around attention; what is called "skip" there
is an *outer* one, which adds what the layer gives to the points. Here both are switches of their own, and each case is
run with several seeds. It is trained longer than the authors train: at their rate the layer does not learn the circle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope import drawing
from depthscope.models import Block, BlockConfig, FeedForward
from depthscope.models.wiring import Wired, Wiring
from depthscope.progress import Share
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.trained import steps
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, rows, spell

HEADS, RADIUS = 2, 0.3
TOGETHER = 0.01  # of the distance at the start: below it, until the end, two points have fallen together
MOST = 2 / 3  # of the runs
RATE = 3e-3  # falls to 0, along half a cosine
_WINDOW = 0.56  # of the paper's panels


@dataclass(frozen=True)
class Variant:
    """Which parts there are. `inner`: the skips around attention and FFN; `outer`: the layer adds to the points."""

    name: str
    mlp: bool = False
    inner: bool = False
    outer: bool = False


PLAIN, MLP = Variant("plain"), Variant("MLP", mlp=True)
INNER, OUTER = Variant("inner skip", inner=True), Variant("outer skip", outer=True)
BOTH, INNER_MLP = Variant("both skips", inner=True, outer=True), Variant("inner skip, MLP", mlp=True, inner=True)
VARIANTS = (PLAIN, MLP, INNER, INNER_MLP, OUTER, BOTH)


@dataclass(frozen=True)
class Config:
    widths: tuple[int, ...] = (32, 64, 128)
    points: int = 1000  # of the whole circle
    every: int = 4  # only every so many places are learnt from, all at once
    epochs: int = 1000
    steps: int = 300
    trials: int = 3  # seeds
    seed: int = 0  # the first; one more per trial


def wiring_of(variant: Variant) -> Wiring:
    """Norm(attention), with the variant's FFN and inner skips."""

    def run(block: Wired, x: Tensor, given: Any) -> Tensor:
        at = block.stations
        x = at["input"](x)
        branch = at["attention_branch"](block.attend(x, given))
        y = block.norm1(at["after_attention"](x + branch if variant.inner else branch))
        if variant.mlp:
            branch = at["ffn_branch"](block.ffn(block.enter_ffn(y, given)))
            y = block.norm2(at["after_ffn"](y + branch if variant.inner else branch))
        return at["output"](y)

    return Wiring(f"toy: {variant.name}", run, final_norm=False)


class Mover(nn.Module):
    """Points (batch, 2, 2) → where they are to be next (batch, 2, 2): Linear 2 → d, norm, one layer, Linear d → 2."""

    def __init__(self, width: int, variant: Variant, generator: torch.Generator):
        super().__init__()
        self.variant = variant
        self.enter, self.leave = nn.Linear(2, width), nn.Linear(width, 2)
        self.norm = nn.LayerNorm(width)
        ffn = partial(FeedForward, activation=nn.GELU)
        self.block = Block(BlockConfig(width, HEADS, ffn_width=width, ffn=ffn, placement=wiring_of(variant)), generator)
        for linear in (self.enter, self.leave):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5, generator=generator)
            nn.init.zeros_(linear.bias)

    def forward(self, points: Tensor) -> Tensor:
        moved = self.leave(self.block(self.norm(self.enter(points))))
        return points + moved if self.variant.outer else moved


def arcs(points: int) -> Tensor:
    """Two half circles, (points/2, 2, 2): two tokens that start opposite to one another, in even steps."""
    angles = torch.arange(points // 2, dtype=torch.float64) * (2 * math.pi / points)
    turned = torch.stack([angles, angles + math.pi], dim=1)  # (steps, tokens)
    return RADIUS * torch.stack([turned.cos(), turned.sin()], dim=-1)


def train(config: Config, width: int, variant: Variant, seed: int) -> tuple[Mover, float]:
    """Teacher forcing, from every place to the next. Returns the model, in float64, and how far off it is on the arcs.

    That is the mean squared distance to the next place in units of the squared length of a step: standing still has 1.
    """
    model = Mover(width, variant, torch.Generator().manual_seed(seed))
    path = arcs(config.points)
    now, following = (part[:: config.every].float() for part in (path[:-1], path[1:]))

    def rate(step: int) -> float:
        return RATE * (1 + math.cos(math.pi * step / config.epochs)) / 2

    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    for _step in steps(lambda _step: F.mse_loss(model(now), following), optimiser, config.epochs, rate=rate):
        pass
    model = model.double().eval()
    with torch.no_grad():
        off = (model(path[:-1]) - path[1:]).square().sum() / (path[1:] - path[:-1]).square().sum()
    return model, float(off)


@torch.no_grad()
def run_free(model: Mover, start: Tensor, steps: int) -> Tensor:
    """Its own predictions fed back: (steps + 1, 2, 2), in the model's precision."""
    found = [start]
    for _ in range(steps):
        found.append(model(found[-1].unsqueeze(0)).squeeze(0))
    return torch.stack(found)


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per width, variant, seed and free-running step: the two points and their distance.

    `distance` is in units of the first; `together` is the step from which on it stays below `TOGETHER` (−1: never);
    `off` is how far off the trained layer is on the arcs (see `train`). Part `arc` has the two arcs themselves.
    """
    path = arcs(config.points)
    frames = [pd.DataFrame({"part": "arc", **_places(path)})]
    runs = list(product(config.widths, VARIANTS, range(config.seed, config.seed + config.trials)))
    work = Work(len(runs), progress)
    for width, variant, seed in runs:
        model, off = train(config, width, variant, seed)
        track = run_free(model, path[0], config.steps)  # (steps + 1, 2, 2)
        distance = (track[:, 0] - track[:, 1]).norm(dim=-1)
        far = (distance / distance[0]).tolist()
        about = {"part": "run", "width": width, "variant": variant.name, "seed": seed}
        about |= {"step": range(config.steps + 1), **_places(track), "distance": far}
        frames.append(pd.DataFrame({**about, "together": together_from(far), "off": off}))
        work()
    return pd.concat(frames, ignore_index=True)


def _places(track: Tensor) -> dict[str, list[float]]:
    return dict(zip(("x1", "y1", "x2", "y2"), track.flatten(1).T.tolist(), strict=True))


def together_from(distances: list[float]) -> int:
    """The first step from which on the distance stays below `TOGETHER`; −1 if it does not (or is not a number)."""
    apart = [step for step, distance in enumerate(distances) if not distance < TOGETHER]
    first = apart[-1] + 1 if apart else 0
    return first if first < len(distances) else -1


def draw(frame: pd.DataFrame) -> Any:
    """As Fig. 3: variants from left to right, widths below each other; the first seed large, an × where it ends.

    The title of a panel ends with how many of its runs have fallen together.
    """
    runs, arc = (rows(frame, part=part) for part in ("run", "arc"))
    places = list(runs.groupby(["width", "variant"], sort=False))
    figure, axes = drawing.panels(runs["variant"].nunique(), rows=runs["width"].nunique(), width=2.5, height=2.7)
    for ax, ((width, variant), own) in zip(axes, places, strict=True):
        for x, y, colour in (("x1", "y1", drawing.BLUE), ("x2", "y2", drawing.VERMILION)):
            ax.plot(arc[x], arc[y], color=drawing.LIGHT_GREY, linewidth=4, zorder=0.5)
            ax.scatter(own[x], own[y], color=colour, s=3, alpha=0.35, linewidths=0)
            first = rows(own, seed=own["seed"].min())
            ax.scatter(first[x], first[y], color=colour, s=7, alpha=0.9, linewidths=0)
            ax.plot(first[x].iloc[-1:], first[y].iloc[-1:], color=drawing.BLACK, marker="x", zorder=3)
        ends = rows(own, step=0)["together"]
        title = f"{variant}, d {width:.0f}: {(ends >= 0).sum()}/{len(ends)}"
        axis(ax, title, "x", "y", xlim=(-_WINDOW, _WINDOW), ylim=(-_WINDOW, _WINDOW), aspect="equal")
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    starts = rows(frame, part="run", step=0)
    fell = starts.assign(fell=starts["together"] >= 0)
    share, plain = fell.groupby("variant")["fell"].mean(), rows(fell, variant=PLAIN.name)
    alone, by_width = share[PLAIN.name], plain.groupby("width")["fell"].mean()
    caught = plain[plain["fell"]]
    small, large = min(config.widths), max(config.widths)
    medians = {width: rows(caught, width=width)["together"].median() for width in sorted(config.widths)}
    slower = by_width[large] < by_width[small]
    if by_width[large] == by_width[small] > 0:
        slower = medians[large] > medians[small]
    return [
        judge(
            "trained: with attention alone the two points fall together",
            "Fig. 3, “plain”, whose code has the inner skip",
            f"{alone:.0%} of {len(plain)} runs in {config.steps} steps, after {_whole(caught['together'].median())} "
            f"steps (median); with the inner skip {share[INNER.name]:.0%}",
            f"below {TOGETHER:.0%} of the first distance until the end, in at least {MOST:.0%} of the runs",
            alone >= MOST,
            "median of how far off a step is, squared, in squared steps: "
            + spell("{} {:.2g}", starts.groupby("variant")["off"].median()),
        ),
        judge(
            "trained: skips slow or stop the fall",
            "Fig. 3: “convergence slows down or stops … when either MLP or skip connections are added”",
            f"runs that fall together: {spell('{} {:.0%}', [(v.name, share[v.name]) for v in VARIANTS], '; ')}",
            "fewer runs than with attention alone, with the inner skip, with the outer one, and with both",
            all(share[variant.name] < alone for variant in (INNER, OUTER, BOTH)),
        ),
        judge(
            "trained: an MLP slows or stops the fall",
            "Fig. 3, as above; the authors' MLP comes with the inner skip",
            f"runs that fall together: MLP {share[MLP.name]:.0%}, plain {alone:.0%}; with the inner "
            f"skip {share[INNER_MLP.name]:.0%} and {share[INNER.name]:.0%}",
            "fewer runs than without it",
            share[MLP.name] < alone,
        ),
        judge(
            "trained: a larger width slows or stops the fall of attention alone",
            "Fig. 3: “convergence slows down or stops as the dimension increases”",
            f"runs that fall together: {spell('d = {:.0f} {:.0%}', by_width)}; median steps "
            + ", ".join(map(_whole, medians.values())),
            "fewer runs, or as many in more steps, at the largest width than at the smallest",
            slower,
        ),
    ]


def _whole(steps: float) -> str:
    return "—" if math.isnan(steps) else f"{steps:.0f}"


QUICK = Config((16, 32), points=200, every=1, epochs=30, steps=60, trials=2)
STUDY = Study("dong2021-toy", Config(), QUICK, compute, draw, claims)
