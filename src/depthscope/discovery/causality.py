"""Whether a model lets a token see later ones, found by trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.hooks.machine import Listen, Machine, Visit
from depthscope.hooks.tokens import batch_first
from depthscope.inputs.batches import Batch, call_alike, other_numbers, with_one_input_changed

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


class Reached(NamedTuple):
    """Which tokens (batch, n) a change has reached: after the first block, and after the last."""

    first: Tensor
    last: Tensor


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
    return Trial(model, anatomy, batch).sight(exactly)


def with_sight(model: nn.Module, anatomy: Anatomy, batch: Batch, *, again: bool = False) -> Anatomy:
    """The anatomy with what a batch shows of its causality, if it is one trunk and nobody has said more.

    What is known to be causal is believed. `again` tries also what is known not to be (somebody may have changed the
    library's own functions), in two or three passes: it counts only if tokens are then seen to see earlier ones and
    not all later ones. PyTorch's layers are told by each call: they are tried `again` in the same way, and found causal
    only if the call did not say so.
    """
    if anatomy.causal_by == "user" or anatomy.causal or len(anatomy.parts) > 1:
        return anatomy
    by_call = any(block.causal_arguments for block in anatomy.blocks)
    trial = Trial(model, anatomy, batch)
    if not by_call and anatomy.causal is None:
        return _as_seen(anatomy, trial.sight())
    if not again or (by_call and not trial.before.bidirectional):
        return anatomy
    found = trial.sight(exactly=False)
    return anatomy if found in (None, "all", "nothing") else _as_seen(anatomy, found)


def _as_seen(anatomy: Anatomy, found: Sight | None) -> Anatomy:
    if found is None:
        return anatomy
    if found == "later":
        return replace(anatomy, causal_by="tried", right_to_left=True)
    return replace(anatomy.with_causality(found != "all"), causal_by="tried", sees_some_later=found == "partly later")


def hidden_tokens_reach_others(model: nn.Module, anatomy: Anatomy, batch: Batch) -> bool:
    """Whether a change of tokens that the mask hides changes real ones: then it may not be what it was taken for."""
    trial = Trial(model, anatomy, batch)
    found = trial.reached(~trial.before.real, trial.before.real)
    return found is not None and bool(found.last.any())


@dataclass
class Trial:
    """A model on a batch, in which some tokens are changed."""

    model: nn.Module
    anatomy: Anatomy
    batch: Batch

    _before: Seen | None = None

    @property
    def before(self) -> Seen:
        """As it is without a change."""
        # No `cached_property`: in Python 3.11 its lock is held while the model runs, and for ever in a process that is
        # forked meanwhile.
        if self._before is None:
            self._before = seen(self.model, self.anatomy, self.batch)
        return self._before

    def sight(self, exactly: bool = True) -> Sight | None:
        """What tokens see: see the function `sight`."""
        real = self.before.real
        position = torch.arange(real.shape[1], device=real.device)
        last = torch.where(real, position, -1).amax(dim=-1, keepdim=True)  # (batch, 1)
        first = torch.where(real, position, position.numel()).amin(dim=-1, keepdim=True)
        earlier, later = real & (position < last), real & (position > first)
        from_last = self.reached(position == last, earlier, exactly=exactly)
        if from_last is None:
            return None
        to_all = bool(from_last.last[earlier].all())
        if not exactly and to_all:
            return "all"
        from_first = self.reached(position == first, later, exactly=False)
        forwards = None if from_first is None else bool(from_first.last.any())
        if not bool(from_last.last.any()):
            return "nothing" if forwards is False else "earlier"
        if from_first is not None:
            several = earlier.any(dim=-1)  # sequences of more than one real token
            to_first = from_last.last.gather(1, first.clamp(max=position.numel() - 1))[several]
            to_last = from_first.last.gather(1, last.clamp(min=0))[several]
            if not forwards or (bool(to_first.all()) and not bool(to_last.any())):
                return "later"
            if not exactly and not bool(to_first.any()) and not bool(to_last.any()):
                return "all"  # a window, as wide in both directions
        at_once = from_last.first[earlier]
        return "all" if to_all and bool(at_once.all() or not at_once.any()) else "partly later"

    def reached(self, tokens: Tensor, others: Tensor, *, exactly: bool = True) -> Reached | None:
        """Which of the others (batch, n) a change of some tokens (batch, n) changes; doubt counts as no, but not
        without `exactly`, where every change counts.

        None if there is nothing to compare, or if no input changes what enters the blocks at these tokens alone.
        """
        before = self.before
        if not tokens.any() or not before.output[others].isfinite().any():
            return None
        for changed in _changes(self.batch, tokens, self.anatomy.token_axis):
            after = seen(self.model, self.anatomy, changed)
            if after.output.shape != before.output.shape or not _enters_there(before.entrance, after.entrance, tokens):
                continue  # what these blocks read is another input, or the whole of it in every token
            first, last = _change(before.first, after.first), _change(before.output, after.output)
            rounding, noise = 0.0, (0.0, 0.0)
            if exactly:
                rounding = ROUNDING * torch.finfo(before.output.dtype).eps
                if bool((others & (last > rounding)).any()):
                    noise = self._noise(others)
            return Reached(others & (first > CAUTION * noise[0]), others & (last > max(rounding, CAUTION * noise[1])))
        return None

    def _noise(self, where: Tensor) -> tuple[float, float]:
        """The largest changes without a reason, after the first and the last block: in a second pass, and in a pass
        with the sequences in reverse order."""
        before, again = self.before, seen(self.model, self.anatomy, self.batch)
        found = [(again.first, again.output)]
        reversed_batch = _reversed(self.batch, before.output.shape[0], self.anatomy.token_axis)
        if reversed_batch is not None:
            turned = seen(self.model, self.anatomy, reversed_batch)
            if turned.output.shape == before.output.shape and turned.first.shape == before.first.shape:
                found.append((turned.first.flip(0), turned.output.flip(0)))
        first = [float(_change(before.first, passed)[where].amax()) for passed, _ in found]
        last = [float(_change(before.output, passed)[where].amax()) for _, passed in found]
        return _largest(first), _largest(last)


def _enters_there(before: Tensor, after: Tensor, tokens: Tensor) -> bool:
    """Whether the change of an input at these tokens (batch, n) changed what enters the blocks there and only there."""
    if before.shape != after.shape or before.shape[:2] != tokens.shape:
        return False
    changed = (before != after).any(dim=-1)
    return bool(changed.any()) and not bool((changed & ~tokens).any())


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


def _largest(changes: list[float]) -> float:
    return max(changes) if all(value == value for value in changes) else float("inf")


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
            return torch.where(where, other_numbers(value), value)
        at = where if axis == 1 else where.T
        if value.is_floating_point() and value.ndim == 3 and value.shape[:2] == at.shape:
            return torch.where(at.unsqueeze(-1), other_numbers(value), value)
        return None

    return with_one_input_changed(batch, changed)
