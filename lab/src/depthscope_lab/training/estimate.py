"""What a run will cost, found out on the meta device: no weight is drawn, no data is read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.memory import available_memory, count_parameters, counting
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.engine import checkpoint_activations, require_shares
from depthscope_lab.training.loading import make_task
from depthscope_lab.training.task import Carry, Share, Task

_META = torch.device("meta")
_NO_SIZES = ("seed", "steps", "epochs", "warmup_steps", "depth")  # they make no tensor larger


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, of one process."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept by a forward pass for the backward pass

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(config: TrainingConfig, processes: int = 1) -> Estimate:
    """Everything is linear in depth, so models of 1 and 2 blocks tell of any number.

    The activations are what autograd keeps in a pass on the meta device, in the precision of the weights:
    a mixed precision needs less. With checkpoint_activations: what enters the blocks, and one block's own.
    Workspace of kernels, fragmentation and the data are not in it.
    """
    require_shares(config, processes)
    share = Share(0, processes * config.accumulate)
    in_all_blocks = tuple(remedy.without("blocks", "every") for remedy in config.remedies)  # the largest that it can be
    found = []
    with counting(_largest(config)):
        for depth in (1, 2):
            task = make_task(replace(config, depth=depth, remedies=in_all_blocks), empty=True)
            with _META:
                model = task.build()
            _, carry = task.loss(model, task.batch(0, share, _META), None)
            batch = task.batch(1, share, _META)  # from the second step on there is a memory
            weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
            kept = _kept_bytes(task, model, batch, carry)
            checkpoint_activations(model)
            found.append((count_parameters(model), weights, kept, _kept_bytes(task, model, batch, carry)))
    one, two = found
    parameters, weights, kept, kept_checkpointed = (
        first + (config.depth - 1) * (second - first) for first, second in zip(one, two, strict=True)
    )
    if config.checkpoint_activations:
        kept = kept_checkpointed + two[2] - one[2]
    return Estimate(parameters, weights, weights, 2 * weights, kept)


def require_fits(config: TrainingConfig, processes: int = 1, *, cpu: bool = False) -> Estimate:
    """Refuses a run that this machine cannot hold, before any of its weights exist.

    Activations count where they are in the machine's own memory, half in mixed precision.
    """
    cost = estimate(config, processes)
    half = config.precision in ("bfloat16", "float16")
    elsewhere = torch.cuda.is_available() and not cpu
    needed = cost.total - (cost.activations if elsewhere else cost.activations // 2 if half else 0)
    if needed > (available := available_memory()):
        raise ValueError(
            f"expected a run that fits into memory, got depth {config.depth}, {_largest(config)}: "
            f"{needed / 1e9:.3g} GB needed for {cost.parameters:.3g} parameters, gradients, AdamW and activations, "
            f"{available / 1e9:.1f} GB available"
        )
    return cost


def _largest(config: TrainingConfig) -> str:
    """The settings that are to blame if sizes are too large: the greatest whole numbers."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    sizes = {name: value for name, value in values.items() if type(value) is int and name not in _NO_SIZES}
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:3]
    return ", ".join(f"{name} {sizes[name]}" for name in largest)


def _kept_bytes(task: Task, model: nn.Module, batch: Any, carry: Carry) -> int:
    """Bytes of the storages that autograd keeps, each once, weights not counted."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = (storage.nbytes(), tensor)  # with the tensor, or its place is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task.loss(model, batch, carry)
    return sum(size for size, _ in kept.values())
