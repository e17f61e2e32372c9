"""The model on its devices: Accelerate puts it there, one step at a time is computed here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from depthscope.anatomy import anatomy_of
from depthscope.half_precision import require_half_precision
from depthscope_lab.extras import require
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.randomness import derived_seed, seeded
from depthscope_lab.training.run import Run
from depthscope_lab.training.task import Carry, Share, Task

COMPILER = "inductor"
_PAUSE = 0.5  # seconds
_MIXED = {"float32": "no", "float64": "no", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Engine:
    """`plain` is the model itself: weights, evaluation, observation. `entrance` is what training calls: the
    same weights, compiled and distributed as asked for."""

    accelerator: Any
    plain: nn.Module
    entrance: nn.Module
    optimizer: Any
    processes: int
    shares: tuple[Share, ...]  # of a batch, that this process computes
    is_main: bool
    device: torch.device


@contextmanager
def running_engine(task: Task, config: TrainingConfig, run: Run) -> Iterator[Engine]:
    """Builds the model, puts it on its devices, checks that the batch can be shared out; at the end trackers end, and
    this run's precision is forgotten: another run in the same process may have another.
    """
    try:
        if run.tracker != "none":
            require(run.tracker)
    except ImportError:
        raise ValueError(f"the tracker {run.tracker} needs its package: pip install {run.tracker}") from None
    accelerate = require("accelerate")
    if config.precision in ("bfloat16", "float16") and (run.cpu or not torch.accelerator.is_available()):
        require_half_precision()
    accelerator = accelerate.Accelerator(
        mixed_precision=_MIXED[config.precision],
        cpu=run.cpu,
        dynamo_backend=COMPILER if config.compile else None,
        log_with=None if run.tracker == "none" else run.tracker,
        project_config=accelerate.utils.ProjectConfiguration(
            project_dir=str(run.out), logging_dir=str(run.out / "tensorboard")
        ),
    )
    rank, processes = int(accelerator.process_index), int(accelerator.num_processes)
    require_shares(config, processes)
    with seeded(derived_seed(config.seed, "build")):  # modules draw their first weights from the global state
        model = task.build()
    if config.checkpoint_activations:
        checkpoint_activations(model)
    # One kernel for all weights. A GradScaler, which float16 has, divides gradients itself.
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=config.precision != "float16",
    )
    entrance, prepared = accelerator.prepare(model, optimizer)
    mine = range(rank * config.accumulate, (rank + 1) * config.accumulate)
    shares = tuple(Share(index, processes * config.accumulate) for index in mine)
    is_main, device = bool(accelerator.is_main_process), accelerator.device
    try:
        yield Engine(accelerator, model, entrance, prepared, processes, shares, is_main, device)
    finally:
        if processes > 1:
            # Stopped by a signal under gloo, processes hung here in 3 of 6 trials without a pause and in none of 9 with
            # it. Perhaps gloo's threads wait for Python's lock while the process group waits for them; it was not found
            # out.
            time.sleep(_PAUSE)
        accelerator.end_training()
        require("accelerate.state").AcceleratorState._reset_state()


def require_shares(config: TrainingConfig, processes: int) -> None:
    """Refuses a batch that cannot be dealt out evenly: means of unequal parts are not the mean."""
    if config.batch_size % (processes * config.accumulate):
        raise ValueError(
            f"expected a batch size that {processes} processes × {config.accumulate} accumulated parts divide, "
            f"got {config.batch_size}"
        )


def step_seed(config: TrainingConfig, step: int, share: int) -> int:
    """What the random numbers inside the model (dropout) depend on, and nothing else."""
    return derived_seed(config.seed, "step", step, share)


def compute_gradients(
    engine: Engine, task: Task, config: TrainingConfig, step: int, carries: Sequence[Carry]
) -> tuple[float, list[Carry]]:
    """Forward and backward of step 0, 1, …, weights unchanged: the sum of the losses of this process's shares (nan if
    one is not finite), and what each of them carries on.
    """
    engine.entrance.train()
    engine.optimizer.zero_grad()
    total, carried = 0.0, []
    for share, before in zip(engine.shares, carries, strict=True):
        batch = task.batch(step, share, engine.device)
        last = share == engine.shares[-1]
        # Gradients travel between processes once per step, with the last part.
        with (
            seeded(step_seed(config, step, share.index), engine.device),
            nullcontext() if last else engine.accelerator.no_sync(engine.entrance),
        ):
            loss, carry = task.loss(engine.entrance, batch, before)
            engine.accelerator.backward(loss / config.accumulate)
        total += loss.item()
        carried.append(None if carry is None else {key: tensor.detach() for key, tensor in carry.items()})
    return (total if math.isfinite(total) else math.nan), carried


def learning_rate(config: TrainingConfig, step: int, total: int) -> float:
    """The rate of step 0, 1, …, total − 1: a function of the step, so that nothing has to be saved.

    `drops`: × drop_factor from each share `drop_at` of the run on. `cosine`: ½(1 + cos(π·step/total)).
    During the first `warmup_steps` w, all of it × (step + 1)/w.
    """
    share = step / total
    factor = 1.0
    if config.schedule == "drops":
        factor = config.drop_factor ** sum(share >= at for at in config.drop_at)
    elif config.schedule == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * share))
    if step < config.warmup_steps:
        factor *= (step + 1) / config.warmup_steps
    return config.lr * factor


def update(engine: Engine, config: TrainingConfig, lr: float) -> None:
    """Moves the weights by the gradients that `compute_gradients` left."""
    if config.clip_norm is not None:
        engine.accelerator.clip_grad_norm_(engine.entrance.parameters(), config.clip_norm)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    engine.optimizer.step()


def evaluate(engine: Engine, task: Task) -> dict[str, float]:
    """The task's test numbers, every process its share."""
    engine.plain.eval()
    rank = engine.shares[0].index // len(engine.shares)
    with torch.no_grad():
        sums = task.evaluate(engine.plain, Share(rank, engine.processes), engine.device)
    engine.plain.train()
    totals = dict(zip(sums, summed(engine, list(sums.values())), strict=True))
    count = totals.pop("count")
    return task.report({name: value / count for name, value in totals.items()})


def summed(engine: Engine, values: list[float]) -> list[float]:
    """The sums over all processes, which all of them get."""
    if engine.processes == 1:
        return values
    dtype = torch.float32 if engine.device.type == "mps" else torch.float64
    found = engine.accelerator.reduce(torch.tensor(values, dtype=dtype, device=engine.device), "sum")
    return [float(value) for value in found.tolist()]


def checkpoint_activations(model: nn.Module) -> None:
    """Keeps only what enters a block for the backward pass, which computes the rest of it again."""
    for block in anatomy_of(model).blocks:
        block.module.forward = partial(checkpoint, block.module.forward, use_reentrant=False)  # type: ignore[method-assign]
