"""The loop: step, look, save. Whatever ends a run, its work is kept."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from typing import Any

import torch

from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.display import Display
from depthscope_lab.training.engine import (
    compute_gradients,
    evaluate,
    learning_rate,
    running_engine,
    step_seed,
    summed,
    update,
)
from depthscope_lab.training.observation import (
    AFTER_THE_BLOCKS,
    ALL_FINITE,
    first_nonfinite_block,
    require_rules,
    watching_depth,
)
from depthscope_lab.training.randomness import seeded
from depthscope_lab.training.run import NonFiniteLoss, Outcome, Run
from depthscope_lab.training.session import Position, Session, begin, keep_metrics, owning, save
from depthscope_lab.training.signals import StopRequest, stop_on_signal
from depthscope_lab.training.task import Task


def train(task: Task, config: TrainingConfig, run: Run, *, display: Display | None = None) -> Outcome:
    """Trains, or continues, a run in the folder `run.out`; under torchrun, all processes together."""
    require_rules(run)
    with running_engine(task, config, run) as engine, stop_on_signal() as request, owning(engine, run):
        shown = display if display is not None and engine.is_main else Display()
        session = Session(engine, task, config, run, shown, Position())
        begin(session)
        with shown, watching_depth(session) as watch:
            shown.begin(session.position.step, session.total)
            return _loop(session, request, watch)


def _loop(session: Session, request: StopRequest, watch: Any) -> Outcome:
    engine, task, config, run = session.engine, session.task, session.config, session.run
    position, total, per_epoch = session.position, session.total, task.steps_per_epoch
    seconds, stop, gate = 0.0, False, False
    while position.step < total and not stop and not gate:
        if watch is not None:
            watch.step(position.step)
        started = time.perf_counter()
        loss, carries = compute_gradients(engine, task, config, position.step, position.carries)
        wishes = request.signal is not None, session.gate is not None and session.gate.should_stop
        loss, *wanted = summed(engine, [loss, *map(float, wishes)])  # all processes stop if one is asked to
        loss /= engine.shares[0].count
        stop, gate = (wish > 0 for wish in wanted)
        if not math.isfinite(loss):
            raise NonFiniteLoss(_explain(session))
        if session.gate is not None:
            session.gate.losses.tell(loss)
        lr = learning_rate(config, position.step, total)
        update(engine, config, lr)
        seconds += time.perf_counter() - started

        position.step += 1
        position.carries = carries
        position.loss_sum += loss
        position.loss_count += 1
        last = position.step == total
        if last or position.step % run.log_every == 0:
            _log(session, lr, seconds)
            seconds = 0.0
        if last or position.step % (run.evaluate_every or per_epoch) == 0:
            position.metrics = evaluate(engine, task)
            keep_metrics(session, position.metrics)
            session.display.evaluated(position.step, position.metrics)
        if last or stop or gate or position.step % (run.checkpoint_every or per_epoch) == 0:
            save(session)
    for name, value in position.metrics.items():
        # Whatever its training loss was, such a run has not ended well.
        if position.step == total and name.endswith("loss") and not math.isfinite(value):
            raise NonFiniteLoss(
                f"the {name.replace('_', ' ')} is not finite at step {position.step}, the last one; "
                f"{position.last_good}: its weights are finite"
            )
    outcome = Outcome(position.step, total, position.metrics, position.checkpoint)
    if gate:
        return replace(outcome, stopped=session.alarm or "a rule in the first process holds")
    if position.step < total:  # without a signal here, another process has had one
        return replace(outcome, signal=int(request.signal or signal.SIGTERM))
    return outcome


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
    engine, position, task = session.engine, session.position, session.task
    found = []
    for share, carry in zip(engine.shares, position.carries, strict=True):
        with seeded(step_seed(session.config, position.step, share.index), engine.device):  # the same dropout
            batch = task.batch(position.step, share, engine.device)
            found.append(first_nonfinite_block(task, engine.plain, batch, carry))
    mine = torch.tensor([min(found)], device=engine.device)
    first = engine.accelerator.gather(mine).min().item()  # of all processes
    known = {
        0: "it is in what enters block 1",
        ALL_FINITE: "it did not come back in a second pass",
        AFTER_THE_BLOCKS: "all blocks are finite, what follows is not",
    }
    where = known.get(first, f"first in block {first}")
    weights = engine.plain.named_parameters()
    if weight := next((name for name, one in weights if not bool(one.isfinite().all())), None):
        where += f" (the weight {weight} is not finite: the update before was too large)"
    return (
        f"the loss is not finite at step {position.step + 1}: {where}; {position.last_good}; "
        "a smaller lr, warmup_steps or clip_norm may help"
    )
