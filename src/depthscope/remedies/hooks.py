"""How a remedy hangs in a model: hooks of importable classes, found again by their class.

A model with remedies can therefore be copied, pickled and compiled, its state_dict keeps its keys, and `remove`
needs no handles. What a hook must know of the running pass (which tokens are real, what a cache holds) is in a
`Pass` that the hooks of one `apply` share.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.anatomy.structure import Side
from depthscope.probing.masks import MaskFinder
from depthscope.probing.taps import batch_first, exchange, first_tokens
from depthscope.remedies.statistics import cache_in, past_length, settle

PASSES = 256  # whose masks are kept for activation checkpointing


class Hook:
    """Base of everything that a remedy hangs into a model. `remedy` is None for mere listeners."""

    remedy: Any = None
    station: str = ""
    block: str = ""
    key: int = -1  # in the module's dictionary of hooks

    def __call__(self, module: nn.Module, args: Any, last: Any) -> Any:
        raise NotImplementedError

    def taken_down(self, module: nn.Module) -> None:
        """Undoes what was done beside hanging it up."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Torch numbers hooks from 0 in every process: the next one must not take the place of one that was pickled.
        self.__dict__.update(state)
        RemovableHandle.next_id = max(RemovableHandle.next_id, self.key + 1)


class Pass:
    """What the hooks of one `apply` know of the pass that is running."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.masks = MaskFinder(model, anatomy)
        self.token_axis = anatomy.token_axis
        self.asks_per_call = anatomy.family == "torch"  # causality is an argument of the block's call
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        self.real: Tensor | None = None  # (batch, n) true for real tokens; None: all are
        self.position: Tensor | None = None  # (batch, n) number among the real tokens of the sequence, from 0
        self.shape: torch.Size | None = None  # of the block's input
        self.bidirectional: bool | None = None  # what this call says; None: it says nothing
        self.cache: Any = None  # keys and values of earlier tokens
        self.past = 0  # how many
        self.masks.begin()
        # Activation checkpointing runs a block again during the backward pass, when another pass may have been here:
        # the processed mask that the block is given, the same memory both times, leads to the mask of its pass.
        self._by_processed: OrderedDict[int, Tensor | None] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        kept = self.__dict__.copy()
        for name in ("real", "position", "shape", "bidirectional", "cache", "past", "_by_processed"):
            kept.pop(name)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def enter(self, block: BlockEntry, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block begins."""
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if recomputed:
            self.masks.begin()
        self.masks.see(module, args, kwargs)
        values = (*args, *kwargs.values())
        tokens = first_tokens(values)
        if tokens is None:
            raise ValueError(f"expected tokens to enter {block.block!r}, got none")
        self.shape = tokens.shape
        self.cache = cache_in(args, kwargs)
        self.past = past_length(self.cache, block.index)
        if self.asks_per_call:  # forward(src, src_mask, src_key_padding_mask, is_causal)
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
            if len(self._by_processed) > PASSES:
                self._by_processed.popitem(last=False)
        elif self.real is None:  # else the block itself is given the mask
            if key not in self._by_processed:
                raise ValueError(f"more than {PASSES} checkpointed passes before a backward pass: masks are forgotten")
            self.real = self._by_processed[key]

    def warn_of_masks(self) -> None:
        """Once: arguments that look like masks and are not understood."""
        pairs = {"mask", "src_mask"} if self.asks_per_call else set()  # PyTorch's masks of pairs of tokens
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
            raise ValueError(f"a remedy expects tokens (batch, n, d), got shape {tuple(tokens.shape)}")
        return found

    def as_given(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Undoes `batch_first`."""
        return (tokens if self.token_axis == 1 else tokens.transpose(0, 1)).reshape(like.shape)


@dataclass(frozen=True)
class Site:
    """One block that a remedy is put into."""

    model: nn.Module
    anatomy: Anatomy
    block: BlockAnatomy
    number: int  # counted from 1
    causal: bool | None  # None: not known
    running: Pass

    @property
    def is_first(self) -> bool:
        return self.block is self.anatomy.blocks[0]

    @property
    def is_last(self) -> bool:
        return self.block is self.anatomy.blocks[-1]


class Listener(Hook):
    """Remembers the masks that a module around the blocks is called with."""

    def __init__(self, running: Pass):
        self.running = running

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.masks.see(module, args, kwargs)
        if not torch.compiler.is_compiling():
            self.running.warn_of_masks()


class PassEntry(Hook):
    """The model is called: masks of an earlier pass count no longer, and those that none can follow are refused."""

    def __init__(self, running: Pass):
        self.running = running

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.masks.begin()
        own = kwargs.get("attention_mask")
        if isinstance(own, Tensor) and own.ndim > 2:
            raise ValueError(
                f"attention_mask is {tuple(own.shape)}: from a mask of pairs of tokens (packed sequences, "
                "generate with a static cache) a remedy cannot tell which tokens belong together; pass (batch, n)"
            )
        if kwargs.get("perm_mask") is not None:
            raise ValueError("perm_mask hides tokens from each other, and the mean of a remedy would show them")


class BlockEntry(Hook):
    """A block is called."""

    def __init__(self, running: Pass, block: str, index: int):
        self.running = running
        self.block = block
        self.index = index  # of its keys and values in a cache

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.enter(self, module, args, kwargs)


class LastBlockExit(Hook):
    """The last block has run: what a causal mean has seen takes its place in the cache, and the cache is let go."""

    def __init__(self, running: Pass):
        self.running = running

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        if self.running.cache is not None:
            settle(self.running.cache)
            self.running.cache = None


class TokenHook(Hook):
    """Changes the tokens that go into a module or come out of it."""

    side: Side

    def change(self, tokens: Tensor) -> Tensor:
        """The new tokens, in the layout of the model."""
        raise NotImplementedError

    def __call__(self, module: nn.Module, args: Any, last: Any) -> Any:
        if self.side == "in":
            return edit_tokens((args, last), self.change)
        return edit_tokens(last, self.change)


def edit_tokens(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module takes or returns, with its token matrix changed."""
    if isinstance(value, Tensor):
        return change(value)
    tokens = first_tokens(value)
    if tokens is None:
        raise ValueError(f"a remedy expects tokens here, got {type(value).__name__}")
    return exchange(value, tokens, change(tokens))


def hang(module: nn.Module, hook: Hook, side: Side) -> None:
    """Hangs a hook up where values go into a module or come out of it."""
    if side == "in":
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        handle = module.register_forward_hook(hook)
    hook.key = handle.id


def hang_listeners(model: nn.Module, anatomy: Anatomy) -> Pass:
    """What the hooks of one `apply` share, kept up to date by listeners on the model and its blocks."""
    running = Pass(model, anatomy)
    blocks = {id(block.module) for block in anatomy.blocks}
    hang(model, PassEntry(running), "in")
    for module in running.masks.around:
        if id(module) not in blocks:
            hang(module, Listener(running), "in")
    for block, index in zip(anatomy.blocks, cache_indices(anatomy.blocks), strict=True):
        hang(block.module, BlockEntry(running, block.name, index), "in")
    return running


def cache_indices(blocks: tuple[BlockAnatomy, ...]) -> Iterator[int]:
    """The place of each block in a cache: counted within its part, encoder or decoder."""
    seen: dict[str, int] = {}
    for block in blocks:
        yield seen.setdefault(block.part, 0)
        seen[block.part] += 1


def hooks_in(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """All hooks of remedies, with the modules that they hang on."""
    for module in model.modules():
        for store in (module._forward_pre_hooks, module._forward_hooks):
            for hook in store.values():
                if isinstance(hook, Hook):
                    yield module, hook


def take_down(model: nn.Module, keep: frozenset[int] = frozenset()) -> None:
    """Removes the hooks of remedies, but not those whose `id` is to be kept."""
    for module, hook in list(hooks_in(model)):
        if id(hook) not in keep:
            stores: list[Any] = [
                module._forward_pre_hooks,
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks,
                module._forward_hooks_with_kwargs,
                module._forward_hooks_always_called,
            ]
            for store in stores:
                store.pop(hook.key, None)
            hook.taken_down(module)
