"""Whether a block is shown its sequence from the first token on, or a cache says how many came before.

A causal mean is of the tokens so far. Where a model decodes with a cache that is not known here (states in its modules,
an argument of its own), a block is given the last token alone, and the mean would begin anew without a word. What a
call says of earlier tokens is gathered here, and doubt is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from depthscope.inputs.mask_names import looks_like_a_mask
from depthscope.safety import ByThread

WHOLE = "give whole sequences from their first token (use_cache=False), or take it out: depthscope.remove(model)"
OTHERS = "take it out (depthscope.remove(model)), or say causal=False to apply if every token sees all others"
_STATES = ("mems", "cache", "caches", "state", "past_key_values")  # arguments that hold a past


class ModelCall(ByThread):
    """The call of the model that runs in this thread: what it says of tokens before its own.

    A call is that of the model or of a whole model inside it (`generate` of a wrapper may call that one alone).
    """

    def __init__(self) -> None:
        self.inside = ""  # the block that runs
        self.lost_axis = False  # the block that runs was once given tokens with an axis more
        self.has_no_past = False  # the block that runs keeps nothing, or could have been given a cache and was not
        self._clear()

    def _clear(self) -> None:
        self.entered: dict[str, bool] = {}  # the blocks that have run in this call: whether that was their first ever
        self.again = False  # the block that runs has run before in this call
        self.lengths: tuple[int, ...] = ()  # how many tokens its ids may be; empty: it was given no ids
        self.positions: dict[str, Any] = {}
        self._later: dict[int, str] = {}  # by number of tokens: the positions that do not begin at 0; "": none
        self.state = ""  # an argument that holds a past, and is not known

    def begin(
        self,
        names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        token_axis: int,
        *,
        is_outermost: bool,
    ) -> None:
        """The model is called, or a whole model inside it, whose arguments have these names."""
        given = dict(zip((*names, *map(str, range(len(args)))), args, strict=False)) | kwargs
        for inputs in [value for value in given.values() if isinstance(value, Mapping)]:
            given |= inputs
        if is_outermost or self.entered:
            self._clear()
        if is_outermost:
            self.inside = ""
        if lengths := _lengths(given, token_axis):
            self.lengths = lengths
        if torch.compiler.is_compiling():
            return
        self.positions |= {name: value for name, value in given.items() if _is_position(name, value)}
        self.state = self.state or next((name for name, value in given.items() if _holds_a_past(name, value)), "")

    def enter(self, block: str, axes: int, ran: dict[str, int], *, has_no_past: bool) -> None:
        """A block begins, with tokens of so many axes; `ran` has those of each block in its first pass ever."""
        self.inside, self.has_no_past = block, has_no_past
        if not torch.compiler.is_compiling():
            self.again = block in self.entered
            self.entered.setdefault(block, block not in ran)
            self.lost_axis = axes < ran.setdefault(block, axes)

    def doubt(self, n: int, past: int, cache: Any, real: Tensor | None) -> str:
        """Why these n tokens may not be all of their sequences, or stand in another order; "": no doubt."""
        if self.again and cache is not None:
            return f"runs twice in one call of the model, and the cache does not tell its two pasts apart: {WHOLE}"
        if self.lost_axis:
            return f"is given tokens with an axis less than before, as if these were one of each sequence: {WHOLE}"
        if self.lengths and n not in self.lengths and not _is_filled_up(self.lengths, real):
            return f"is given {n} tokens, and the model {self.lengths[0]}: how they are ordered is not known: {OTHERS}"
        if past:
            return ""
        if self.state:
            return f"may have earlier tokens before it ({self.state}=), and how many is not known: {WHOLE}"
        if n not in self._later:  # numbers are fetched once in a call
            named = (name for name, value in self.positions.items() if _starts_later(value, n, real))
            self._later[n] = next(named, "")
        if self._later[n]:
            return f"is given {self._later[n]} that do not begin at 0, and no cache that is known: {WHOLE}"
        # One token is a whole sequence, or the next of one. It is clear in the first call ever, where a block that
        # takes a cache is given none or an empty one, and where its position is said.
        is_placed = any(_is_of(value, 1) for value in self.positions.values())
        if n > 1 or self.entered.get(self.inside, False) or is_placed or self.has_no_past or cache is not None:
            return ""
        return f"is given one token after earlier calls, and nothing says how many stand before it: {WHOLE}"


def _lengths(given: Mapping[str, Any], token_axis: int) -> tuple[int, ...]:
    """How many tokens the ids (batch, n) in a call are; or its tokens (batch, n, d), if there are ids too."""
    ids: list[int] = []
    tokens: list[int] = []
    for name, value in given.items():
        if isinstance(value, Tensor) and not looks_like_a_mask(name) and name != "labels":
            if value.is_floating_point() and value.ndim == 3:
                tokens.append(value.shape[token_axis])
            elif value.dtype in (torch.int64, torch.int32) and value.ndim in (2, 3):
                ids += value.shape[1:] if token_axis == 1 else value.shape
    return (*ids, *tokens) if ids else ()


def _is_filled_up(lengths: tuple[int, ...], real: Tensor | None) -> bool:
    """Whether the model has filled its sequences up on the right, and its own mask says so (Reformer)."""
    if real is None or torch.compiler.is_compiling():
        return False
    return any(length < real.shape[1] and not bool(real[:, length:].any()) for length in lengths)


def _is_position(name: str, value: Any) -> bool:
    """Whether an argument says at which places of their sequences the tokens stand: whole numbers, by its name."""
    if "pos" not in name and "offset" not in name:
        return False
    if isinstance(value, Tensor):
        return value.dtype in (torch.int64, torch.int32) and value.ndim < 4
    return type(value) is int and name.split("_")[-1] in ("pos", "position", "offset") and "max" not in name


def _is_of(value: Tensor | int, n: int) -> bool:
    """Whether it says where n tokens stand, or where the first of them does."""
    return not isinstance(value, Tensor) or value.ndim == 0 or value.shape[-1] == n


def _starts_later(value: Tensor | int, n: int, real: Tensor | None) -> bool:
    """Whether the first real token of a sequence is not at place 0."""
    if not _is_of(value, n):
        return False
    if not isinstance(value, Tensor) or value.ndim == 0:
        return int(value) > 0
    if real is not None:
        value = torch.where(real, value, torch.iinfo(value.dtype).max)
    first = value.amin(dim=-1)
    return bool(((first > 0) & (first < torch.iinfo(value.dtype).max)).any())


def _holds_a_past(name: str, value: Any) -> bool:
    if name not in _STATES or value is None or isinstance(value, bool) or hasattr(value, "get_seq_length"):
        return False
    return not isinstance(value, tuple | list | dict) or len(value) > 0
