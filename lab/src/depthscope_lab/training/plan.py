"""The plan of a fair comparison: what is run, how long it will take; kept in its folder, so that it is made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from depthscope.files import content_sum, write_whole
from depthscope.sealed import read_record, record_writer
from depthscope_lab.training.comparison import Launch
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.protocol import Protocol, fresh_seeds

PLAN = "plan.json"


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
    from depthscope_lab.training.timing import fitted, measure_costs

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
