"""Whether a model lets a token see later ones, found by trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from depthscope.anatomy import Anatomy
from depthscope.hooks.machine import Change, Listen, Machine, Visit
from depthscope.hooks.tokens import as_given, batch_first
from depthscope.inputs.batches import Batch, call_alike, other_numbers, with_one_input_changed
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
    streams: int = 1  # of the trunk; those of a token stand in its row, side by side


class Changed(NamedTuple):
    """By how much other numbers in one input have changed each token, (batch, n)."""

    first: Tensor  # after the first block
    last: Tensor  # after the last


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

    Three passes of a causal model, four or five of others; without `exactly` two where the last token reaches all.
    Inputs that have a token axis are changed: ids (batch, n), or floating-point tokens. Where no such input changes
    these tokens alone (images, sound), what enters the blocks is changed itself. None if nothing stands before.
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
    is_open = not by_call and anatomy.causal is None
    if not is_open and not again:
        return anatomy
    trial = Trial(model, anatomy, batch)
    if by_call and not trial.before.bidirectional:
        return anatomy
    found = trial.sight(exactly=is_open)
    if found is None or (not is_open and found in ("all", "nothing")):
        return anatomy
    if found == "later":
        return replace(anatomy, causal_by="tried", right_to_left=True)
    return replace(anatomy.with_causality(found != "all"), causal_by="tried", sees_some_later=found == "partly later")


def hidden_tokens_reach_others(model: nn.Module, anatomy: Anatomy, batch: Batch) -> bool:
    """Whether a change of tokens that the mask hides changes real ones: then it may not be what it was taken for."""
    trial = Trial(model, anatomy, batch)
    return trial.reaches(~trial.before.real, trial.before.real) is True


class Trial:
    """A model on a batch, in which some tokens are changed."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, batch: Batch):
        self.model, self.anatomy, self.batch = model, anatomy, batch
        self.before = seen(model, anatomy, batch)
        self.rounding = ROUNDING * torch.finfo(self.before.output.dtype).eps

    def sight(self, exactly: bool = True) -> Sight | None:
        """What tokens see: see the function `sight`."""
        real = self.before.real
        position = torch.arange(real.shape[1], device=real.device)
        last_ones, first_ones = (position == end for end in _ends(real))
        # Two transfers: what the last tokens have changed, then what the first ones have, and what changes by itself.
        found, answers = self.change(last_ones, [real])
        if found is None:
            return None
        real, position = answers[0] != 0, torch.arange(real.shape[1])
        last, first = _ends(real)
        earlier, later = real & (position < last), real & (position > first)
        if not earlier.any():
            return None
        rounding = self.rounding if exactly else 0.0
        from_last = earlier & (found.last > rounding)
        if not exactly and bool(from_last[earlier].all()):
            return "all"
        doubtful = exactly and bool(from_last.any())
        back, answers = self.change(first_ones, self.noise() if doubtful else [])
        noise = _largest(answers, earlier) if doubtful else (0.0, 0.0)
        from_last = earlier & (found.last > max(rounding, CAUTION * noise[1]))
        from_first = None if back is None else later & (back.last > 0)
        if not bool(from_last.any()):
            return "nothing" if from_first is not None and not bool(from_first.any()) else "earlier"
        if from_first is not None:
            several = earlier.any(dim=-1)  # sequences of more than one real token
            to_first = from_last.gather(1, first.clamp(max=position.numel() - 1))[several]
            to_last = from_first.gather(1, last.clamp(min=0))[several]
            if not bool(from_first.any()) or (bool(to_first.all()) and not bool(to_last.any())):
                return "later"
            if not exactly and not bool(to_first.any()) and not bool(to_last.any()):
                return "all"  # a window, as wide in both directions
        at_once = (found.first > CAUTION * noise[0])[earlier]
        to_all = bool(from_last[earlier].all())
        return "all" if to_all and bool(at_once.all() or not at_once.any()) else "partly later"

    def reaches(self, tokens: Tensor, others: Tensor) -> bool | None:
        """Whether a change of some tokens (batch, n) changes any of the others after the last block; doubt counts as
        no.

        None if there is nothing to compare, or nothing can be changed at these tokens alone.
        """
        found, answers = self.change(tokens, [others])
        if found is None or not answers[0].any():
            return None
        among = answers[0] != 0
        if not (among & (found.last > self.rounding)).any():
            return False
        noise = _largest(fetched(self.noise()), among)[1]
        return bool((among & (found.last > max(self.rounding, CAUTION * noise))).any())

    def change(self, tokens: Tensor, also: list[Tensor]) -> tuple[Changed | None, list[Tensor]]:
        """What other numbers at some tokens (batch, n) change in the input that these blocks read, and the numbers that
        are also asked for, on the host: the other inputs enter the blocks nowhere, or at every token."""
        before = self.before
        for changed in self._changed_batches(tokens):
            after = seen(self.model, self.anatomy, *changed)
            if after.output.shape != before.output.shape or after.entrance.shape != before.entrance.shape:
                continue
            is_input = len(changed) == 1
            if is_input and before.entrance.shape[:2] != tokens.shape:
                continue
            # What enters the blocks is changed at these tokens alone; or, where it is changed itself, what leaves the
            # first block is: not where the blocks read something else.
            pair = (before.entrance, after.entrance) if is_input else (before.first, after.first)
            moved = (pair[0] != pair[1]).any(dim=-1)
            here = tokens.to(moved.device)
            entered = moved.any() & ~(moved & ~here).any() if is_input else (moved & here).any()
            changes = _change(before.first, after.first), _change(before.output, after.output)
            found, first, last, *answers = fetched([entered, *changes, *also])
            if found:
                return Changed(first, last), answers
        return None, fetched(also) if also else []

    def _changed_batches(self, tokens: Tensor) -> Iterator[tuple[Batch] | tuple[Batch, Tensor]]:
        """The batch with other tokens in one of its inputs, for every input that has tokens there; last the same batch
        with the tokens that are changed on their way into the blocks."""
        at = tokens if self.anatomy.token_axis == 1 else tokens.T

        def changed(value: Any) -> Tensor | None:
            if not isinstance(value, Tensor):
                return None
            if not value.is_floating_point() and value.shape == tokens.shape:
                return torch.where(tokens, other_numbers(value), value)
            if value.is_floating_point() and value.ndim == 3 and value.shape[:2] == at.shape:
                return torch.where(at.unsqueeze(-1), other_numbers(value), value)
            return None

        yield from ((batch,) for batch in with_one_input_changed(self.batch, changed))
        before = self.before
        alike = {x.shape[:2] for x in (before.entrance, before.first, tokens)}  # stages may merge their tokens
        # What enters a block is the trunk itself: not where whoever calls it adds what it returns.
        spots = [block.spots for block in self.anatomy.blocks]
        if len(alike) == 1 and all("input" in at and at["output"].added_to is None for at in spots):
            yield self.batch, tokens

    def noise(self) -> list[Tensor]:
        """The changes (batch, n) without a reason, in turn after the first and the last block: in a second pass, and in
        a pass with the sequences in reverse order."""
        before, again = self.before, seen(self.model, self.anatomy, self.batch)
        found = [_change(before.first, again.first), _change(before.output, again.output)]
        size, axis = before.output.shape[0], self.anatomy.token_axis

        def turned(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim == 0:
                return value
            first = 0 if axis == 1 or value.ndim < 3 else 1
            return value.flip(first) if value.shape[first] == size else value

        if size > 1:
            args, kwargs = self.batch
            reverse = Batch(tuple(map(turned, args)), {name: turned(value) for name, value in kwargs.items()})
            after = seen(self.model, self.anatomy, reverse)
            if after.output.shape == before.output.shape and after.first.shape == before.first.shape:
                found += [_change(before.first, after.first.flip(0)), _change(before.output, after.output.flip(0))]
        return found


def _ends(real: Tensor) -> tuple[Tensor, Tensor]:
    """Where the last and the first real token of each sequence stand, (batch, 1) each; −1 and n where there is none."""
    position = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, position, -1).amax(dim=-1, keepdim=True)
    return last, torch.where(real, position, position.numel()).amin(dim=-1, keepdim=True)


def seen(model: nn.Module, anatomy: Anatomy, batch: Batch, changed: Tensor | None = None) -> Seen:
    """One pass of the model; tokens that are `changed` (batch, n) are others from the entrance of the blocks on."""
    entered: list[Tensor] = []  # what enters the first block, and what leaves it
    left: list[tuple[Tensor, Tensor | None]] = []
    said: list[bool | None] = []

    def keep(visit: Visit, _station: str, tokens: Tensor, source: Tensor) -> None:
        real, given = visit.real, visit.with_streams(visit.entered)
        if anatomy.streams and (source := visit.with_streams(source)).ndim == 4:  # a change may reach any stream
            tokens, given, real = source.flatten(2), given.flatten(2), visit.real_of_sequences
        if visit.number == 1:
            first = given if anatomy.streams else batch_first(given, anatomy.token_axis, visit.shape, anatomy.maps)
            assert first is not None
            entered[:] = [first.clone(), tokens.clone()]
        left[:] = [(tokens.clone(), real)]
        said.append(machine.running.now.bidirectional)

    def change(visit: Visit, given: Tensor) -> Tensor | None:
        if visit.number > 1 or changed is None:
            return None
        here = changed.to(given.device)
        if anatomy.streams:
            here = here[..., None, None] if given.ndim == 4 else here.repeat_interleave(visit.streams, 0)[..., None]
            return torch.where(here, other_numbers(given), given)
        tokens = batch_first(given, anatomy.token_axis, visit.shape, anatomy.maps)
        if tokens is None or tokens.shape[:2] != changed.shape:
            return None
        other = torch.where(here.unsqueeze(-1), other_numbers(tokens), tokens)
        return as_given(other, anatomy.token_axis, given)

    acts: list[Listen | Change] = [Listen({"output"}, keep)]
    if changed is not None:
        acts.append(Change("input", change))
    with Machine(model, anatomy, *acts) as machine:
        call_alike(model, batch)
    if not left:
        raise ValueError(f"none of the blocks {[b.name for b in anatomy.blocks][:4]} ran; name them with blocks=")
    output, mask = left[0]
    real = torch.ones(output.shape[:2], dtype=torch.bool, device=output.device) if mask is None else mask
    streams = machine.running.now.streams
    entrance, first = entered
    return Seen(entrance, first, output, real, None if None in said else all(said), streams)


def _change(before: Tensor, after: Tensor) -> Tensor:
    """‖y_i − x_i‖/‖x_i‖ of every token, (batch, n); nan if a number is not finite."""
    x, y = before.double(), after.double()
    return (y - x).norm(dim=-1) / x.norm(dim=-1).clamp(min=torch.finfo(before.dtype).tiny)


def _largest(noise: list[Tensor], where: Tensor) -> tuple[float, float]:
    """The largest changes of these tokens after the first and the last block; infinite where one is not a number."""
    first, last = (torch.stack(changes)[:, where].amax() for changes in (noise[::2], noise[1::2]))
    return tuple(torch.inf if found.isnan() else found.item() for found in (first, last))  # type: ignore[return-value]


# --- several sequences in one row ---------------------------------------------------------------------
# Hugging Face's causal models keep such sequences from seeing each other if they are given no mask and no cache.

_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # where sequences end, said once more


def pieces_of(kwargs: dict[str, Any]) -> Tensor | None:
    """(batch, n) the number of each token's sequence in its row, from 0; None if no row has more than one.

    A new sequence begins where the position is not one more than the position before.
    """
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[1] < 2:
        return None
    if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
        return None
    pieces = nn.functional.pad((positions.diff(dim=-1) != 1).long().cumsum(dim=-1), (1, 0))
    return pieces if bool(pieces.any()) else None


def are_apart(model: nn.Module, anatomy: Anatomy, batch: Batch, pieces: Tensor) -> bool:
    """Whether the model keeps the pieces of a row from each other: a change of the first does not reach the others."""
    trial = Trial(model, anatomy, batch)
    first = (pieces == 0).expand(trial.before.real.shape)
    return trial.reaches(first, ~first) is False


def unpacked(batch: Batch, pieces: Tensor) -> Batch:
    """The same sequences, one to a row, filled up on the right, with the mask that says so."""
    batch = Batch(batch.args, {name: value for name, value in batch.kwargs.items() if name not in _ENDS})
    size = max(value.shape[0] for value in batch.kwargs.values() if isinstance(value, Tensor) and value.ndim > 1)
    pieces = pieces.expand(size, -1)
    where = [(row, pieces[row] == piece) for row in range(size) for piece in range(int(pieces[row].max()) + 1)]

    def rows(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if value.ndim < 2 or value.shape[1] != pieces.shape[1] or value.shape[0] not in (1, size):
            raise ValueError(
                f"position_ids begin again in a row: several sequences in one, and {name} {tuple(value.shape)} cannot "
                "be told apart with them; pass one sequence to a row, with an attention_mask"
            )
        whole = value.expand(size, *value.shape[1:])
        nothing = -100 if name == "labels" else 0
        return pad_sequence([whole[row, chosen] for row, chosen in where], batch_first=True, padding_value=nothing)

    kwargs = {name: rows(name, value) for name, value in batch.kwargs.items()}
    mask = pad_sequence([chosen[chosen].long() for _, chosen in where], batch_first=True)
    return Batch(batch.args, kwargs | {"attention_mask": mask})
