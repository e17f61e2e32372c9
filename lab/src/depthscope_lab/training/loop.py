"""The loop: step, look, save. Whatever ends a run, its work is kept."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from depthscope_lab.extras import require
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.display import Display
from depthscope_lab.training.engine import (
    Engine,
    compute_step,
    evaluate,
    make_engine,
    release,
    shares_of,
    step_seed,
    update,
)
from depthscope_lab.training.observation import (
    AFTER_THE_BLOCKS,
    ALL_FINITE,
    first_nonfinite_block,
    nonfinite_weight,
    require_rules,
    watching_depth,
)
from depthscope_lab.training.randomness import seeded
from depthscope_lab.training.run import NonFiniteLoss, Outcome, Run
from depthscope_lab.training.session import Position, Session, begin, keep_metrics, owning, save
from depthscope_lab.training.signals import StopRequest, stop_on_signal
from depthscope_lab.training.task import Share, Task


def train(task: Task, config: TrainingConfig, run: Run, *, display: Display | None = None) -> Outcome:
    """Trains, or continues, a run in the folder `run.out`; under torchrun, all processes together."""
    require_rules(run)
    with _engine(task, config, run) as engine, stop_on_signal() as request, owning(engine, run):
        shown = display if display is not None and engine.is_main else Display()
        session = Session(engine, task, config, run, shown, Position())
        begin(session)
        with shown, watching_depth(session) as watch:
            shown.begin(session.position.step, session.total)
            return _loop(session, request, watch)


def _loop(session: Session, request: StopRequest, watch: Any) -> Outcome:
    engine, task, config, run, position = (
        session.engine,
        session.task,
        session.config,
        session.run,
        session.position,
    )
    per_epoch, total = task.steps_per_epoch, session.total
    seconds, stop, gate = 0.0, False, False
    while position.step < total and not stop:
        if watch is not None:
            watch.step(position.step)
        started = time.perf_counter()
        result = compute_step(
            engine,
            task,
            config,
            position.step,
            total,
            position.carries,
            lambda: (request.signal is not None, session.gate is not None and session.gate.should_stop),
        )
        if not math.isfinite(result.loss):
            raise NonFiniteLoss(_explain(session))
        if session.gate is not None:
            session.gate.losses.tell(result.loss)
        update(engine, config, result.lr)
        seconds += time.perf_counter() - started

        position.step += 1
        position.carries = result.carries
        position.loss_sum += result.loss
        position.loss_count += 1
        last, stop, gate = position.step == total, result.stop or result.gate, result.gate
        if last or position.step % run.log_every == 0:
            _log(session, result.lr, seconds)
            seconds = 0.0
        if last or position.step % (run.evaluate_every or per_epoch) == 0:
            position.metrics = evaluate(engine, task)
            keep_metrics(session, position.metrics)
            session.display.evaluated(position.step, position.metrics)
        if last or stop or position.step % (run.checkpoint_every or per_epoch) == 0:
            save(session)
    if position.step == total:
        _require_finite_end(position)
    stopped = session.alarm or "a rule in the first process holds" if gate else None
    if position.step == total or gate:
        return Outcome(position.step, total, position.metrics, position.checkpoint, stopped=stopped)
    code = request.signal or signal.SIGTERM  # none here: another process was told
    return Outcome(position.step, total, position.metrics, position.checkpoint, int(code))


def _require_finite_end(position: Position) -> None:
    """A run whose last look at the test data gave no loss has not ended well, whatever its training loss was."""
    for name, value in position.metrics.items():
        if name.endswith("loss") and not math.isfinite(value):
            raise NonFiniteLoss(
                f"the {name.replace('_', ' ')} is not finite at step {position.step}, the last one; "
                f"{position.last_good}: its weights are finite"
            )


def _log(session: Session, lr: float, seconds: float) -> None:
    """The mean loss since the last log. The display also shows the last token similarity."""
    position = session.position
    per_step = seconds / position.loss_count
    values = {
        "loss": position.loss_sum / position.loss_count,
        "lr": lr,
        f"{session.task.unit}_per_second": session.task.units_per_step / per_step,
        "epoch": position.step / session.task.steps_per_epoch,
    }
    keep_metrics(session, values)
    shown = values if session.similarity is None else values | {"token_similarity": session.similarity}
    session.display.logged(position.step, shown, seconds_left=(session.total - position.step) * per_step)
    position.loss_sum, position.loss_count = 0.0, 0


def _explain(session: Session) -> str:
    """The step, the first block where it appears, and the last good checkpoint."""
    engine, position = session.engine, session.position
    found = []
    for part, carry in enumerate(position.carries):
        share = shares_of(engine, session.config)[part]
        with seeded(step_seed(session.config, position.step, share), engine.device):  # the same dropout
            batch = _batch(session, position.step, part)
            found.append(first_nonfinite_block(session.task, engine.plain, batch, carry))
    mine = torch.tensor([min(found)], device=engine.device)
    first = engine.accelerator.gather(mine).min().item()  # of all processes
    if first == 0:
        where = "it is in what enters block 1"
    elif first == ALL_FINITE:
        where = "it did not come back in a second pass"
    else:
        where = "all blocks are finite, what follows is not" if first == AFTER_THE_BLOCKS else f"first in block {first}"
    if (weight := nonfinite_weight(engine.plain)) is not None:
        where += f" (the weight {weight} is not finite: the update before was too large)"
    return (
        f"the loss is not finite at step {position.step + 1}: {where}; {position.last_good}; "
        "a smaller lr, warmup_steps or clip_norm may help"
    )


def _batch(session: Session, step: int, part: int) -> Any:
    engine = session.engine
    share = shares_of(engine, session.config)[part]
    return session.task.batch(step, Share(share, engine.processes * session.config.accumulate), engine.device)


@contextmanager
def _engine(task: Task, config: TrainingConfig, run: Run) -> Iterator[Engine]:
    if run.tracker == "tensorboard":
        require("tensorboard")
    elif run.tracker != "none":
        _require_package(run.tracker)
    engine = make_engine(task, config, run)
    try:
        yield engine
    finally:
        release(engine)


def _require_package(name: str) -> None:
    try:
        require(name)
    except ImportError:
        raise ValueError(f"the tracker {name} needs its package: pip install {name}") from None
