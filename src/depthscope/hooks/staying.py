"""Hooks that stay in a model: of importable classes, found again by their class.

A model that has them can be copied, pickled and compiled, its state_dict keeps its keys, and taking them down needs no
handles. What a hook must know of the running pass is in the `Pass` that the hooks of one `install` share.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from depthscope import walking
from depthscope.anatomy import FAMILIES, Anatomy, BlockAnatomy, Path, Side
from depthscope.hooks.caches import NAMES, settle
from depthscope.hooks.past import WHOLE
from depthscope.hooks.running import Pass
from depthscope.hooks.tokens import edit_tokens, first_tokens, tokens_at
from depthscope.safety import ByThread, unhook
from depthscope.stations import trunk_is_a_sum


class Hook:
    """Base of everything that stays in a model. `remedy` is None for mere listeners."""

    remedy: Any = None
    station: str = ""
    block: str = ""
    part: str = ""  # of the model that the block is in
    key: int = -1  # in the module's dictionary of hooks
    hears_last: bool = False  # it hears what all changes at its place have made, also those put in after it

    def __call__(self, module: nn.Module, args: Any, last: Any) -> Any:
        raise NotImplementedError

    def values_in_force(self) -> dict[str, float | list[float]]:
        """The numbers that the remedy works with now, by the name of its option: those that are learned move."""
        return {}

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the hook has added to the model's parameters, by full name."""
        return {}

    def taken_down(self, module: nn.Module) -> None:
        """Undoes what was done beside hanging it up."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Torch numbers hooks from 0 in every process: the next one must not take the place of one that was pickled.
        self.__dict__.update(state)
        RemovableHandle.next_id = max(RemovableHandle.next_id, self.key + 1)


class Carried(ByThread):
    """What was added to the copy that runs in this thread, until it has reached the end of the block."""

    difference: Tensor | None = None


class TokenHook(Hook):
    """A site of the kind *change*: exchanges the tokens that go into a module or come out of it.

    Where what is changed is a copy of the trunk (in pre-norm, what a norm reads), `is_copy` is true, and the hooks that
    `change_trunk` hangs after it add the same difference to the trunk.
    """

    side: Side
    path: Path | None = None  # to the tokens, as in a `Spot`
    added_to: Path | None = None
    is_copy: bool = False
    carried: Carried  # of a copy

    def change(self, tokens: Tensor) -> Tensor:
        """The new tokens, in the layout of the model."""
        raise NotImplementedError

    def changed_and_difference(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The new tokens, and what was added to the old ones; a hook that knows it exactly says it itself."""
        new = self.change(tokens)
        return new, new - tokens

    def __call__(self, module: nn.Module, args: Any, last: Any) -> Any:
        if self.added_to is not None:
            return edit_tokens(last, partial(self._edit_sum, tokens_at((args, {}), self.added_to)), self.path)
        given = (args, last) if self.side == "in" else last
        return edit_tokens(given, self._edit, self.path, everywhere=self.side == "out")

    def _edit_sum(self, given: Tensor | None, returned: Tensor) -> Tensor:
        """What is to be returned, so that its sum with what was given is the changed trunk."""
        if given is None:
            raise ValueError(f"expected the tokens of {self.block!r} as an argument without a name")
        return self.change(given + returned) - given

    def _edit(self, tokens: Tensor) -> Tensor:
        if not self.is_copy:
            return self.change(tokens)
        new, self.carried.difference = self.changed_and_difference(tokens)
        return new


class CarriedChange(TokenHook):
    """Adds to the trunk, or to another copy of it, what was added to the copy that a norm reads."""

    def __init__(self, first: TokenHook, side: Side):
        self.first = first
        self.side = side

    def change(self, tokens: Tensor) -> Tensor:
        difference = self.first.carried.difference
        assert difference is not None
        if self.side == "out":  # the end of the block
            self.first.carried.difference = None
        return tokens + difference.reshape(tokens.shape)


class PassEntry(Hook):
    """The model is called. At the second call it is known whether the first one has run a block.

    A hook at the end of the model would know it at once, and cannot be compiled into the model's graph.
    """

    def __init__(self, running: Pass, model: nn.Module, first_block: str):
        self.running, self.first_block = running, first_block
        self.names = tuple(inspect.signature(model.forward).parameters)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running = self.running
        if not torch.compiler.is_compiling():
            now = running.now
            if now.calls == 1 and not now.block:
                raise ValueError(
                    f"{self.first_block!r} and the other blocks were not called in the pass before this one, so that "
                    "what was put into them does nothing: depthscope.remove(model), and name what is called by blocks="
                )
            now.calls = min(now.calls + 1, 2)
            running.unseen.see_ids(args, kwargs)
        running.begin()
        running.call.begin(self.names, args, kwargs, running.default_token_axis, is_outermost=True)


class MaskListener(Hook):
    """A module around the blocks is called: the masks that it is given are remembered. A whole model inside another is
    a call of its own: `generate` of a wrapper may call it alone."""

    def __init__(self, running: Pass, module: nn.Module):
        self.running = running
        is_whole = hasattr(module, "save_pretrained")
        self.names = tuple(inspect.signature(module.forward).parameters) if is_whole else None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running = self.running
        running.masks.see(module, args, kwargs)
        if self.names is not None:
            running.call.begin(self.names, args, kwargs, running.default_token_axis, is_outermost=False)


class BlockEntry(Hook):
    """A block is called."""

    def __init__(self, running: Pass, anatomy: Anatomy, block: BlockAnatomy, index: int, path: Path | None):
        self.running = running
        self.block = block.name
        self.index = index  # of its keys and values in a cache
        self.path = path  # to its tokens
        family = block.family or anatomy.family
        self.keeps_nothing = family != "unknown" and FAMILIES[family].library in ("torch", "depthscope")
        self.takes_cache = not set(NAMES).isdisjoint(inspect.signature(block.module.forward).parameters)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running = self.running
        running.enter(self.block, self.index, module, args, kwargs, self.path)
        has_no_past = self.keeps_nothing or (self.takes_cache and running.now.cache is None)
        axes = 0 if running.now.shape is None else len(running.now.shape)
        running.call.enter(self.block, axes, running.ran, has_no_past=has_no_past)
        if not torch.compiler.is_compiling():
            running.warn_of_masks()


class PartOfBlock(Hook):
    """A part of a block is called: with one token a sequence, and no block running, somebody decodes past the blocks
    (`layer.step(x)`), where no remedy is heard and no mean goes on."""

    def __init__(self, running: Pass, block: str):
        self.running, self.block = running, block

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.running.call.inside or torch._C._current_graph_task_id() != -1:
            return
        tokens, axis = first_tokens((args, kwargs)), self.running.default_token_axis
        if tokens is not None and (tokens.ndim == 2 or tokens.shape[axis] == 1):
            raise ValueError(
                f"a part of {self.block!r} is given {tuple(tokens.shape)} while the block itself is not called, so "
                f"that its remedies do nothing: {WHOLE}"
            )


class BlockExit(Hook):
    """A block of no known family has run: it must have returned tokens of the shape that it was given."""

    def __init__(self, running: Pass, block: str, entrance: Path | None, leaves: Path | None):
        self.running, self.block, self.entrance, self.leaves = running, block, entrance, leaves

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, returned: Any = None) -> None:
        self.running.leave(self.block, self.entrance, self.leaves, (args, kwargs), returned)


class GuessedExit(Hook):
    """A block that was guessed has run, remedies included."""

    def __init__(self, running: Pass):
        self.running = running

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        if not torch.compiler.is_compiling():
            self.running.unseen.see_left(tokens_at(last, None))


class LastBlockExit(Hook):
    """The last block has run: what a causal mean has seen takes its place in the cache, and the cache is let go."""

    def __init__(self, running: Pass):
        self.running = running

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        now = self.running.now
        self.running.call.inside = ""
        if now.cache is not None:
            settle(now.cache)
            now.cache = None


def hang(module: nn.Module, hook: Hook, side: Side) -> None:
    """Hangs a hook up where values go into a module or come out of it."""
    if side == "in":
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        handle = module.register_forward_hook(hook)
    hook.key = handle.id
    hooks = module._forward_pre_hooks if side == "in" else module._forward_hooks
    for key, other in list(hooks.items()):
        if isinstance(other, Hook) and other.hears_last:
            hooks.move_to_end(key)  # type: ignore[attr-defined]  # torch's type says dict, and it is ordered


def reads_copy(block: BlockAnatomy, station: str) -> bool:
    """Whether the module where a trunk station is seen reads a copy of the trunk, as a norm does in pre-norm."""
    spot = block.spots.get(station)
    if spot is None or not trunk_is_a_sum(block.placement) or station not in block.trunk:
        return False
    return spot.side == "in" and spot.module is not block.module


def refuse_copy(block: BlockAnatomy, station: str) -> None:
    """Where the residual addition stands outside a module, what enters the module is a copy of the trunk."""
    if station != "output" and "output" in block.spots and block.spots["output"].added_to is not None:
        raise ValueError(
            f"{block.name!r} is given a copy of the trunk, and whoever calls it adds what it returns to the trunk: a "
            f"change at its {station} would not change the trunk; at='output' does"
        )


def change_trunk(block: BlockAnatomy, station: str, hook: TokenHook) -> None:
    """Hangs a hook at a station of a block so that the trunk is changed there, also where a module reads a copy."""
    refuse_copy(block, station)
    spot = block.spots[station]
    hook.side, hook.path, hook.added_to = spot.side, spot.path, spot.added_to
    hang(spot.module, hook, spot.side)
    if reads_copy(block, station):
        after = block.spots.get("after_cross_attention", spot)
        if after.module is not spot.module:
            hang(after.module, CarriedChange(hook, "in"), "in")
        hang(block.module, CarriedChange(hook, "out"), "out")
        hook.is_copy, hook.carried = True, Carried()


def install(model: nn.Module, anatomy: Anatomy) -> Pass:
    """A pass that is kept up to date by hooks on the model and its blocks, for the hooks that change tokens."""
    running = Pass(model, anatomy)
    blocks = {id(block.module) for block in anatomy.blocks}
    for block in anatomy.blocks:
        if type(block.module).forward is nn.Module.forward:
            raise ValueError(
                f"{block.name!r} is a {type(block.module).__name__} without a forward of its own: nothing that is put "
                "into it would be called. Name modules that are called with blocks='path.to.layers.*'"
            )
    hang(model, PassEntry(running, model, anatomy.blocks[0].name), "in")
    for module in running.masks.around:
        if id(module) not in blocks:
            hang(module, MaskListener(running, module), "in")
    for block, index in cache_places(anatomy):
        path = block.spots["input"].path if "input" in block.spots else None
        hang(block.module, BlockEntry(running, anatomy, block, index, path), "in")
        if anatomy.family == "unknown":
            check = BlockExit(running, block.name, path, block.spots["output"].path)
            check.key = block.module.register_forward_hook(check, with_kwargs=True).id
    return running


def cache_places(anatomy: Anatomy) -> Iterator[tuple[BlockAnatomy, int]]:
    """Each block with its place in a cache: counted within its part, encoder or decoder."""
    seen: dict[str, int] = {}
    for block in anatomy.blocks:
        yield block, seen.setdefault(block.part, 0)
        seen[block.part] += 1


def hooks_in(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """All hooks that stay in a model, with the modules that they hang on."""
    for module in walking.modules(model):
        for store in (module._forward_pre_hooks, module._forward_hooks):
            for hook in store.values():
                if isinstance(hook, Hook):
                    yield module, hook


def take_down(model: nn.Module, keep: frozenset[int] = frozenset()) -> None:
    """Removes the hooks that stay in a model, but not those whose `id` is to be kept. It may be called again."""
    for module, hook in hooks_in(model):
        if id(hook) not in keep:
            hook.taken_down(module)
    unhook(model, lambda hook: isinstance(hook, Hook) and id(hook) not in keep)
