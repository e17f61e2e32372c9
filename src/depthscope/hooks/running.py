"""What is known while a model runs: which block is running, which tokens are real, what a cache holds.

A `Pass` is kept up to date by whoever stands at the model's and the blocks' entrances: the hooks of a remedy, which
stay in the model (`hooks.py`), or a machine that is open for a while (`machine.py`).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, Path
from depthscope.hooks.caches import cache_in, past_length
from depthscope.hooks.past import ModelCall
from depthscope.hooks.tokens import as_given, batch_first, refuse_spread, tokens_at
from depthscope.hooks.unseen import UnseenBlocks
from depthscope.inputs.batches import described
from depthscope.inputs.masks import MaskFinder
from depthscope.safety import ByThread

REMEMBERED = 256  # passes whose masks are kept for activation checkpointing


class Now(ByThread):
    """The pass that runs in this thread."""

    def __init__(self) -> None:
        self.calls = 0  # of the model, counted up to 2
        self.block = ""  # the name of the block that began last, in this pass
        self.streams = 1  # of the trunk; each is a sequence of its own, those of one sequence side by side
        self.real: Tensor | None = None  # (batch, n) true for real tokens; None: all are
        self.covered: Tensor | None = None  # `real` with the tokens in the cache before it, where the mask has them
        self.size = (0, 0)  # sequences and tokens of the block's input
        self.entered_at: torch.device | None = None  # where it is
        self.shape: torch.Size | None = None  # of the block's input
        self.bidirectional: bool | None = None  # what this call says; None: the call says nothing
        self.cache: Any = None  # keys and values of earlier tokens
        self.past = 0  # how many tokens are in the cache

    @property
    def position(self) -> Tensor | None:
        """(batch, n), the number of each token among the real ones of its sequence, from 0; None: its place."""
        if self.real is not None and self.covered is not None:
            n = self.real.shape[1]
            counted = self.covered.long().cumsum(dim=-1)[:, -n:] - 1
            return counted if self.covered.shape[1] > n else counted + self.past
        if self.past:
            return torch.arange(self.past, self.past + self.size[1], device=self.entered_at).expand(self.size)
        return None


class Pass:
    """The pass that is running: what is known of the model, and `now`, which every thread has for itself.

    It holds names and numbers only, and no tensor of it is copied or pickled.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, masks: MaskFinder | None = None):
        self.masks = MaskFinder(model, anatomy) if masks is None else masks.anew()
        self.now, self.call, self.unseen = Now(), ModelCall(), UnseenBlocks()
        self.ran: dict[str, int] = {}  # the blocks that ever ran in a model with remedies → axes of their first tokens
        self.maps, self.guessed, self._has_streams = anatomy.maps, anatomy.guessed, anatomy.streams
        self._folded = anatomy.folded
        self.default_token_axis = anatomy.token_axis
        self._axes = {block.name: anatomy.axis_of(block) for block in anatomy.blocks}
        self._causal_arguments = {block.name: dict(block.causal_arguments) for block in anatomy.blocks}
        self._warned = False
        # Activation checkpointing runs a block again during the backward pass, when another pass may have been here,
        # and maybe in a thread of autograd's own: the processed mask that the block is given, the same memory both
        # times, leads to the mask of its pass. All threads share it, as memory is shared.
        self._by_processed: OrderedDict[int, Tensor | None] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_by_processed": OrderedDict()}

    @property
    def token_axis(self) -> int:
        """Of the block that runs."""
        return self._axes.get(self.now.block, self.default_token_axis)

    def begin(self) -> None:
        """The model is called: masks of an earlier pass count no longer, and no block has run yet."""
        self.masks.begin()
        self.now.block = ""
        self.unseen.begin()

    def refuse_unknown_past(self, name: str) -> None:
        """For a mean of the tokens so far: the block that runs must be shown all of them, or a cache that is known."""
        now = self.now
        if _recomputes():
            return  # and the first time has been judged
        if why := self.call.doubt(now.size[1], now.past, now.cache, now.real):
            raise ValueError(f"{name}: {now.block!r} {why}")

    def enter(
        self,
        block: str,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        path: Path | None = None,
    ) -> Tensor:
        """A block begins, with the tokens that are returned. `index` is the place of its keys and values in a cache,
        `path` leads to its tokens."""
        now, masks, recomputed = self.now, self.masks, _recomputes()
        if recomputed:
            masks.begin()
        masks.see(module, args, kwargs)
        tokens = tokens_at((args, kwargs), path)
        if tokens is None:
            where = "" if path is None else f" as its argument {'.'.join(map(str, path[1:]))}"
            raise ValueError(
                f"expected tokens (floating-point numbers) to enter {block!r}{where}, "
                f"got {described((*args, *kwargs.values()))}"
            )
        if tokens.is_nested or tokens.layout is not torch.strided:
            given = described((*args, *kwargs.values()))
            raise ValueError(f"expected a plain tensor of tokens to enter {block!r}, got {given}")
        refuse_spread(block, tokens)
        compiling = torch.compiler.is_compiling()
        if self.guessed and not compiling and not recomputed:
            self.unseen.enter(block, tokens, self._axes[block], is_first_pass=now.calls <= 1)
        now.cache = cache_in(args, kwargs)
        now.past = past_length(now.cache, index, now.past if now.block else None)
        now.block, now.shape = block, tokens.shape
        now.bidirectional = None
        if names := self._causal_arguments[block]:  # which say whether the block may be causal
            said = [kwargs.get(name, args[place] if place < len(args) else None) for name, place in names.items()]
            now.bidirectional = all(value is None or value is False for value in said)
        # Tokens with an axis more are streams, and no map, where they stand where the ids of this call do.
        is_streamed = tokens.ndim == 4 and (self._has_streams or self.unseen.ids == tuple(tokens.shape[:2]))
        now.streams = tokens.shape[2] if is_streamed else self._folded
        batch, n, _ = self.batch_first(tokens).shape
        real = masks.real(block, batch // now.streams, n, past=now.past)
        if real is not None and now.streams > 1:
            real = real.repeat_interleave(now.streams, dim=0)
        now.real = real
        if not compiling:
            self._recognise_pass(args, kwargs, tokens, recomputed)
        now.size, now.entered_at, now.covered = (batch, n), tokens.device, now.real
        if now.real is not None and now.real.shape[1] > n:
            now.real = now.real[:, -n:]
        return tokens

    def leave(self, block: str, entrance: Path | None, leaves: Path | None, given: Any, returned: Any) -> None:
        """A block of no known family has run: refuses one that returns another shape than it was given."""
        if _recomputes():
            return  # blocks run from the last to the first
        before, after = tokens_at(given, entrance), tokens_at(returned, leaves)
        if before is None or after is None or before.shape != after.shape:
            shapes = [None if tokens is None else tuple(tokens.shape) for tokens in (before, after)]
            if self.call.state:
                raise ValueError(
                    f"{block!r} is given {shapes[0] or 'no tokens'} after earlier ones ({self.call.state}=) and "
                    f"returns {shapes[1] or 'none'}: call the model, or generate, with use_cache=False"
                )
            raise ValueError(
                f"{block!r} is given {shapes[0] or 'no tokens'} and returns {shapes[1] or 'none'}: a block returns "
                "tokens of the shape that it was given; name the blocks with blocks='path.to.layers.*'"
            )
        if entrance is None:
            self.unseen.refuse_several(block, before, given, returned)
        if self.guessed and not torch.compiler.is_compiling():
            self.unseen.refuse_side_by_side(block, before, after)

    def _recognise_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor, recomputed: bool) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 4 and value is not tokens:
                break
        else:
            return
        key = value.data_ptr()
        if not recomputed:
            self._by_processed.pop(key, None)  # the newest stands last
            self._by_processed[key] = self.now.real
            if len(self._by_processed) > REMEMBERED:
                self._by_processed.popitem(last=False)
        elif self.now.real is None:  # else the block itself is given the mask
            if key not in self._by_processed:
                raise ValueError(
                    f"more than {REMEMBERED} checkpointed passes before a backward pass: their masks are forgotten"
                )
            self.now.real = self._by_processed[key]

    def warn_of_masks(self) -> None:
        """Once: arguments that look like masks and are not understood."""
        by_call = any(self._causal_arguments.values())
        pairs = {"mask", "src_mask", "tgt_mask", "memory_mask"} if by_call else set()  # PyTorch's, of pairs of tokens
        if not self._warned and (unused := self.masks.unused - pairs):
            self._warned = True
            named = ", ".join(sorted(unused))
            warnings.warn(
                f"{named}: not understood as a mask of real tokens, so padding counts in the mean; "
                "call the argument attention_mask, 1 for real tokens, or say mask= with its name",
                stacklevel=2,
            )

    def batch_first(self, tokens: Tensor) -> Tensor:
        """(batch, n, d), whatever the model's layout."""
        found = batch_first(tokens, self.token_axis, self.now.shape, self.maps, self.now.streams > 1)
        if found is None or found.is_nested:
            raise ValueError(
                f"expected tokens (batch, n, d) in {self.now.block!r}, got shape {tuple(tokens.shape)}; "
                "name the blocks that pass tokens with blocks='path.to.layers.*'"
            )
        return found

    def as_given(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Undoes `batch_first`."""
        return as_given(tokens, self.token_axis, like, self.now.streams > 1)


def _recomputes() -> bool:
    """Whether activation checkpointing runs a block again, during the backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
