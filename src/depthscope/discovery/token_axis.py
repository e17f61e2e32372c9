"""Which axis of a model's activations is the batch: found by changing one sequence and looking where the change stays.

Sequences of a batch do not see each other; tokens of a sequence do. The change of one sequence therefore stays in one
place of one axis, and that axis is the batch. Where a change stays in no place, the sequences are not independent, or
what was taken for blocks are none: nothing is measured then.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.hooks.machine import Listen, Machine, Visit
from depthscope.inputs.batches import Batch, call_alike, other_numbers, with_one_input_changed

ROUNDING = 64  # machine epsilons of the largest number: what another order of sums may change


def find_token_axis(model: nn.Module, anatomy: Anatomy, batch: Batch) -> int:
    """1 if activations are (batch, n, d), 0 if they are (n, batch, d); as in `anatomy` if the inputs cannot tell.

    Up to three more passes of the model. Refuses a model in which the change of one sequence changes others.
    """
    before, known = _outputs(model, anatomy, batch), []
    if before and before[0].ndim == 3 and before[0].shape[1] == before[0].shape[2]:
        _refuse_turned(model, anatomy, batch)
    for axis in (0, 1):
        changed = next(with_one_input_changed(batch, partial(_with_first_changed, axis=axis)), None)
        if changed is None:
            continue
        after = _outputs(model, anatomy, changed)
        if axis == 0 and _share_a_row(before, after, batch):
            raise ValueError(
                "the model puts its sequences into one row, of which the change of one sequence changes a part: which "
                "tokens belong together cannot be seen. Give one sequence at a time"
            )
        if (stays := _where_it_stays(before, after)) is not None:
            known.append(stays)
    if known and not any(known):
        raise ValueError(
            "the change of one sequence of the batch changes the others in these blocks: their tokens cannot be told "
            "from their sequences. Name the blocks with blocks='path.to.layers.*', or say token_axis="
        )
    batch_axes = {next(iter(axes)) for axes in known if len(axes) == 1}
    return 1 - batch_axes.pop() if len(batch_axes) == 1 else anatomy.token_axis


def _refuse_turned(model: nn.Module, anatomy: Anatomy, batch: Batch) -> None:
    """Where tokens are as wide as there are tokens: a change of the first of the ids must not enter as a column."""

    def changed(value: Any) -> Tensor | None:
        if not isinstance(value, Tensor) or value.ndim != 2 or value.is_floating_point():
            return None
        return torch.cat([other_numbers(value[:, :1]), value[:, 1:]], dim=1)

    for other in with_one_input_changed(batch, changed):
        x, y = (_outputs(model, anatomy, each, "input")[0] for each in (batch, other))
        if x.ndim == 3 and x.shape == y.shape:
            moved = (x != y).any(dim=0)  # (n, d)
            if int(moved.any(dim=0).sum()) == 1 < int(moved.any(dim=1).sum()):
                raise ValueError(
                    f"the tokens of the blocks are (batch, d, n), {tuple(x.shape)}: a token of the inputs changes a "
                    "column of it. Name blocks whose tokens are (batch, n, d) with blocks='path.to.layers.*'"
                )


def _outputs(model: nn.Module, anatomy: Anatomy, batch: Batch, station: str = "output") -> list[Tensor]:
    found: list[Tensor] = []

    def keep(visit: Visit, _station: str, _tokens: Tensor, source: Tensor) -> None:
        source = visit.with_streams(source)
        if source.ndim == 4:
            source = source.flatten(2) if anatomy.streams else source.flatten(1, 2) if anatomy.maps else source
        found.append(source.clone())

    with Machine(model, anatomy, Listen({station}, keep)):
        call_alike(model, batch)
    return found


def _with_first_changed(value: Any, axis: int) -> Tensor | None:
    """Other numbers at place 0 of an axis; None if there is one place only, or if the axis cannot be a batch (of ids
    and images the first axis is)."""
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[axis] < 2 or value.dtype == torch.bool:
        return None
    if axis == 1 and not (value.ndim == 3 and value.is_floating_point()):
        return None
    new = value.clone()
    place = new.select(axis, 0)
    place.copy_(other_numbers(place))
    return new


def _share_a_row(before: list[Tensor], after: list[Tensor], batch: Batch) -> bool:
    """Whether a block has a single row of tokens, (n, d), (1, n, d) or (n, 1, d), where no input has such a shape, and
    the change of one sequence stays in a part of it."""
    given = [v.shape[:2] for v in (*batch.args, *batch.kwargs.values()) if isinstance(v, Tensor)]
    for x, y in zip(before, after, strict=False):
        is_row = x.shape == y.shape and x.ndim > 1 and x.shape[:-1].numel() == max(x.shape[:-1]) > 1
        if is_row and x.shape[:2] not in given and x.shape[:2][::-1] not in given:
            moved = (y - x).abs().amax(dim=-1) > ROUNDING * torch.finfo(x.dtype).eps * x.abs().max()
            if bool(moved.any()) and not bool(moved.all()):
                return True
    return False


def _where_it_stays(before: list[Tensor], after: list[Tensor]) -> set[int] | None:
    """The axes (of the first two) along which only place 0 has changed, in every block; None if nothing has changed."""
    axes, anything = {0, 1}, False
    for x, y in zip(before, after, strict=True):
        if x.ndim != 3 or x.shape != y.shape:
            return None
        change, sizes = (y - x).abs().amax(dim=-1), x.abs().amax(dim=-1)  # (a, b)
        for axis in (0, 1):  # if it is the batch, each place of it rounds by its own sizes: another may be huge
            moved = change > ROUNDING * torch.finfo(x.dtype).eps * sizes.amax(dim=1 - axis, keepdim=True)
            anything |= bool(moved.any())
            if bool(moved.narrow(axis, 1, moved.shape[axis] - 1).any()):
                axes.discard(axis)
    return axes if anything else None
