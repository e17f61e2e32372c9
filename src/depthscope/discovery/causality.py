"""Whether a model lets a token see later ones, found by trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.hooks.machine import Listen, Machine, Visit
from depthscope.hooks.tokens import batch_first
from depthscope.inputs.batches import Batch, call_alike
from depthscope.transfers import fetched

ROUNDING = 8  # machine epsilons of a token's norm: what regrouped sums (mixtures of experts) may change
CAUTION = 10  # times the change that the model shows without any reason: below that, nothing was seen

# What tokens see: earlier ones only, all, earlier ones and some later ones (chunks, a look ahead, a window), or later
# ones only. "nothing": no other token's change was seen in the last block.
Sight = Literal["earlier", "all", "partly later", "later", "nothing"]


class Seen(NamedTuple):
    """What enters the blocks and what leaves them, (batch, n, d), the mask of the real tokens, and what was said."""

    entrance: Tensor
    first: Tensor  # leaves the first block
    output: Tensor  # leaves the last
    real: Tensor  # (batch, n)
    bidirectional: bool | None  # what the calls of the blocks said; None: nothing


def is_causal(model: nn.Module, anatomy: Anatomy, batch: Batch) -> bool | None:
    """Whether no token sees any later one, by `sight`; doubt counts as causal. None if it cannot be tried."""
    found = sight(model, anatomy, batch)
    return None if found is None else found in ("earlier", "nothing")


def sight(model: nn.Module, anatomy: Anatomy, batch: Batch, *, exactly: bool = True) -> Sight | None:
    """Changes the last real token of each sequence, then the first, and looks which others change in the last block.

    All tokens are seen only if the last token's change reaches every earlier one, and, if it reaches any of them in the
    first block, all of them there: where attention goes by chunks it reaches some, and where it looks ahead by a few
    tokens it reaches more with every block. Later ones alone are seen if the first token's change does not reach the
    last, while the last one's reaches the first.

    What is changed is the input that these blocks read: of a decoder its own tokens, not those of its encoder. A change
    counts only beyond what the model's own rounding makes: the same inputs a second time, and in another order of the
    sequences, which mixtures of experts group otherwise. Doubt counts as causal: a change that rounding could make,
    noise (dropout that is always on) that hides it, numbers that are not finite. Without `exactly` every change counts:
    what is seen may then be noise, and what is not seen is not there.

    Three passes of a causal model, four or five of others; without `exactly` two where the last token reaches all. Only
    inputs that have a token axis are changed: ids (batch, n), or floating-point tokens. None if no input changes what
    enters the blocks (images, say), or nothing stands before.
    """
    return _sight(model, anatomy, batch, seen(model, anatomy, batch), exactly)


def _sight(model: nn.Module, anatomy: Anatomy, batch: Batch, before: Seen, exactly: bool) -> Sight | None:
    n = before.real.shape[1]
    last, first = _ends(before.real)
    position = torch.arange(n, device=before.real.device)
    found, real = _tried(_trials(model, anatomy, batch, before, position == last), [before.real])
    if found is None:
        return None
    real = real[0] != 0
    last, first = _ends(real)
    position = torch.arange(n)
    earlier, later = real & (position < last), real & (position > first)
    if not earlier.any():
        return None
    epsilon = ROUNDING * torch.finfo(before.output.dtype).eps if exactly else 0.0
    from_last = earlier & (found.last > epsilon)
    if not exactly and bool(from_last[earlier].all()):
        return "all"
    in_doubt = exactly and bool(from_last.any())
    noise = _noise(model, anatomy, batch, before) if in_doubt else []
    firsts = (position == first).to(before.real.device)
    forth, noise = _tried(_trials(model, anatomy, batch, before, firsts), noise)
    largest = _largest(noise, earlier) if in_doubt else (0.0, 0.0)
    from_last = earlier & (found.last > max(epsilon, CAUTION * largest[1]))
    to_all = bool(from_last[earlier].all())
    from_first = None if forth is None else later & (forth.last > 0)
    forwards = None if from_first is None else bool(from_first.any())
    if not bool(from_last.any()):
        return "nothing" if forwards is False else "earlier"
    if from_first is not None:
        several = earlier.any(dim=-1)  # sequences of more than one real token
        to_first = from_last.gather(1, first.clamp(max=n - 1))[several]
        to_last = from_first.gather(1, last.clamp(min=0))[several]
        if not forwards or (bool(to_first.all()) and not bool(to_last.any())):
            return "later"
        if not exactly and not bool(to_first.any()) and not bool(to_last.any()):
            return "all"  # a window, as wide in both directions
    at_once = (found.first > CAUTION * largest[0])[earlier]
    return "all" if to_all and bool(at_once.all() or not at_once.any()) else "partly later"


def _ends(real: Tensor) -> tuple[Tensor, Tensor]:
    """Where the last and the first real token of each sequence stand, (batch, 1) each; −1 and n where there is none."""
    position = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, position, -1).amax(dim=-1, keepdim=True)
    return last, torch.where(real, position, position.numel()).amin(dim=-1, keepdim=True)


def with_sight(model: nn.Module, anatomy: Anatomy, batch: Batch, *, again: bool = False) -> Anatomy:
    """The anatomy with what a batch shows of its causality, if it is one trunk and nobody has said more.

    What is known to be causal is believed. `again` tries also what is known not to be (somebody may have changed the
    library's own functions), in two or three passes: it counts only if tokens are then seen to see earlier ones and
    not all later ones. PyTorch's layers are told by each call: they are tried `again` in the same way, and found causal
    only if the call did not say so.
    """
    if anatomy.causal_by == "told" or anatomy.causal or len(anatomy.parts) > 1:
        return anatomy
    by_call = any(block.causal_arguments for block in anatomy.blocks)
    if by_call or anatomy.causal is False:
        if not again:
            return anatomy
        before = seen(model, anatomy, batch)
        if by_call and not before.bidirectional:
            return anatomy
        found = _sight(model, anatomy, batch, before, exactly=False)
        return anatomy if found in (None, "all", "nothing") else _as_seen(anatomy, found)
    return _as_seen(anatomy, sight(model, anatomy, batch))


def _as_seen(anatomy: Anatomy, found: Sight | None) -> Anatomy:
    if found is None:
        return anatomy
    if found == "later":
        return replace(anatomy, causal_by="tried", right_to_left=True)
    return replace(anatomy.with_causality(found != "all"), causal_by="tried", sees_some_later=found == "partly later")


def hidden_tokens_reach_others(model: nn.Module, anatomy: Anatomy, batch: Batch) -> bool:
    """Whether a change of tokens that the mask hides changes real ones: then it may not be what it was taken for."""
    before = seen(model, anatomy, batch)
    return reaches(model, anatomy, batch, before, ~before.real, before.real) is True


def reaches(
    model: nn.Module, anatomy: Anatomy, batch: Batch, before: Seen, tokens: Tensor, others: Tensor
) -> bool | None:
    """Whether a change of some tokens (batch, n) changes any of the others in the last block; doubt counts as no.

    None if there is nothing to compare, or if no input changes what enters the blocks at these tokens alone.
    """
    found, among = _tried(_trials(model, anatomy, batch, before, tokens), [others])
    if found is None or not among[0].any():
        return None
    where = among[0] != 0
    rounding = ROUNDING * torch.finfo(before.output.dtype).eps
    if not bool((where & (found.last > rounding)).any()):
        return False
    _, noise = _largest(fetched(_noise(model, anatomy, batch, before)), where)
    return bool((where & (found.last > max(rounding, CAUTION * noise))).any())


class Trial(NamedTuple):
    """What the change of one input has made."""

    entered: Tensor  # (), whether it changed what enters the blocks at these tokens, and only there
    first: Tensor  # (batch, n), the change of each token behind the first block
    last: Tensor  # (batch, n), behind the last


def _trials(model: nn.Module, anatomy: Anatomy, batch: Batch, before: Seen, tokens: Tensor) -> Iterator[Trial]:
    """One pass for every input that can be changed at some tokens (batch, n): the right one is what these blocks read,
    at each place for itself."""
    for changed in _changes(batch, tokens, anatomy.token_axis):
        after = seen(model, anatomy, changed)
        alike = (before.output.shape, before.entrance.shape) == (after.output.shape, after.entrance.shape)
        if alike and before.entrance.shape[:2] == tokens.shape:
            moved = (before.entrance != after.entrance).any(dim=-1)
            entered = moved.any() & ~(moved & ~tokens.to(moved.device)).any()
            yield Trial(entered, _change(before.first, after.first), _change(before.output, after.output))


def _tried(trials: Iterator[Trial], also: list[Tensor]) -> tuple[Trial | None, list[Tensor]]:
    """The first trial that entered, and what else is asked for, on the host: one transfer, where that is the first."""
    asked = None
    for trial in trials:
        found = fetched([*trial, *([] if asked is not None else also)])
        asked = found[3:] if asked is None else asked
        if found[0]:
            return Trial(*found[:3]), asked
    return None, fetched(also) if asked is None else asked


def seen(model: nn.Module, anatomy: Anatomy, batch: Batch) -> Seen:
    """One pass of the model."""
    entrances: list[Tensor] = []
    firsts: list[Tensor] = []
    outputs: list[tuple[Tensor, Tensor | None]] = []
    said: list[bool | None] = []

    def keep(visit: Visit, _station: str, tokens: Tensor, _source: Tensor) -> None:
        if visit.number == 1:
            entered = batch_first(visit.entered, anatomy.token_axis, visit.shape, anatomy.maps)
            assert entered is not None
            entrances[:], firsts[:] = [entered.clone()], [tokens.clone()]
        outputs[:] = [(tokens.clone(), visit.real)]
        said.append(machine.running.now.bidirectional)

    with Machine(model, anatomy, Listen({"output"}, keep)) as machine:
        call_alike(model, batch)
    if not outputs:
        raise ValueError(f"none of the blocks {[b.name for b in anatomy.blocks][:4]} ran; name them with blocks=")
    output, mask = outputs[0]
    real = torch.ones(output.shape[:2], dtype=torch.bool, device=output.device) if mask is None else mask
    return Seen(entrances[0], firsts[0], output, real, None if None in said else all(said))


def _change(before: Tensor, after: Tensor) -> Tensor:
    """‖y_i − x_i‖/‖x_i‖ of every token, (batch, n); nan if a number is not finite."""
    x, y = before.double(), after.double()
    return (y - x).norm(dim=-1) / x.norm(dim=-1).clamp(min=torch.finfo(before.dtype).tiny)


def _noise(model: nn.Module, anatomy: Anatomy, batch: Batch, before: Seen) -> list[Tensor]:
    """The changes (batch, n) without a reason, in turn behind the first and the last block: in a second pass, and in a
    pass with the sequences in reverse order."""
    again = seen(model, anatomy, batch)
    found = [(again.first, again.output)]
    reversed_batch = _reversed(batch, before.output.shape[0], anatomy.token_axis)
    if reversed_batch is not None:
        turned = seen(model, anatomy, reversed_batch)
        if turned.output.shape == before.output.shape and turned.first.shape == before.first.shape:
            found.append((turned.first.flip(0), turned.output.flip(0)))
    return [_change(*pair) for first, last in found for pair in ((before.first, first), (before.output, last))]


def _largest(noise: list[Tensor], where: Tensor) -> tuple[float, float]:
    """Behind the first and the last block; infinite where a change is not a number."""
    largest = [float(changes[where].amax()) for changes in noise]
    return tuple(  # type: ignore[return-value]
        max(each) if all(value == value for value in each) else float("inf") for each in (largest[::2], largest[1::2])
    )


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
