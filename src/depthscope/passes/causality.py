"""Whether a model lets a token see later ones, found by trying."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.passes.inputs import Batch, call_alike
from depthscope.passes.machine import Listen, Machine, Visit
from depthscope.passes.tokens import batch_first

ROUNDING = 8  # machine epsilons of a token's norm: what regrouped sums (mixtures of experts) may change
CAUTION = 10  # times the change that the model shows without any reason: below that, nothing was seen


class Seen(NamedTuple):
    """What enters the blocks and what leaves them, (batch, n, d), and the mask of the real tokens."""

    entrance: Tensor
    output: Tensor
    real: Tensor  # (batch, n)


def is_causal(model: nn.Module, anatomy: Anatomy, batch: Batch) -> bool | None:
    """Changes the last real token of each sequence and looks whether earlier ones change in the last block.

    What is changed is the input that these blocks read: of a decoder its own tokens, not those of its encoder. A change
    counts only beyond what the model's own rounding makes: the same inputs a second time, and in another order of the
    sequences, which mixtures of experts group otherwise. Doubt counts as causal: a change that rounding could make,
    noise (dropout that is always on) that hides it, numbers that are not finite.

    Four or five more passes of the model. Only inputs that have a token axis are changed: ids (batch, n), or
    floating-point tokens. None if no input changes what enters the blocks (images, say), or nothing stands before.
    """
    before = seen(model, anatomy, batch)
    position = torch.arange(before.real.shape[1], device=before.real.device)
    last = torch.where(before.real, position, -1).amax(dim=-1, keepdim=True)  # (batch, 1)
    found = reaches(model, anatomy, batch, before, position == last, before.real & (position < last))
    return None if found is None else not found


def hidden_tokens_reach_others(model: nn.Module, anatomy: Anatomy, batch: Batch) -> bool:
    """Whether a change of tokens that the mask hides changes real ones: then it may not be what it was taken for."""
    before = seen(model, anatomy, batch)
    return reaches(model, anatomy, batch, before, ~before.real, before.real) is True


def reaches(
    model: nn.Module, anatomy: Anatomy, batch: Batch, before: Seen, tokens: Tensor, others: Tensor
) -> bool | None:
    """Whether a change of some tokens (batch, n) changes others in the last block; doubt counts as no.

    None if there is nothing to compare, or if no input changes what enters the blocks at these tokens alone.
    """
    if not others.any() or not tokens.any():
        return None
    for changed in _changes(batch, tokens, anatomy.token_axis):
        after = seen(model, anatomy, changed)
        if after.output.shape != before.output.shape or not _enters_there(before.entrance, after.entrance, tokens):
            continue  # what these blocks read is another input, or the whole of it in every token
        change = _largest_change(before.output, after.output, others)
        noise = _noise(model, anatomy, batch, before, others)
        return change > max(CAUTION * noise, ROUNDING * torch.finfo(before.output.dtype).eps)
    return None


def _enters_there(before: Tensor, after: Tensor, tokens: Tensor) -> bool:
    """Whether the change of an input at these tokens (batch, n) changed what enters the blocks there and only there."""
    if before.shape != after.shape or before.shape[:2] != tokens.shape:
        return False
    changed = (before != after).any(dim=-1)
    return bool(changed.any()) and not bool((changed & ~tokens).any())


def seen(model: nn.Module, anatomy: Anatomy, batch: Batch) -> Seen:
    """One pass of the model."""
    entrances: list[Tensor] = []
    outputs: list[tuple[Tensor, Tensor | None]] = []

    def keep(visit: Visit, _station: str, tokens: Tensor, _source: Tensor) -> None:
        if visit.number == 1:
            entered = batch_first(visit.entered, anatomy.token_axis, visit.shape, anatomy.maps)
            assert entered is not None
            entrances[:] = [entered.clone()]
        outputs[:] = [(tokens.clone(), visit.real)]

    with Machine(model, anatomy, Listen({"output"}, keep)):
        call_alike(model, batch)
    if not outputs:
        raise ValueError(f"none of the blocks {[b.name for b in anatomy.blocks][:4]} ran; name them with blocks=")
    output, mask = outputs[0]
    real = torch.ones(output.shape[:2], dtype=torch.bool, device=output.device) if mask is None else mask
    return Seen(entrances[0], output, real)


def _largest_change(before: Tensor, after: Tensor, where: Tensor) -> float:
    """The largest ‖y_i − x_i‖/‖x_i‖ over the tokens at `where`; nan if a number is not finite."""
    x, y = before[where].double(), after[where].double()
    return float(((y - x).norm(dim=-1) / x.norm(dim=-1).clamp(min=torch.finfo(before.dtype).tiny)).amax())


def _noise(model: nn.Module, anatomy: Anatomy, batch: Batch, before: Seen, where: Tensor) -> float:
    """What changes without a reason: in a second pass, and in a pass with the sequences in reverse order."""
    found = [_largest_change(before.output, seen(model, anatomy, batch).output, where)]
    reversed_batch = _reversed(batch, before.output.shape[0], anatomy.token_axis)
    if reversed_batch is not None:
        again = seen(model, anatomy, reversed_batch).output
        if again.shape == before.output.shape:
            found.append(_largest_change(before.output, again.flip(0), where))
    return max(found) if all(value == value for value in found) else float("inf")


def _reversed(batch: Batch, size: int, axis: int) -> Batch | None:
    """The batch with its sequences in reverse order; None if there is one only, or an input does not say which axis."""

    def turned(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        first = 0 if axis == 1 or value.ndim < 3 else 1
        return value.flip(first) if value.shape[first] == size else value

    if size < 2:
        return None
    return Batch(tuple(map(turned, batch.args)), {name: turned(value) for name, value in batch.kwargs.items()})


def _changes(batch: Batch, where: Tensor, axis: int) -> Iterator[Batch]:
    """The batch with other tokens at `where` (batch, n) in one of its inputs, for every input that has tokens there."""

    def changed(value: Any) -> Tensor | None:
        if not isinstance(value, Tensor):
            return None
        if not value.is_floating_point() and value.shape == where.shape:
            return torch.where(where, torch.where(value > 0, value - 1, value + 1), value)
        at = where if axis == 1 else where.T
        if value.is_floating_point() and value.ndim == 3 and value.shape[:2] == at.shape:
            return torch.where(at.unsqueeze(-1), 1 - value, value)  # a norm would not see value + 1
        return None

    for index, value in enumerate(batch.args):
        if (new := changed(value)) is not None:
            yield Batch((*batch.args[:index], new, *batch.args[index + 1 :]), batch.kwargs)
    for name, value in batch.kwargs.items():
        if "mask" not in name and "position" not in name and (new := changed(value)) is not None:
            yield Batch(batch.args, batch.kwargs | {name: new})
