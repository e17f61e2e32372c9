"""The fair comparison of variants: rates by two tuning seeds, then eight fresh ones, at budgets a factor of four apart.

    found = compare(facts, {"pre": build_pre, "2 blocks": build_two}, budgets_of(1500), Path("runs"))
    standings(losses_of(found, steps=1500), baselines=["2 blocks"])

Every run is a file by its key, and the members that are trained together are saved every hundred steps: what is killed
and started again goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from depthscope.files import content_sum
from depthscope_lab.fair.together import Budget, Member, Problem, Together, as_record
from depthscope_lab.training.kept import found, keep
from depthscope_lab.training.protocol import best, beyond

Build = Callable[[int], nn.Module]  # of a seed
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
TUNING = (1001, 1002)  # seeds: data of their own, of which the fresh ones see nothing
FRESH = (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Plan:
    """What is the same for all variants."""

    rates: tuple[float, ...] = RATES
    more: int = 3  # rates beyond the grid, at most, where the best is at its edge
    tuning: tuple[int, ...] = TUNING
    fresh: tuple[int, ...] = FRESH
    compile: bool = False  # True: ten seconds of compiling, then steps of about three quarters of the time

    def __post_init__(self) -> None:
        if set(self.tuning) & set(self.fresh):
            raise ValueError(f"expected tuning seeds that are not judged, got {self.tuning} and {self.fresh}")


@dataclass(frozen=True)
class Result:
    """A run that was judged, and the rate it had; `edge`: no greater, or no smaller, rate was tried."""

    variant: str
    steps: int
    seed: int
    rate: float
    edge: bool
    measured: Mapping[str, Any]


def budgets_of(steps: int, count: int = 3, apart: int = 4) -> list[Budget]:
    """Budgets up to so many steps, each a factor apart from the next."""
    return [Budget(max(1, steps // apart**power)) for power in reversed(range(count))]


def compare(
    problem: Problem,
    variants: Mapping[str, Build],
    budgets: Sequence[Budget],
    folder: Path,
    plan: Plan = Plan(),
    told: Callable[[str], object] = lambda _: None,
) -> list[Result]:
    """Every variant at every budget: its rate is chosen at this budget, then the fresh seeds are trained and measured.

    Args:
        problem: A dataclass: its fields are part of the key of a run.
        variants: Name → the model of a seed. A name stands for one model: what it depends on belongs into it.
        folder: Where finished runs are kept. Another version of the code needs another one.
        told: Is told what is trained.
    """
    results = []
    for budget in budgets:
        for name, build in variants.items():
            tried: dict[float, float] = {}
            wanted = list(plan.rates)
            while wanted:
                members = [Member(seed, rate) for rate in wanted for seed in plan.tuning]
                tuned = runs(problem, name, build, members, budget, folder, plan.compile, told)
                losses = [one["loss"] for one in tuned]
                for place, rate in enumerate(wanted):
                    of_rate = losses[place * len(plan.tuning) : (place + 1) * len(plan.tuning)]
                    tried[rate] = math.inf if None in of_rate else fmean(of_rate)
                wanted = beyond(tried, len(plan.rates), plan.more)
            rate = best(tried)
            seeds = plan.fresh or plan.tuning  # a screen judges nobody: it has no fresh seeds
            members = [Member(seed, rate) for seed in seeds]
            measured = runs(problem, name, build, members, budget, folder, plan.compile, told)
            edge = rate in (min(tried), max(tried))
            results += [
                Result(name, budget.steps, seed, rate, edge, one) for seed, one in zip(seeds, measured, strict=True)
            ]
    return results


def runs(
    problem: Problem,
    name: str,
    build: Build,
    members: Sequence[Member],
    budget: Budget,
    folder: Path,
    compile: bool = False,
    told: Callable[[str], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """What is measured of these members at the end: of those that are not kept, trained together, in their order."""
    about = {"problem": type(problem).__name__, **vars(problem), "variant": name}
    keys = [{**about, **as_record(member, budget)} for member in members]
    missing = [place for place, key in enumerate(keys) if found(folder, key) is None]
    if missing:
        told(f"{name}, {budget.steps} steps: {len(missing)} members")
        if compile:
            torch.compiler.reset()  # blocks of all variants share their code, of which torch keeps eight forms at most
        together = Together(problem, build, [members[place] for place in missing], budget, compile=compile)
        unfinished = folder / f"{content_sum([keys[place] for place in missing])[:12]}.safetensors"
        together.train(unfinished)
        for place, measured in zip(missing, together.measure(), strict=True):
            keep(folder, keys[place], measured)
        unfinished.unlink(missing_ok=True)
    return [kept[0] for key in keys if (kept := found(folder, key)) is not None]


def losses_of(results: Sequence[Result], steps: int) -> dict[str, dict[int, float]]:
    """Variant → seed → loss at a budget, as `standings` takes it; infinite where a run has died."""
    losses: dict[str, dict[int, float]] = {}
    for one in results:
        if one.steps == steps:
            loss = one.measured["loss"]
            losses.setdefault(one.variant, {})[one.seed] = math.inf if loss is None else float(loss)
    return losses


def screened(plan: Plan = Plan()) -> Plan:
    """One seed and three rates: what a variant must pass before the whole protocol is spent on it."""
    middle = plan.rates[1:-1]
    return replace(plan, rates=middle, more=1, tuning=plan.tuning[:1], fresh=())
