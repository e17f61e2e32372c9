"""The model on its devices: Accelerate puts it there, one step at a time is computed here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
from depthscope_lab.training.optimiser import QuickAdamW
from depthscope_lab.training.randomness import derived_seed, seeded
from depthscope_lab.training.run import Run
from depthscope_lab.training.schedule import learning_rate
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

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def processes(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device  # type: ignore[no-any-return]


@dataclass(frozen=True)
class StepResult:
    """A step before its update: the loss over the global batch, and what this process goes on with."""

    loss: float
    lr: float
    carries: list[Carry]
    stop: bool  # some process has been asked to stop
    gate: bool  # a rule asks to stop, in some process


def make_engine(task: Task, config: TrainingConfig, run: Run) -> Engine:
    """Builds the model, puts it on its devices, checks that the batch can be shared out."""
    accelerate = require("accelerate")
    on_cpu = run.cpu or not torch.accelerator.is_available()
    if on_cpu and config.precision in ("bfloat16", "float16"):
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
    require_shares(config, accelerator.num_processes)
    with seeded(derived_seed(config.seed, "build")):  # modules draw their first weights from the global state
        model = task.build()
    if config.checkpoint_activations:
        checkpoint_activations(model)
    quick = on_cpu and config.precision in ("float32", "float64")
    optimizer = (QuickAdamW if quick else torch.optim.AdamW)(
        model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    entrance, prepared = accelerator.prepare(model, optimizer)
    return Engine(accelerator, model, entrance, prepared)


def require_shares(config: TrainingConfig, processes: int) -> None:
    """Refuses a batch that cannot be dealt out evenly: means of unequal parts are not the mean."""
    if config.batch_size % (processes * config.accumulate):
        raise ValueError(
            f"expected a batch size that {processes} processes × {config.accumulate} accumulated parts divide, "
            f"got {config.batch_size}"
        )


def release(engine: Engine) -> None:
    """Ends trackers and forgets this run's precision: another run in the same process may have another."""
    if engine.processes > 1:
        # Stopped by a signal under gloo, processes hung here in 3 of 6 trials without a pause and in none of 9 with it.
        # Perhaps gloo's threads wait for Python's lock while the process group waits for them; it was not found out.
        time.sleep(_PAUSE)
    engine.accelerator.end_training()
    require("accelerate.state").AcceleratorState._reset_state()


def shares_of(engine: Engine, config: TrainingConfig) -> range:
    """The shares of a batch that this process computes."""
    return range(engine.rank * config.accumulate, (engine.rank + 1) * config.accumulate)


def step_seed(config: TrainingConfig, step: int, share: int) -> int:
    """What the random numbers inside the model (dropout) depend on, and nothing else."""
    return derived_seed(config.seed, "step", step, share)


def compute_step(
    engine: Engine,
    task: Task,
    config: TrainingConfig,
    step: int,
    total: int,
    carries: Sequence[Carry],
    wishes: Callable[[], tuple[bool, bool]],
) -> StepResult:
    """Forward and backward of step 0, 1, …: gradients are there, weights unchanged.

    `wishes` says, after the passes, whether this process has been asked to stop, and whether a rule asks for it.
    """
    accelerator = engine.accelerator
    engine.entrance.train()
    engine.optimizer.zero_grad()
    loss_sum, new_carries = 0.0, []
    for part, share in enumerate(shares_of(engine, config)):
        batch = task.batch(step, Share(share, engine.processes * config.accumulate), engine.device)
        last = part == config.accumulate - 1
        # Gradients travel between processes once per step, with the last part.
        with (
            seeded(step_seed(config, step, share), engine.device),
            nullcontext() if last else accelerator.no_sync(engine.entrance),
        ):
            loss, carry = task.loss(engine.entrance, batch, carries[part])
            accelerator.backward(loss / config.accumulate)
        loss_sum += loss.item()
        new_carries.append(None if carry is None else {key: tensor.detach() for key, tensor in carry.items()})
    shares = engine.processes * config.accumulate
    loss_sum, stop, gate = summed(
        engine, [loss_sum if math.isfinite(loss_sum) else math.nan, *(float(wish) for wish in wishes())]
    )
    return StepResult(loss_sum / shares, learning_rate(config, step, total), new_carries, stop > 0, gate > 0)


def update(engine: Engine, config: TrainingConfig, lr: float) -> None:
    """Moves the weights by the gradients that `compute_step` left."""
    if config.clip_norm is not None:
        engine.accelerator.clip_grad_norm_(engine.entrance.parameters(), config.clip_norm)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    engine.optimizer.step()


def evaluate(engine: Engine, task: Task) -> dict[str, float]:
    """The task's test numbers, every process its share."""
    engine.plain.eval()
    with torch.no_grad():
        sums = task.evaluate(engine.plain, Share(engine.rank, engine.processes), engine.device)
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
