"""Whether a model lets a token see later ones, found by trying."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.passes.inputs import Batch
from depthscope.passes.machine import Listen, Machine, Visit


def is_causal(model: nn.Module, anatomy: Anatomy, batch: Batch) -> bool | None:
    """Changes the last real token of each sequence and looks whether earlier ones change in the last block.

    Two more passes of the model. Only inputs that have a token axis are changed: ids (batch, n), or
    floating-point tokens. None if there is nothing to change (images, say) or nothing before it.
    """
    before, mask = _last_output(model, anatomy, batch)
    real = torch.ones(before.shape[:2], dtype=torch.bool, device=before.device) if mask is None else mask
    position = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, position, -1).amax(dim=-1, keepdim=True)  # (batch, 1)
    earlier = real & (position < last)
    changed = _change(batch, position == last, anatomy.token_axis)
    if changed is None or not earlier.any():
        return None
    after, _ = _last_output(model, anatomy, changed)
    return torch.equal(before[earlier], after[earlier])


def _last_output(model: nn.Module, anatomy: Anatomy, batch: Batch) -> tuple[Tensor, Tensor | None]:
    found: list[tuple[Tensor, Tensor | None]] = []

    def keep(visit: Visit, _station: str, tokens: Tensor, _source: Tensor) -> None:
        found[:] = [(tokens.clone(), visit.real)]

    with Machine(model, anatomy, Listen({"output"}, keep)):
        model(*batch.args, **batch.kwargs)
    if not found:
        raise ValueError(f"none of the blocks {[b.name for b in anatomy.blocks][:4]} ran; name them with blocks=")
    return found[0]


def _change(batch: Batch, where: Tensor, axis: int) -> Batch | None:
    """The batch with other tokens at `where` (batch, n); None if no input is a sequence of tokens."""

    def changed(value: Any) -> Tensor | None:
        if not isinstance(value, Tensor):
            return None
        if not value.is_floating_point() and value.shape == where.shape:
            return torch.where(where, torch.where(value > 0, value - 1, value + 1), value)
        at = where if axis == 1 else where.T
        if value.is_floating_point() and value.ndim == 3 and value.shape[:2] == at.shape:
            return torch.where(at.unsqueeze(-1), value + 1, value)
        return None

    for index, value in enumerate(batch.args):
        if (new := changed(value)) is not None:
            return Batch((*batch.args[:index], new, *batch.args[index + 1 :]), batch.kwargs)
    for name, value in batch.kwargs.items():
        if "mask" not in name and (new := changed(value)) is not None:
            return Batch(batch.args, batch.kwargs | {name: new})
    return None
