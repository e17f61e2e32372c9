"""What a run will cost, found out on the meta device: no weight is drawn, no data is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthscope.models.memory import count_parameters
from depthscope.training.config import TrainingConfig
from depthscope.training.task import Share, Task

_META = torch.device("meta")


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


def estimate(task: Task, config: TrainingConfig, processes: int = 1) -> Estimate:
    """`task` is without data (`make_empty_task`).

    The activations are what autograd keeps in a pass on the meta device, in the precision of the weights:
    a mixed precision needs less. With checkpoint_activations: what enters the blocks, and one block's own.
    Workspace of kernels, fragmentation and the data are not in it.
    """
    if config.batch_size % (processes * config.accumulate):
        raise ValueError(
            f"expected a batch size that {processes} processes × {config.accumulate} accumulated parts divide, "
            f"got {config.batch_size}"
        )
    with _META:
        model = task.build()
    parameters = count_parameters(model)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    batch = task.batch(0, Share(0, processes * config.accumulate), _META)
    kept = _kept_bytes(task, model, batch)
    if config.checkpoint_activations:
        from depthscope.training.engine import checkpoint_activations

        one_block = kept // config.depth
        checkpoint_activations(model)
        kept = _kept_bytes(task, model, batch) + one_block
    return Estimate(parameters, weights, weights, 2 * weights, kept)


def _kept_bytes(task: Task, model: torch.nn.Module, batch: Any) -> int:
    """Bytes of the storages that autograd keeps, each once, weights not counted."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = (storage.nbytes(), tensor)  # the tensor, or its place may be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task.loss(model, batch, None)
    return sum(size for size, _ in kept.values())
