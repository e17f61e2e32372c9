"""A fair comparison: every variant gets the rate that suits it, found on data that is not the test data.

First, per variant and depth, a small grid of learning rates, one run each, judged on validation data. Where the best
rate is at the edge of its grid, the grid grows in that direction, a few times at most. Then fresh seeds at the chosen
rate, trained on all training data and judged on the test data, which nothing has seen before. Data, steps and batch
are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from depthscope.report.formats import METRICS, read_metrics
from depthscope_lab.training.comparison import MOST_RUNS, Cell, Launch, Result, run_cells
from depthscope_lab.training.comparison_results import HIDDEN
from depthscope_lab.training.config import LanguageConfig, TrainingConfig

FACTORS = (0.3, 1.0, 3.0)
MORE = 2  # rates beyond the grid, at most, where the best is at its edge
APART = 1.01  # between neighbours of a grid, at least: rates are told apart by six digits
SEEDS = 3
_TUNING_SEED = 0  # of the runs that choose; the fresh ones begin at 1

Progress = Callable[[str, int, Sequence[Cell], int], object]  # what is being done, runs done, running ones, of how many


@dataclass(frozen=True)
class Protocol:
    """What is the same for all: a plan, before anything is trained."""

    steps: int
    factors: tuple[float, ...] = FACTORS  # of each variant's own rate
    more: int = MORE
    seeds: tuple[int, ...] = (1, 2, 3)  # fresh: the runs that choose have seed 0

    def __post_init__(self) -> None:
        if len(self.factors) < 2:
            raise ValueError(f"expected at least 2 rates to choose from, got {len(self.factors)}")
        given = ", ".join(f"{factor:.9g}" for factor in self.factors)
        if not all(math.isfinite(factor) and factor > 0 for factor in self.factors):
            raise ValueError(f"expected factors of a rate above 0, got {given}")
        if any(less * APART > more for less, more in pairwise(sorted(self.factors))):
            raise ValueError(f"expected rates that differ by 1 % or more, got the factors {given}")
        if len(self.seeds) < SEEDS:
            raise ValueError(f"expected at least {SEEDS} seeds, as fewer show no spread, got {len(self.seeds)}")

    @property
    def runs_each(self) -> tuple[int, int]:
        """Per variant and depth: at least, at most."""
        least = len(self.factors) + len(self.seeds)
        return least, least + self.more

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Choice:
    """The rate of a configuration, and what was tried: rate → validation loss, infinite where the run failed."""

    config: TrainingConfig
    tried: dict[float, float]
    lr: float

    @property
    def edge(self) -> str:
        """ "least" or "greatest" if the chosen rate is the last of those tried in its direction; else ""."""
        return edge_of(self.tried, self.lr)

    def as_json(self) -> dict[str, Any]:
        tried = [{"lr": lr, "valid_loss": loss} for lr, loss in sorted(self.tried.items())]
        place = {name: getattr(self.config, name) for name in ("variant", "depth", "warmup_steps")}
        return {**place, "lr": self.lr, "edge": self.edge, "tried": tried}


def fresh_seeds(count: int) -> tuple[int, ...]:
    """1, 2, …: none that has helped to choose."""
    if count > MOST_RUNS:
        raise ValueError(f"expected at most {MOST_RUNS} seeds, as each is a run, got {count}")
    return tuple(range(_TUNING_SEED + 1, _TUNING_SEED + 1 + count))


def prepared(configs: Sequence[TrainingConfig]) -> list[TrainingConfig]:
    """The same reading for all: where one sees the future, all are judged on the segments that it reads without it."""
    if not any(dict(remedy.options).get("allow_leak") for config in configs for remedy in config.remedies):
        return list(configs)
    return [
        config.changed(eval_segments=config.hidden_segments) if isinstance(config, LanguageConfig) else config
        for config in configs
    ]


def run_protocol(
    configs: Sequence[TrainingConfig], protocol: Protocol, launch: Launch, progress: Progress = lambda *_: None
) -> tuple[list[Choice], list[Result]]:
    """Chooses the rates, then measures. Interrupted at any point, the same call goes on from there.

    `configs` has one per variant and depth, with its own learning rate.
    """
    choices = choose_rates(configs, protocol, launch, progress)
    same = {"steps": protocol.steps, "evaluate_on": "test"}
    cells = [
        Cell(choice.config.changed(lr=choice.lr, seed=seed, **same), f"{protocol.steps}steps-test")
        for seed in protocol.seeds
        for choice in choices
    ]
    return choices, run_cells(cells, launch, lambda done, running: progress("measuring", done, running, len(cells)))


def choose_rates(
    configs: Sequence[TrainingConfig], protocol: Protocol, launch: Launch, progress: Progress = lambda *_: None
) -> list[Choice]:
    """The rate with the least validation loss, for every configuration."""
    tried: list[dict[float, float]] = [{} for _ in configs]
    wanted = [[rounded(config.lr * factor) for factor in protocol.factors] for config in configs]
    while any(wanted):
        cells = {
            tuning(config, protocol, lr): (losses, lr)
            for config, losses, rates in zip(configs, tried, wanted, strict=True)
            for lr in rates
        }
        total = len(cells)

        def choosing(done: int, running: Sequence[Cell], total: int = total) -> object:
            return progress("choosing rates", done, running, total)

        for result in run_cells(list(cells), launch, choosing):
            losses, lr = cells[result.cell]
            losses[lr] = _validation_loss(result, launch)
        wanted = [beyond(losses, len(protocol.factors), protocol.more) for losses in tried]
    return [Choice(config, losses, best(losses)) for config, losses in zip(configs, tried, strict=True)]


def tuning(config: TrainingConfig, protocol: Protocol, lr: float) -> Cell:
    """A run that helps to choose a rate."""
    changed = config.changed(lr=lr, steps=protocol.steps, seed=_TUNING_SEED, evaluate_on="validation")
    return Cell(changed, f"{protocol.steps}steps-validation")


def _validation_loss(result: Result, launch: Launch) -> float:
    """At the end of a run, without the future where the model sees it; infinite if the run failed or was stopped."""
    if result.failed is not None or result.stopped is not None:
        return math.inf
    rows = read_metrics(launch.run_folder(result.cell) / METRICS)
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "valid_loss" in row), {})
    value = last.get(f"valid_loss{HIDDEN}", last.get("valid_loss"))
    return math.inf if value is None else float(value)


def best(losses: Mapping[float, float]) -> float:
    """The rate with the least loss; the least rate of those that are equal, as where all runs failed."""
    return min(sorted(losses), key=lambda lr: losses[lr])


def edge_of(tried: Mapping[float, float], lr: float) -> str:
    """ "least" or "greatest" if the rate is the last of those tried in its direction; else ""."""
    rates = sorted(tried)
    return {rates[0]: "least", rates[-1]: "greatest"}.get(lr, "") if rates else ""


def rounded(lr: float) -> float:
    """To six digits, as it is written in the names of folders."""
    return float(f"{lr:.6g}")


def beyond(losses: Mapping[float, float], grid: int, more: int) -> list[float]:
    """The next rate, where the best is at an edge: as far from it as its neighbour is.

    None if it is not, or if `more` rates have been added to the `grid` of the beginning.
    """
    rates, chosen = sorted(losses), best(losses)
    if len(rates) - grid >= more:
        return []
    if chosen == rates[0]:
        return [rounded(chosen * rates[0] / rates[1])]
    return [rounded(chosen * rates[-1] / rates[-2])] if chosen == rates[-1] else []
