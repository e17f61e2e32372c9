"""A run while it runs: what it is made of, how it begins or goes on, how it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from depthscope.files import write_json
from depthscope.training.building import recorded
from depthscope.training.checkpoint import (
    Checkpoint,
    CheckpointNotWritten,
    checkpoints_in,
    read_newest,
    write_checkpoint,
)
from depthscope.training.config import TrainingConfig, differences
from depthscope.training.display import Display
from depthscope.training.engine import Engine, shares_of, summed
from depthscope.training.metrics import append_metrics, keep_metrics_until
from depthscope.training.run import Run
from depthscope.training.state import (
    carries_of,
    gather_carries,
    model_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)
from depthscope.training.task import Carry, Task


@dataclass
class Position:
    """Where a run stands. All of it is in the checkpoint."""

    step: int = 0  # updates done
    carries: list[Carry] = field(default_factory=list)  # one per share of this process
    loss_sum: float = 0.0  # since the last log
    loss_count: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # the last evaluation
    checkpoint: Path | None = None  # the last one


@dataclass
class Session:
    """What the parts of the loop share."""

    engine: Engine
    task: Task
    config: TrainingConfig
    run: Run
    display: Display
    position: Position
    similarity: float | None = None  # t_sim of the last block's tokens when they were last watched

    @property
    def total(self) -> int:
        """How many steps the run has."""
        return total_steps(self.task, self.config)

    @cached_property
    def description(self) -> dict[str, Any]:
        """What a run must have in common with its continuation."""
        return {"config": recorded(self.config), "data": self.task.describe()}


def total_steps(task: Task, config: TrainingConfig) -> int:
    """`steps`, or as many as the epochs have."""
    return config.steps or config.epochs * task.steps_per_epoch


def begin(session: Session) -> None:
    """From the newest whole checkpoint if asked to continue, else from the start in an unused folder."""
    run, engine = session.run, session.engine
    there = checkpoints_in(run.checkpoints)
    if there and not run.resume:
        raise ValueError(
            f"{str(run.out)!r} has a run up to {there[-1].name}: --resume continues it, or choose another --out"
        )
    found = read_newest(run.checkpoints, session.display.say) if run.resume else None
    if found is None:
        session.position.carries = [None] * session.config.accumulate
        if run.resume:
            session.display.say(f"no checkpoint in {run.out}: starting at step 0")
    else:
        _restore(session, found)
    if engine.is_main:
        run.out.mkdir(parents=True, exist_ok=True)
        write_json(run.out / "config.json", session.description)
        keep_metrics_until(run.metrics, session.position.step)
    if run.tracker != "none":
        engine.accelerator.init_trackers(
            "depthscope",
            config=None if run.tracker == "tensorboard" else session.config.as_json(),
            init_kwargs={"tensorboard": {"purge_step": session.position.step + 1}},
        )
    engine.accelerator.wait_for_everyone()


def keep_metrics(session: Session, values: Mapping[str, float]) -> None:
    """To `metrics.jsonl` and to the tracker."""
    if session.engine.is_main:
        append_metrics(session.run.metrics, session.position.step, values)
    session.engine.accelerator.log(dict(values), step=session.position.step)


def save(session: Session) -> None:
    """Writes a checkpoint; all processes learn whether it is there."""
    engine, position = session.engine, session.position
    carry = gather_carries(engine.accelerator, position.carries)
    failure: CheckpointNotWritten | None = None
    if engine.is_main:
        weights, tied = model_tensors(engine.plain)
        moments, rest = optimizer_tensors(engine.optimizer)
        files = {"model": weights, "optimizer": moments, **({"carry": carry} if carry else {})}
        record = {
            **session.description,
            "tied": tied,
            "optimizer": rest,
            "scaler": engine.accelerator.scaler.state_dict() if engine.accelerator.scaler is not None else None,
            "random numbers": "functions of seed, step and share",
            "processes": engine.processes,
            "loss since last log": [position.loss_sum, position.loss_count],
            "metrics": position.metrics,
        }
        try:
            position.checkpoint = write_checkpoint(
                session.run.checkpoints, position.step, files, record, session.run.keep
            )
        except CheckpointNotWritten as error:
            failure = error
    failures = summed(engine, [float(failure is not None)])
    if failure is not None:
        raise failure
    if failures[0]:
        raise CheckpointNotWritten(f"the first process could not write the checkpoint of step {position.step}")


def _restore(session: Session, found: Checkpoint) -> None:
    engine, config, record = session.engine, session.config, found.record
    changed = [line for part in ("config", "data") for line in differences(record[part], session.description[part])]
    if changed:
        raise ValueError(f"--resume continues a run as it was; changed since: {'; '.join(changed)}")
    shares = engine.processes * config.accumulate
    carry = found.files.get("carry", {})
    if carry and len({name.split(".")[0] for name in carry}) != shares:
        raise ValueError(f"the memory of this run is for {record['processes']} processes, got {engine.processes}")
    if record["processes"] != engine.processes:
        session.display.say(
            f"begun with {record['processes']} processes, continued with {engine.processes}: equal up to rounding"
        )
    restore_model(engine.plain, found.files["model"], record["tied"])
    restore_optimizer(engine.optimizer, found.files["optimizer"], record["optimizer"])
    if engine.accelerator.scaler is not None:
        engine.accelerator.scaler.load_state_dict(record["scaler"])
    loss_sum, loss_count = record["loss since last log"]
    session.position = Position(
        found.step,
        carries_of(carry, shares_of(engine, config), engine.device),
        loss_sum,
        loss_count,
        record["metrics"],
        found.path,
    )
    session.display.say(f"continuing at step {found.step} of {session.total} from {found.path}")
