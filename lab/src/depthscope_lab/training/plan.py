"""The plan of a fair comparison: what is run, and how long it will take, from a few timed steps; it keeps to a budget.

It is kept in the comparison's folder, so that it is made once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from depthscope.files import content_sum, write_whole
from depthscope.naming import counted
from depthscope.sealed import read_record, record_writer
from depthscope_lab.training.comparison import Launch
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.engine import compute_step, evaluate, make_engine, release, update
from depthscope_lab.training.loading import make_task
from depthscope_lab.training.protocol import Protocol, fresh_seeds
from depthscope_lab.training.run import Run
from depthscope_lab.training.session import total_steps
from depthscope_lab.training.task import Carry, Task

PLAN = "plan.json"
TIMED = 2  # steps, after a first one that is not counted; the faster counts
SLACK = 1.15  # for checkpoints, pictures, and what else goes on in a machine
LEAST_SHARE = 0.1  # of the recipe's steps: with fewer it would be another experiment
Pair = tuple[str, int]  # variant, depth
_START = "import depthscope_lab.training.loop, depthscope_lab.training.loading, accelerate"


@dataclass(frozen=True)
class Plan:
    """A protocol for some variants and depths, and its time on this machine."""

    configs: tuple[TrainingConfig, ...]  # one per variant and depth, with its own rate
    protocol: Protocol
    seconds: tuple[float, float]  # if no rate is at an edge; if all are
    step_seconds: dict[int, float]  # by depth: of the slowest variant
    notes: tuple[str, ...] = ()  # what was given up, and why

    def as_json(self) -> dict[str, Any]:
        """For JSON; the configurations are those of the runs."""
        return {
            "protocol": self.protocol.as_json(),
            "seconds": {"least": self.seconds[0], "most": self.seconds[1]},
            "step_seconds": {str(depth): seconds for depth, seconds in self.step_seconds.items()},
            "notes": list(self.notes),
        }


def make_plan(
    configs: Sequence[TrainingConfig],
    launch: Launch,
    *,
    factors: Sequence[float],
    seeds: int,
    budget: float | None = None,
    asked: bool = False,
) -> Plan:
    """Times a few steps and fits the protocol to the budget (seconds); `asked`: the user has named the steps."""
    first = Protocol(1, tuple(factors), seeds=fresh_seeds(seeds))  # what it would refuse, it refuses at once
    costs = measure_costs(configs, launch)
    wanted = replace(first, steps=costs.recipe_steps)
    protocol, notes = fitted(configs, wanted, costs, launch, budget, asked=asked)
    warmup = max(config.warmup_steps for config in configs)
    if warmup >= protocol.steps:
        notes = [*notes, f"a warm-up of {warmup} steps does not end within a run, so that its rate is not reached"]
    slowest: dict[int, float] = {}
    for (_, depth), seconds in costs.step.items():
        slowest[depth] = max(seconds, slowest.get(depth, 0.0))
    return Plan(tuple(configs), protocol, costs.total(configs, protocol, launch), slowest, tuple(notes))


def request_of(
    configs: Sequence[TrainingConfig], launch: Launch, factors: Sequence[float], seeds: int, budget: float | None
) -> str:
    """A sum over all that a plan follows from, but for the speed of the machine."""
    asked = [[config.as_json() for config in configs], launch.data, list(factors), seeds, budget]
    return content_sum({"asked": asked})


def keep_plan(folder: Path, plan: Plan, request: str) -> None:
    """So that the same command goes on with the same steps, however fast the machine is then."""
    write_whole(folder / PLAN, record_writer("plan", 1, {"request": request, **plan.as_json()}))


def kept_plan(folder: Path, configs: Sequence[TrainingConfig], request: str) -> Plan | None:
    """The plan of this very request, if one was begun here. A damaged file is refused: its steps cannot be guessed."""
    try:
        found = read_record(folder / PLAN, "plan", unnumbered=1).content
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{error}; remove it, and a new plan is made") from None
    if found["request"] != request:
        return None
    seconds = found["seconds"]
    return Plan(
        tuple(configs),
        Protocol.from_json(found["protocol"]),
        (seconds["least"], seconds["most"]),
        {int(depth): value for depth, value in found["step_seconds"].items()},
        tuple(found["notes"]),
    )


@dataclass(frozen=True)
class Costs:
    """Seconds: of a step by variant and depth, of one look at the held-out data as so many steps, of a start."""

    step: Mapping[Pair, float]
    evaluation: float  # in steps of the same model
    start: float
    steps_per_epoch: int
    recipe_steps: int  # as the recipe or the user has it

    def run(self, config: TrainingConfig, steps: int, launch: Launch) -> float:
        """Of one run of so many steps."""
        options = launch.options
        evaluations = -(-steps // (options.get("evaluate_every") or self.steps_per_epoch))
        every = options.get("watch_every", Run.watch_every)
        watched = 0 if every is None else -(-steps // every)
        step = self.step[config.variant, config.depth]
        return self.start + SLACK * step * (steps + watched + evaluations * self.evaluation)

    def total(self, configs: Sequence[TrainingConfig], protocol: Protocol, launch: Launch) -> tuple[float, float]:
        """Of the whole comparison: if no rate is at an edge, and if all are."""
        each = sum(self.run(config, protocol.steps, launch) for config in configs) / launch.jobs
        least, most = protocol.runs_each
        return least * each, most * each


def measure_costs(configs: Sequence[TrainingConfig], launch: Launch) -> Costs:
    """Times a few steps: of all variants at the least depth, of the first one at every depth; the rest in proportion.

    Nothing of it is kept. Costs a few steps per variant and depth, one evaluation, and the start of one process.
    """
    first = min(configs, key=lambda config: config.depth)
    task = make_task(first, launch.data, allow_incomplete=launch.allow_incomplete)
    threads = torch.get_num_threads()
    try:
        if launch.jobs > 1:  # as the runs will have them
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.jobs))
        found: dict[Pair, float] = {}
        evaluation = 0.0
        for config in configs:
            if config.depth == first.depth or config.variant == first.variant:
                pair = (config.variant, config.depth)
                found[pair], looked = _timed(_with(task, config), config, launch, look=config is first)
                evaluation = looked or evaluation
    finally:
        torch.set_num_threads(threads)
    base = found[first.variant, first.depth]
    for config in configs:
        proportion = found[config.variant, first.depth] * found[first.variant, config.depth] / base
        found.setdefault((config.variant, config.depth), proportion)
    return Costs(found, evaluation / base, _start(), task.steps_per_epoch, total_steps(task, first))


def fitted(
    configs: Sequence[TrainingConfig],
    protocol: Protocol,
    costs: Costs,
    launch: Launch,
    budget: float | None,
    *,
    asked: bool,
) -> tuple[Protocol, list[str]]:
    """The protocol that keeps to the budget (seconds), and in words what was given up for it.

    First the rates beyond the grid, then steps, down to a tenth; steps that the user `asked` for are not cut. What
    does not fit even so is refused.
    """
    if budget is None:
        return protocol, []

    def most(tried: Protocol) -> float:
        return costs.total(configs, tried, launch)[1]

    said = []
    wanted = protocol.more
    while protocol.more and most(protocol) > budget:
        protocol = replace(protocol, more=protocol.more - 1)
    if protocol.more < wanted:
        said.append(f"rates beyond the grid are at most {protocol.more} instead of {wanted}, to keep to the budget")
    if most(protocol) <= budget:
        return protocol, said
    tried = range(1, protocol.steps)
    steps = bisect_right(tried, budget, key=lambda some: most(replace(protocol, steps=some)))  # the most that fit
    least = max(1, round(LEAST_SHARE * protocol.steps))
    if asked or steps < least:
        floor = protocol if asked else replace(protocol, steps=least)
        pairs = counted(len({(config.variant, config.depth) for config in configs}), "pair")
        raise ValueError(
            f"expected a --budget of at least {in_words(most(floor))} for {pairs} of variant and depth × "
            f"{protocol.runs_each[1]} runs of {counted(floor.steps, 'step')}, got {in_words(budget)}: "
            f"give fewer --variants or --depths{', or fewer --steps' if asked else ''}"
        )
    said.append(f"{steps} steps a run instead of {protocol.steps}, to keep to the budget")
    return replace(protocol, steps=steps), said


def in_words(seconds: float) -> str:
    """`1 h 20 min`, `35 min`, `50 s`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours} h" + (f" {rest} min" if rest else "") if hours else f"{minutes} min"


def _timed(task: Task, config: TrainingConfig, launch: Launch, *, look: bool) -> tuple[float, float]:
    """Seconds of a step, and of an evaluation if asked for."""
    engine = make_engine(task, config, Run(launch.folder, tracker="none", cpu=bool(launch.options.get("cpu"))))
    try:
        carries: list[Carry] = [None] * config.accumulate
        taken = []
        for step in range(TIMED + 1):
            started = time.perf_counter()
            result = compute_step(engine, task, config, step, TIMED + 1, carries, lambda: (False, False))
            update(engine, config, 0.0)
            carries = list(result.carries)
            taken.append(time.perf_counter() - started)
        looked = 0.0
        if look:
            started = time.perf_counter()
            evaluate(engine, task)
            looked = time.perf_counter() - started
        return min(taken[1:]), looked
    finally:
        release(engine)


def _with(task: Task, config: TrainingConfig) -> Task:
    """The same data under another configuration: it is read once."""
    return type(task)(config, task.data)  # type: ignore[call-arg, attr-defined, no-any-return]


def _start() -> float:
    """Seconds that a process needs before its first step."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", _START], check=True, capture_output=True)
    return time.perf_counter() - started
