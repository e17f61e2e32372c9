"""Whether a model lets a token see later ones, found by trying."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.probing.inputs import Batch
from depthscope.probing.taps import Taps, Visit


def sees_later_tokens(model: nn.Module, anatomy: Anatomy, batch: Batch) -> bool:
    """Changes the last token of the inputs and looks whether earlier tokens of the last block change.

    Only the inputs that have a token axis are changed: ids, or floating-point tokens (batch, n, d).
    True, the careful answer for a model that need not be causal, if nothing in the inputs can be changed
    (images, say): such models are not causal.
    """
    before = _last_output(model, anatomy, batch)
    changed = _change_last_token(batch, before.shape[1], anatomy.token_axis)
    if changed is None:
        return True
    after = _last_output(model, anatomy, changed)
    return not torch.equal(before[:, :-1], after[:, :-1])


def _last_output(model: nn.Module, anatomy: Anatomy, batch: Batch) -> Tensor:
    outputs: list[Tensor] = []

    def keep(_visit: Visit, _station: str, tokens: Tensor, _source: Tensor) -> None:
        outputs[:] = [tokens.clone()]

    with Taps(model, anatomy, {"output"}, keep):
        model(*batch.args, **batch.kwargs)
    if not outputs:
        raise ValueError(f"none of the blocks {[b.name for b in anatomy.blocks][:4]} ran; name them with blocks=")
    return outputs[0]


def _change_last_token(batch: Batch, n: int, axis: int) -> Batch | None:
    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        ids = not value.is_floating_point() and value.ndim == 2 and value.shape[1] == n
        tokens = value.is_floating_point() and value.ndim == 3 and value.shape[axis] == n
        if not (ids or tokens):
            return None
        value = value.clone()
        last = value[:, -1] if ids or axis == 1 else value[-1]
        if ids:
            last.copy_(torch.where(last > 0, last - 1, last + 1))
        else:
            last.add_(1.0)
        return value

    for index, value in enumerate(batch.args):
        if (new := changed(value)) is not None:
            return Batch((*batch.args[:index], new, *batch.args[index + 1 :]), batch.kwargs)
    for name, value in batch.kwargs.items():
        if "mask" not in name and (new := changed(value)) is not None:
            return Batch(batch.args, batch.kwargs | {name: new})
    return None
