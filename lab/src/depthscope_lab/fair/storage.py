"""What depth stores: the task facts under the fair protocol. Who stores more, and when does taking the mean out help?

    python -m depthscope_lab.fair.storage FOLDER        # 1 and 2: trains what is missing in the folder, and prints all
    python -m depthscope_lab.fair.storage FOLDER noise  # 3

1. *screen*: 24 blocks, 8192 facts, 1500 steps; one seed, three rates. Chooses who goes on, and claims nothing.
2. *judged*: who goes on, at three budgets, five rates by two tuning seeds, eight fresh seeds.
3. *noise*: 12 tokens, of which 8 are drawn anew each time; and its control, 8 that are always the same.

The criteria stand in docs/studies/facts.md, and were written before the first run.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from depthscope.models import BlockConfig
from depthscope_lab.fair.branches import crossed
from depthscope_lab.fair.facts import Facts, Reader, Table, equal_width
from depthscope_lab.fair.protocol import Build, Plan, Result, budgets_of, compare, losses_of, screened
from depthscope_lab.fair.separation import standings

DEPTH, WIDTH, STEPS = 24, 16, 1500
TAU = 0.228  # of the pilot: what `prescribe` gives for 24 blocks of this width
ROOT = 1 / math.sqrt(DEPTH)
PLAN = Plan(compile=True)
CHEAPER = Plan(rates=(1e-3, 2e-3, 4e-3), more=2, tuning=(1001,), compile=True)  # of 12 tokens, which cost three times
BASELINES = ("table", "2 blocks", "2 wide blocks")

PLAIN = Facts(8192)
NOISE = Facts(4096, noise=8)
FILLER = Facts(4096, filler=8)

Point = tuple[str, float, float]  # placement, α, τ
SCREEN: tuple[Point, ...] = (
    *(("post", alpha, tau) for alpha in (1.0, 0.35, ROOT) for tau in (0.0, TAU)),
    *(("pre", alpha, tau) for alpha in (1.0, 0.35) for tau in (0.0, TAU)),
    *(("pre", *other) for other in ((1.0, 1.0), (1.0, -TAU), (ROOT, 0.0), (1 / DEPTH, 0.0))),
    *(("layer-scale", start, tau) for start in (1e-5, 0.1) for tau in (0.0, TAU)),
    *((wiring, 1.0, 0.0) for wiring in ("rezero", "deep-norm")),
)
ALWAYS: tuple[Point, ...] = (("pre", 1.0, 0.0), ("pre", 1.0, TAU), ("post", 1.0, TAU))
NOISY: tuple[Point, ...] = tuple(("pre", alpha, tau) for alpha in (1.0, 0.35) for tau in (0.0, TAU))


def name_of(point: Point) -> str:
    """As a table names it."""
    placement, alpha, tau = point
    return placement + (f" α {alpha:.3g}" if alpha != 1 else "") + (f" τ {tau:.3g}" if tau else "")


def readers(points: tuple[Point, ...], facts: Facts, baselines: tuple[str, ...] = BASELINES) -> dict[str, Build]:
    """Name → the model of a seed; the baselines first."""

    def reader(point: Point) -> Build:
        block = BlockConfig(WIDTH, 2, 2 * WIDTH, placement=crossed(*point))
        return lambda seed: Reader(DEPTH, block, facts.tokens, seed)

    wide = equal_width(DEPTH, WIDTH)  # two blocks with as many weights
    known: dict[str, Build] = {
        "table": lambda _: Table(facts.tokens),
        "2 blocks": lambda seed: Reader(2, BlockConfig(WIDTH, 2, 2 * WIDTH, placement="pre"), facts.tokens, seed),
        "2 wide blocks": lambda seed: Reader(2, BlockConfig(wide, 2, 2 * wide, placement="pre"), facts.tokens, seed),
    }
    return {name: known[name] for name in baselines} | {name_of(point): reader(point) for point in points}


def screen(folder: Path) -> list[Result]:
    """One seed, three rates."""
    return compare(PLAIN, readers(SCREEN, PLAIN), budgets_of(STEPS, 1), folder, screened(PLAN), print)


def chosen(results: list[Result]) -> tuple[Point, ...]:
    """Who goes on: those of `ALWAYS`; and of post, pre and LayerScale the best with τ and the best without."""
    loss = {name: min(of.values()) for name, of in losses_of(results, STEPS).items()}
    best: dict[tuple[str, bool], Point] = {}
    for point in sorted(SCREEN, key=lambda point: loss[name_of(point)]):
        if point[0] in ("post", "pre", "layer-scale"):
            best.setdefault((point[0], point[2] != 0), point)
    return tuple(dict.fromkeys((*ALWAYS, *best.values())))


def table(results: list[Result], steps: int) -> str:
    """Standings as text; of a screen, which has one seed, losses alone."""
    of = losses_of(results, steps)
    rates = {one.variant: f"{one.rate:g}{'*' if one.edge else ''}" for one in results if one.steps == steps}
    lines = [f"{steps} steps (*: at the edge of the rates that were tried)"]
    for one in standings(of, [name for name in of if name in BASELINES]):
        gap = one.to_best
        to_best = "" if gap is None else f"{gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
        standing = one.standing if len(of[one.variant]) > 1 else ""
        lines.append(f"{one.variant:24s} {one.loss:7.3f}  rate {rates[one.variant]:7s} {standing:14s} {to_best}")
    return "\n".join(lines)


def main(folder: Path, part: str = "plain") -> None:
    """A part, in its order; what is in the folder is not trained again."""
    if part == "plain":
        first = screen(folder)
        print(table(first, STEPS), flush=True)
        points = chosen(first)
        results = compare(PLAIN, readers(points, PLAIN), budgets_of(STEPS), folder, PLAN, print)
        print(*(table(results, budget.steps) for budget in budgets_of(STEPS)), sep="\n\n", flush=True)
    else:
        for facts in (NOISE, FILLER):
            results = compare(
                facts, readers(NOISY, facts, ("table", "2 blocks")), budgets_of(1000, 1), folder, CHEAPER, print
            )
            print(facts, table(results, 1000), sep="\n", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
