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

from depthscope.anatomy import Anatomy
from depthscope.passes.caches import cache_in, past_length
from depthscope.passes.masks import MaskFinder
from depthscope.passes.tokens import as_given, batch_first, first_tokens

REMEMBERED = 256  # passes whose masks are kept for activation checkpointing


class Pass:
    """The pass that is running. It holds names and numbers only, and no tensor of it is copied or pickled."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.masks = MaskFinder(model, anatomy)
        self.token_axis = anatomy.token_axis
        self.causal_by_call = anatomy.causal_by_call
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        self.calls = 0  # of the model, counted up to 2
        self.block = ""  # the name of the block that began last, in this pass
        self.real: Tensor | None = None  # (batch, n) true for real tokens; None: all are
        self.position: Tensor | None = None  # (batch, n) number among the real tokens of the sequence, from 0
        self.shape: torch.Size | None = None  # of the block's input
        self.bidirectional: bool | None = None  # what this call says; None: the call says nothing
        self.cache: Any = None  # keys and values of earlier tokens
        self.past = 0  # how many tokens are in the cache
        self.masks.begin()
        # Activation checkpointing runs a block again during the backward pass, when another pass may have been here:
        # the processed mask that the block is given, the same memory both times, leads to the mask of its pass.
        self._by_processed: OrderedDict[int, Tensor | None] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        kept = self.__dict__.copy()
        for name in ("calls", "block", "real", "position", "shape", "bidirectional", "cache", "past", "_by_processed"):
            kept.pop(name)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def begin(self) -> None:
        """The model is called: masks of an earlier pass count no longer, and no block has run yet."""
        self.masks.begin()
        self.block = ""

    def enter(self, block: str, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block begins. `index` is the place of the block's keys and values in a cache."""
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if recomputed:
            self.masks.begin()
        self.masks.see(module, args, kwargs)
        values = (*args, *kwargs.values())
        tokens = first_tokens(values)
        if tokens is None:
            raise ValueError(f"expected tokens to enter {block!r}, got none")
        self.cache = cache_in(args, kwargs)
        self.past = past_length(self.cache, index, self.past if self.block else None)
        self.block, self.shape = block, tokens.shape
        if self.causal_by_call:  # forward(src, src_mask, src_key_padding_mask, is_causal)
            src_mask = kwargs.get("src_mask", args[1] if len(args) > 1 else None)
            self.bidirectional = src_mask is None and not kwargs.get("is_causal", args[3] if len(args) > 3 else False)
        batch, n = self.batch_first(tokens).shape[:2]
        self.real = self.masks.real(batch, n, past=self.past)
        if not torch.compiler.is_compiling():
            self._recognise_pass(next((v for v in values if isinstance(v, Tensor) and v.ndim == 4), None), recomputed)
        self.position = None
        if self.real is not None:
            counted = self.real.long().cumsum(dim=-1)[:, -n:] - 1
            self.position = counted if self.real.shape[1] > n else counted + self.past
            self.real = self.real[:, -n:]
        elif self.past:
            self.position = torch.arange(self.past, self.past + n, device=tokens.device).expand(batch, n)

    def _recognise_pass(self, processed: Tensor | None, recomputed: bool) -> None:
        if processed is None:
            return
        key = processed.data_ptr()
        if not recomputed:
            self._by_processed[key] = self.real
            self._by_processed.move_to_end(key)
            if len(self._by_processed) > REMEMBERED:
                self._by_processed.popitem(last=False)
        elif self.real is None:  # else the block itself is given the mask
            if key not in self._by_processed:
                raise ValueError(
                    f"more than {REMEMBERED} checkpointed passes before a backward pass: their masks are forgotten"
                )
            self.real = self._by_processed[key]

    def warn_of_masks(self) -> None:
        """Once: arguments that look like masks and are not understood."""
        pairs = {"mask", "src_mask"} if self.causal_by_call else set()  # PyTorch's masks of pairs of tokens
        if not self._warned and (unused := self.masks.unused - pairs):
            self._warned = True
            named = ", ".join(sorted(unused))
            warnings.warn(
                f"{named}: not understood as a mask of real tokens, so padding counts in the mean; "
                "call the argument attention_mask, 1 for real tokens",
                stacklevel=2,
            )

    def batch_first(self, tokens: Tensor) -> Tensor:
        """(batch, n, d), whatever the model's layout."""
        found = batch_first(tokens, self.token_axis, self.shape)
        if found is None or found.is_nested:
            raise ValueError(
                f"expected tokens (batch, n, d) in {self.block!r}, got shape {tuple(tokens.shape)}; "
                "name the blocks that pass tokens with blocks='path.to.layers.*'"
            )
        return found

    def as_given(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Undoes `batch_first`."""
        return as_given(tokens, self.token_axis, like)
