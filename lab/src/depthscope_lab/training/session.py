"""A run while it runs: what it is made of, how it begins or goes on, how it is saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthscope import __version__
from depthscope.files import remove_leftovers, sum_of, write_whole
from depthscope.locks import owned
from depthscope.report.formats import checkpoints_in
from depthscope.sealed import record_writer
from depthscope.watching.gate import Gate
from depthscope_lab.training.checkpoint import (
    Checkpoint,
    CheckpointNotWritten,
    Files,
    NotFinite,
    model_tensors,
    newest_until,
    optimizer_tensors,
    read_newest,
    refuse_obstacles,
    remove_others,
    require_finite,
    restore_model,
    restore_optimizer,
    write_checkpoint,
)
from depthscope_lab.training.config import TrainingConfig, as_now, differences
from depthscope_lab.training.display import Display
from depthscope_lab.training.engine import Engine, summed
from depthscope_lab.training.logs import append_metrics, keep_until
from depthscope_lab.training.run import NonFiniteLoss, Run
from depthscope_lab.training.task import Carry, Task, recorded, total_steps

_RECORD = {"config", "data", "versions", "tied", "optimizer", "scaler", "processes", "loss since last log", "metrics"}


@dataclass
class Position:
    """Where a run stands. All of it is in the checkpoint."""

    step: int = 0  # updates done
    carries: list[Carry] = field(default_factory=list)  # one per share of this process
    loss_sum: float = 0.0  # since the last log
    loss_count: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # the last evaluation
    checkpoint: Path | None = None  # the last one
    gate: dict[str, Any] = field(default_factory=dict)  # how long each rule has held

    @property
    def last_good(self) -> str:
        """From where a run that has come to grief can go on."""
        if self.checkpoint is None:
            return "no checkpoint was written"
        return f"the last good checkpoint is {self.checkpoint}"


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
    gate: Gate | None = None  # of the watch, in the process that watches
    alarm: str | None = None  # why it asked to stop

    def __post_init__(self) -> None:
        self.total = total_steps(self.task, self.config)
        # Other versions may give other numbers.
        self.versions = {"depthscope": __version__, "torch": str(torch.__version__)}
        # What a run must have in common with its continuation.
        self.description = {"config": recorded(self.config), "data": self.task.describe()}


@contextmanager
def owning(engine: Engine, run: Run) -> Iterator[None]:
    """Inside, this run is its folder's one owner. Every process raises if the first cannot lock the folder.

    What a killed run has left unfinished is settled before any process looks for checkpoints.
    """
    with ExitStack() as stack:
        refused: Exception | None = None
        if engine.is_main:
            try:
                stack.enter_context(owned(run.out))
                remove_leftovers(run.checkpoints)
            except (ValueError, OSError) as error:
                refused = error
        refusals = summed(engine, [float(refused is not None)])
        if refused is not None:
            raise refused
        if refusals[0]:
            raise ValueError(f"the first process could not become the owner of {str(run.out)!r}")
        yield


def begin(session: Session) -> None:
    """From the newest whole checkpoint if asked to continue, else from the start in an unused folder."""
    run, engine, say = session.run, session.engine, session.display.say
    refuse_obstacles(run.checkpoints)
    there = checkpoints_in(run.checkpoints)
    if there and not run.resume:
        raise ValueError(
            f"{str(run.out)!r} has a run up to {there[-1].name}: --resume continues it, or choose another --out"
        )
    found = read_newest(run.checkpoints, say, partial(_check, session)) if run.resume else None
    if found is not None:
        _restore(session, found)
    else:
        session.position.carries = [None] * session.config.accumulate
        if run.resume:
            say(f"no checkpoint in {run.out}: starting at step 0")
    step = session.position.step
    if engine.is_main:
        # What was written after the checkpoint, or by a run that never had one, goes: it will be computed again.
        for path in (run.metrics, run.depth):
            if damaged := keep_until(path, step):
                say(f"{damaged} lines of {path} could not be read and are left out")
        if found is None:
            run.picture.unlink(missing_ok=True)
        else:
            if there[-1] == found.path:  # else later ones are damaged: what is there may be needed
                goods = Gate.goods_in(session.position.gate)
                remove_others(run.checkpoints, step, run.keep, _up_to(session, goods))
            for name, written in found.record.get("logs", {}).items():
                if _log_sums(run).get(name) != written:
                    say(f"{run.out / name} is not what this run wrote up to step {step}: do not trust it")
        about = {**session.description, "versions": session.versions}
        write_whole(run.out / "config.json", record_writer("training", 1, about))
    if run.tracker != "none":
        engine.accelerator.init_trackers(
            "depthscope",
            config=None if run.tracker == "tensorboard" else session.config.as_json(),
            init_kwargs={"tensorboard": {"purge_step": step + 1 if step else 0}},
        )
    engine.accelerator.wait_for_everyone()


def keep_metrics(session: Session, values: Mapping[str, float]) -> None:
    """To `metrics.jsonl` and to the tracker."""
    step = session.position.step
    try:
        if session.engine.is_main:
            append_metrics(session.run.metrics, step, values)
        session.engine.accelerator.log(dict(values), step=step)
    except OSError as error:
        raise OSError(f"the numbers of step {step} cannot be kept: {error}; {session.position.last_good}") from error


def save(session: Session) -> None:
    """Writes a checkpoint; all processes learn whether it is there."""
    engine, position = session.engine, session.position
    carry: dict[str, Tensor] = {}  # `share.key` → tensor, of every process; empty without a memory
    for part, one in enumerate(position.carries):
        for key, tensor in (one or {}).items():
            everyones = engine.accelerator.gather(tensor.unsqueeze(0).contiguous())  # (processes, …)
            for process, own in enumerate(everyones):
                carry[f"{process * len(position.carries) + part}.{key}"] = own
    failure: Exception | None = None
    if engine.is_main:
        try:
            position.checkpoint = _write(session, carry)
        except NotFinite as error:
            failure = NonFiniteLoss(
                f"{error} is not finite at step {position.step}: the update was too large; {position.last_good}; "
                "a smaller lr, warmup_steps or clip_norm may help"
            )
        except CheckpointNotWritten as error:
            failure = CheckpointNotWritten(f"{error}; {position.last_good}")
    failures = summed(engine, [float(failure is not None)])
    if failure is not None:
        raise failure
    if failures[0]:
        raise CheckpointNotWritten(f"the first process could not write the checkpoint of step {position.step}")


def _write(session: Session, carry: Mapping[str, Tensor]) -> Path:
    """A checkpoint from which a run can go on: what is not finite is refused."""
    engine, position, run = session.engine, session.position, session.run
    if session.gate is not None:
        position.gate = session.gate.state()
    weights, tied = model_tensors(engine.plain)
    moments, rest = optimizer_tensors(engine.optimizer)
    files = {"model": weights, "optimizer": moments, **({"carry": carry} if carry else {})}
    _require_finite(session, files)
    record = {
        **session.description,
        "versions": session.versions,
        "tied": tied,
        "optimizer": rest,
        "scaler": engine.accelerator.scaler.state_dict() if engine.accelerator.scaler is not None else None,
        "random numbers": "functions of seed, step and share",
        "processes": engine.processes,
        "loss since last log": [position.loss_sum, position.loss_count],
        "metrics": position.metrics,
        "logs": _log_sums(run),
        "gate": position.gate,
    }
    # By each rule of the gate the last good checkpoint is not removed, however many there are after it.
    goods = _up_to(session, [] if session.gate is None else session.gate.goods)
    return write_checkpoint(run.checkpoints, position.step, files, record, run.keep, goods)


def _up_to(session: Session, steps: Iterable[int | None]) -> set[Path]:
    """Of each step the newest checkpoint until then."""
    return {path for step in steps if (path := newest_until(session.run.checkpoints, step)) is not None}


def _log_sums(run: Run) -> dict[str, Any]:
    """Of what a run has written line by line until now."""
    return {path.name: sum_of(path) for path in (run.metrics, run.depth) if path.exists()}


def _require_finite(session: Session, files: Files) -> None:
    """Of the weights without buffers: a mask may well be infinite."""
    buffers = {name for name, _ in session.engine.plain.named_buffers(remove_duplicate=False)}
    named = {"model": "the weight", "optimizer": "the optimizer's", "carry": "the memory"}
    for file, called in named.items():
        tensors = files.get(file, {}).items()
        require_finite({f"{called} {name}": one for name, one in tensors if file != "model" or name not in buffers})


def _check(session: Session, found: Checkpoint) -> None:
    """Refuses a checkpoint that was not written by `_write`, whatever its sums say."""
    if missing := sorted(_RECORD - found.record.keys()):
        raise ValueError(f"the checkpoint {str(found.path)!r} is damaged: its record has no {', '.join(missing)}")
    try:
        _require_finite(session, found.files)
    except NotFinite as error:
        raise ValueError(f"the checkpoint {str(found.path)!r} is damaged: {error} is not finite") from None


def _restore(session: Session, found: Checkpoint) -> None:
    engine, config, record, say = session.engine, session.config, found.record, session.display.say
    before = {"config": as_now(record["config"], config), "data": record["data"]}
    changed = [line for part in before for line in differences(before[part], session.description[part])]
    if changed:
        raise ValueError(f"--resume continues a run as it was; changed since: {'; '.join(changed)}")
    carry = found.files.get("carry", {})
    if carry and len({name.split(".")[0] for name in carry}) != engine.processes * config.accumulate:
        raise ValueError(f"the memory of this run is for {record['processes']} processes, got {engine.processes}")
    if record["processes"] != engine.processes:
        say(f"begun with {record['processes']} processes, continued with {engine.processes}: equal up to rounding")
    if others := differences(record["versions"], session.versions):
        say(f"begun with other versions, so the numbers may differ: {'; '.join(others)}")
    try:
        restore_model(engine.plain, found.files["model"], record["tied"])
        restore_optimizer(engine.optimizer, found.files["optimizer"], record["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"the checkpoint {str(found.path)!r} is not of the model that is built now: {text}") from None
    if engine.accelerator.scaler is not None:
        engine.accelerator.scaler.load_state_dict(record["scaler"])
    carries: list[Carry] = []
    for share in engine.shares:
        own = {name.split(".", 1)[1]: one for name, one in carry.items() if name.split(".", 1)[0] == str(share.index)}
        carries.append({key: one.to(engine.device) for key, one in own.items()} or None)
    loss_sum, loss_count = record["loss since last log"]
    gate = record.get("gate", {})
    session.position = Position(found.step, carries, loss_sum, loss_count, record["metrics"], found.path, gate)
    say(f"continuing at step {found.step} of {session.total} from {found.path}")
