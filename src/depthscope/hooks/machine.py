"""The machine that runs a model and is there when a block runs: it listens at stations, or changes what passes.

    with Machine(model, anatomy, Listen({"output"}, see)):
        model(inputs)

While it is open, every pass of the model is followed block by block. What is done there is given as *acts*: `Listen`
hears tokens, `Change` exchanges them, `ListenToAttention` hears every head. The machine itself changes nothing, and
its hooks are always removed. A block module may be applied several times in one pass (ALBERT): blocks are numbered by
application.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthscope import stations
from depthscope.anatomy import Anatomy, BlockAnatomy, Side, Spot
from depthscope.hooks.attention import AttentionListener, Head
from depthscope.hooks.running import Pass
from depthscope.hooks.staying import cache_places, reads_copy, refuse_copy
from depthscope.hooks.tokens import edit_tokens, sequences_and_tokens, tokens_at
from depthscope.inputs.masks import MaskFinder
from depthscope.measures import DenseAttention
from depthscope.naming import unknown_name
from depthscope.safety import ByThread, TemporaryHook, undone, unhook


class Visit(NamedTuple):
    """One application of a block, while it runs."""

    number: int  # of the application, counted from 1 in each pass
    block: BlockAnatomy
    real: Tensor | None  # (batch, n) true for real tokens; None: all are
    shape: torch.Size  # of what entered the block, in the layout of the model
    entered: Tensor  # the tokens that entered the block, in the layout of the model
    again: Callable[[Tensor], Tensor]  # runs the block once more on other tokens (batch, n, d), unheard
    part: str = ""  # of the model that runs; one that comes back after another has its name with a number
    streams: int = 1  # of the trunk, (batch, n, streams, d): each is heard as a sequence, side by side

    @property
    def real_of_sequences(self) -> Tensor | None:
        """(batch, n) true for real tokens, each sequence once, however many streams it has."""
        return None if self.real is None else self.real[:: self.streams]

    def with_streams(self, trunk: Tensor) -> Tensor:
        """Tokens of the trunk, in the layout of the model, as (batch, n, streams, d) if it has several."""
        is_folded = self.streams > 1 and self.entered.ndim == 3
        return trunk.unflatten(0, (-1, self.streams)).transpose(1, 2) if is_folded else trunk


OnTokens = Callable[[Visit, str, Tensor, Tensor], object]
OnAttention = Callable[[Visit, str, Iterator[Head], Tensor | None], object]


@dataclass(frozen=True)
class Listen:
    """Calls `hear(visit, station, tokens, source)` at stations: tokens (batch, n, d), and the model's own tensor."""

    stations: frozenset[str] | set[str]
    hear: OnTokens


@dataclass(frozen=True)
class Change:
    """Exchanges the tokens at a station for `change(visit, tokens)`, in the layout of the model; None: as they are.

    At a trunk station it changes the trunk, also where a pre-norm model shows only the copy that a norm reads.
    """

    station: str
    change: Callable[[Visit, Tensor], Tensor | None]


@dataclass(frozen=True)
class ListenToAttention:
    """Calls `hear(visit, kind, heads, values)`, kind "attention" or "cross_attention", where attention is computed."""

    hear: OnAttention


Act = Listen | Change | ListenToAttention


class Machine:
    """Context manager: while it is open, the acts are done in every pass of the model.

    `visit` is the block that is running, `inside` says which of its attention modules is, unless the acts do nothing
    but listen to tokens; `on_block_end(visit)` is called when a block ends. A machine that is opened inside a call of
    the model, by a hook of it, does not hear that call (`hears_call=False`): whoever opens it calls `begin_pass` with
    the call's arguments. `masks`: of this model and anatomy, where somebody has one already.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        *acts: Act,
        on_block_end: Callable[[Visit], object] | None = None,
        hears_call: bool = True,
        masks: MaskFinder | None = None,
    ):
        self.model, self.anatomy, self.acts = model, anatomy, acts
        self.on_block_end, self.hears_call = on_block_end, hears_call
        self.running = Pass(model, anatomy, masks)
        self.visit: Visit | None = None
        self.inside: str | None = None  # "attention" or "cross_attention"
        self.blocks_run = 0  # in the pass that runs, or ran last
        self._call: Any = None  # of the block that runs
        self._parts_run: list[str] = []  # in this pass, in order
        self.thread: int | None = None  # in which it is open: what other threads run is not heard
        self._carried: dict[int, Tensor] = {}  # by block module: what a change of a norm's copy adds to the trunk
        self._hooked: list[nn.Module] = []  # where hooks of this machine hang, or are about to
        self._hooks: dict[tuple[int, Side], _Hook] = {}  # by module, those that take further acts
        self._listeners: list[AttentionListener] = []
        self._only_listens = all(isinstance(act, Listen) for act in acts)
        changed = [act.station for act in acts if isinstance(act, Change)]
        heard = [station for act in acts if isinstance(act, Listen) for station in act.stations]
        self._stations = dict.fromkeys([*changed, *heard]).keys()
        for station in self._stations:
            if station not in stations.ALL:
                raise unknown_name("station", station, stations.ALL)
        for station in changed:
            if not any(station in block.spots for block in anatomy.blocks):
                raise ValueError(f"this model does not show its {station}: nothing can be changed there")
            for block in anatomy.blocks:
                refuse_copy(block, station)

    def __enter__(self) -> Machine:
        if self.thread is not None:
            raise ValueError("this machine is open already: make another one")
        with undone(self._close, only_after_failure=True):
            self.thread = get_ident()
            self._attach_all()
            return self

    def __exit__(self, *_: object) -> None:
        with undone(self._close):
            pass

    def _close(self) -> None:
        unhook(self._hooked, lambda hook: isinstance(hook, _Hook) and hook.owner is self)
        for listener in self._listeners:
            listener.close()
        self._hooked, self._hooks, self._listeners = [], {}, []
        self.visit = self.inside = self._call = None  # of a pass that failed: it holds what entered the block
        self._carried.clear()
        self.thread = None

    def begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called with these."""
        self.running.begin()
        self.blocks_run, self.visit, self.inside = 0, None, None
        self._parts_run.clear()
        if self.model in self.running.masks.around:
            self.running.masks.see(self.model, args, kwargs)

    # --- attaching ---------------------------------------------------------------------------------

    def _attach_all(self) -> None:
        if self.hears_call:
            self._hang(self.model, "in", lambda call: self.begin_pass(*call))
        blocks, masks = {id(block.module) for block in self.anatomy.blocks}, self.running.masks
        for module in masks.around:
            if module is not self.model and id(module) not in blocks:
                self._hang(module, "in", partial(_see, masks, module))
        for block, place in cache_places(self.anatomy):
            self._attach(block, place)
        for act in self.acts:
            if isinstance(act, ListenToAttention):
                listener = AttentionListener(self._is_attention, partial(self._hear_attention, act))
                self._listeners.append(listener)
                listener.__enter__()

    def _attach(self, block: BlockAnatomy, place: int) -> None:
        self._hang(block.module, "in", partial(self._begin_block, block, place))
        spots = [(spot, here) for spot, here in block.by_spot if not self._stations.isdisjoint(here)]
        for spot, here in spots:
            if spot.module is not block.module:
                self._attach_spot(block, spot, here)
        # In pre-norm a module reads a copy of the trunk: what a change adds to the copy is added to the trunk too.
        changed = [act.station for act in self.acts if isinstance(act, Change)]
        if changed and any(reads_copy(block, station) for station in changed):
            after = block.spots.get("after_cross_attention")
            if after is not None and "after_attention" in changed:
                self._hang(after.module, "in", partial(self._add_carried, block, False), prepend=True)
            self._hang(block.module, "out", partial(self._add_carried, block, True))
        for side in ("in", "out"):
            for spot, here in spots:
                if spot.module is block.module and spot.side == side:
                    self._attach_spot(block, spot, here)
        for name, attention in (("attention", block.attention), ("cross_attention", block.cross_attention)):
            if attention is not None and not self._only_listens:
                self._hang(attention, "in", partial(self._enter_attention, block, name))
                self._hang(attention, "out", lambda _output: setattr(self, "inside", None))
        self._hang(block.module, "out", partial(self._end_block, block))

    def _attach_spot(self, block: BlockAnatomy, spot: Spot, here: list[str]) -> None:
        """Everything that is done at one spot: listening and changing in the order of the acts."""
        for act in self.acts:
            if isinstance(act, Listen):
                if heard := [station for station in here if station in act.stations]:
                    self._hang(spot.module, spot.side, partial(self._report, block, spot, heard, act.hear))
            elif isinstance(act, Change) and act.station in here:
                copies = reads_copy(block, act.station)
                self._hang(spot.module, spot.side, partial(self._change, block, spot, act.change, copies))

    def _hang(self, module: nn.Module, side: Side, act: Callable[[Any], Any], *, prepend: bool = False) -> None:
        """One hook does all that a machine does at a place, in the order in which it was hung."""
        if not prepend and (there := self._hooks.get((id(module), side))) is not None:
            there.acts.append(act)
            return
        self._hooked.append(module)
        hook = _Hook(self, act, side)
        if not prepend:
            self._hooks[id(module), side] = hook
        if side == "in":
            module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)
        else:
            module.register_forward_hook(hook)

    # --- while a block runs --------------------------------------------------------------------------

    def _runs(self, block: BlockAnatomy) -> bool:
        """Whether the block is the one that is running: its parts may belong to other blocks too, or run alone."""
        return self.visit is not None and self.visit.block is block and id(block.module) not in _REPEATED.blocks

    def _begin_block(self, block: BlockAnatomy, place: int, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        args, kwargs = call
        if id(block.module) in _REPEATED.blocks:
            return
        path = block.spots["input"].path if "input" in block.spots else None
        tokens = self.running.enter(block.name, place, block.module, args, kwargs, path)
        self.blocks_run += 1
        part, now = block.part, self.running.now
        if not self._parts_run or self._parts_run[-1] != part:
            self._parts_run.append(part)
        if (times := self._parts_run.count(part)) > 1:
            part = f"{part} ({times})"
        again = partial(self._run_again, block, args, kwargs)
        self.visit = Visit(self.blocks_run, block, now.real, tokens.shape, tokens, again, part, now.streams)
        self._call = call

    def _end_block(self, block: BlockAnatomy, _output: Any) -> None:
        if id(block.module) in _REPEATED.blocks:
            return
        if self.visit is not None and self.on_block_end is not None:
            self.on_block_end(self.visit)
        self.visit = self._call = None

    def _run_again(self, block: BlockAnatomy, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor) -> Tensor:
        def exchanged(given: Tensor) -> Tensor:
            return self.running.as_given(tokens.to(given.dtype), given)

        entrance, leaves = block.spots["input"], block.spots["output"]
        changed_args, changed_kwargs = edit_tokens((args, kwargs), exchanged, entrance.path)
        _REPEATED.blocks.add(id(block.module))
        try:
            output = tokens_at(block.module(*changed_args, **changed_kwargs), leaves.path)
        finally:
            _REPEATED.blocks.discard(id(block.module))
        assert output is not None
        found = self.running.batch_first(output)
        return found if leaves.added_to is None else found + tokens

    def _enter_attention(self, block: BlockAnatomy, name: str, _call: object) -> None:
        if self._runs(block):
            self.inside = name

    def _report(self, block: BlockAnatomy, spot: Spot, here: list[str], hear: OnTokens, value: Any) -> None:
        visit = self.visit
        if visit is None or not self._runs(block):
            return
        tokens = value if isinstance(value, Tensor) and spot.path is None else tokens_at(value, spot.path)
        if tokens is None or not tokens.is_floating_point():
            where = ", ".join(here)
            raise ValueError(f"expected tokens at station {where} of {block.name!r}, got {type(value).__name__}")
        if self.anatomy.family == "unknown" and "output" in here:
            self.running.leave(block.name, block.spots["input"].path, spot.path, self._call, value)
        if spot.added_to is not None:
            tokens = visit.entered + tokens
        batch_first = self.running.batch_first(tokens)
        for station in here:
            hear(visit, station, batch_first, tokens)

    def _change(
        self,
        block: BlockAnatomy,
        spot: Spot,
        change: Callable[[Visit, Tensor], Tensor | None],
        copies: bool,
        value: Any,
    ) -> Any:
        visit = self.visit
        if visit is None or not self._runs(block):
            return None

        def changed(tokens: Tensor) -> Tensor:
            trunk = tokens if spot.added_to is None else visit.entered + tokens
            new = change(visit, trunk)
            if new is None:
                return tokens
            if spot.added_to is not None:
                return new - visit.entered
            if copies:
                earlier, difference = self._carried.get(id(block.module)), new - tokens
                self._carried[id(block.module)] = difference if earlier is None else earlier + difference
            return new

        return edit_tokens(value, changed, spot.path, everywhere=spot.side == "out" and spot.added_to is None)

    def _add_carried(self, block: BlockAnatomy, ends: bool, value: Any) -> Any:
        if not self._runs(block) or id(block.module) not in self._carried:
            return None
        difference = self._carried[id(block.module)]
        if ends:
            del self._carried[id(block.module)]
        return edit_tokens(value, lambda tokens: tokens + difference.reshape(tokens.shape))

    # --- attention -----------------------------------------------------------------------------------

    def _is_attention(self, shape: tuple[int, ...]) -> bool:
        """Whether a softmax of this shape, (batch, h, n, m), is over the tokens of the running block."""
        visit = self.visit
        if visit is None or id(visit.block.module) in _REPEATED.blocks or len(shape) != 4:
            return False
        if visit.block.attention is not None and self.inside is None:
            return False
        batch, n = sequences_and_tokens(visit.shape, self.running.token_axis, visit.streams > 1)
        batch //= self.anatomy.folded  # attention reads one of the streams
        keys = n + visit.block.extra_keys
        return shape[0] == batch and shape[2] == n and (shape[3] == keys or self.inside == "cross_attention")

    def _hear_attention(self, act: ListenToAttention, heads: Iterator[Head], values: Tensor | None) -> None:
        assert self.visit is not None
        extra = self.visit.block.extra_keys if self.inside == "attention" else 0
        if extra:
            heads = (
                head._replace(
                    attention=DenseAttention(head.attention.dense()[..., :-extra]),
                    complete=False,
                    scores=None if head.scores is None else head.scores[..., :-extra],
                )
                for head in heads
            )
        act.hear(self.visit, self.inside or "attention", heads, values)


class _Repeated(ByThread):
    """Blocks that run again in this thread, for `Visit.again`: no machine hears them."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()  # the `id` of their modules


_REPEATED = _Repeated()


class _Hook(TemporaryHook):
    """A hook of a machine, in its thread: each act is given what passes, (args, kwargs) or what is returned, and gives
    something else in its place, or None."""

    def __init__(self, owner: Machine, act: Callable[[Any], Any], side: Side):
        super().__init__(act)
        self.owner, self.side, self.acts = owner, side, [act]

    def __call__(self, _module: nn.Module, *passed: Any) -> Any:
        if self.owner.thread != get_ident():
            return None
        value, changed = passed if self.side == "in" else passed[-1], None
        for act in self.acts:
            if (new := act(value)) is not None:
                value = changed = new
        return changed


def _see(masks: Any, module: nn.Module, call: Any) -> None:
    masks.see(module, *call)
