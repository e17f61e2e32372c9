"""What listens during a forward pass: hooks at the stations of an anatomy. They change nothing and are
always removed.

A block module may be applied several times in one pass (ALBERT): blocks are numbered by application.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, BlockAnatomy, Spot
from depthscope.probing.masks import MaskFinder

OnTokens = Callable[["Visit", str, Tensor, Tensor], None]


class Visit:
    """One application of a block: its number, and what its tokens look like."""

    def __init__(self, number: int, block: BlockAnatomy):
        self.number = number
        self.block = block
        self.mask: Tensor | None = None  # (batch, n) true for real tokens; None: all are
        self.shape: torch.Size | None = None  # of the block's input, as the model has it


class Taps:
    """Context manager: while it is open, every pass of the model reports the tokens at `stations`.

    `on_tokens(visit, station, tokens, source)` gets the tokens as (batch, n, d), and the tensor that the
    model passes. `on_visit(visit)` is called when a block ends. `visit` is the block that is running,
    `inside` says which of its attention modules is.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        stations: Iterable[str],
        on_tokens: OnTokens,
        on_visit: Callable[[Visit], None] | None = None,
    ):
        self.model = model
        self.anatomy = anatomy
        self.stations = frozenset(stations)
        self.on_tokens = on_tokens
        self.on_visit = on_visit
        self.visit: Visit | None = None
        self.inside: str | None = None  # "attention" or "cross_attention"
        self.masks = MaskFinder(model, anatomy)
        self._count = 0
        self._handles: list[Any] = []

    def __enter__(self) -> Taps:
        try:
            self._listen(self.model, lambda _args, _kwargs: self._begin_pass())
            for module in self.masks.around:
                self._listen(module, partial(self.masks.see, module))
            for block in self.anatomy.blocks:
                self._attach(block)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _attach(self, block: BlockAnatomy) -> None:
        at: dict[tuple[nn.Module, str], list[str]] = {}
        for station, spot in block.spots.items():
            if station in self.stations:
                at.setdefault((spot.module, spot.side), []).append(station)
        self._listen(block.module, lambda args, kwargs: self._begin_block(block, args, kwargs))
        for (module, side), stations in at.items():
            if module is not block.module:
                self._attach_spot(block, Spot(module, side), stations)  # type: ignore[arg-type]
        for side in ("in", "out"):
            if stations := at.get((block.module, side), []):
                self._attach_spot(block, Spot(block.module, side), stations)  # type: ignore[arg-type]
        for name, attention in (("attention", block.attention), ("cross_attention", block.cross_attention)):
            if attention is not None:
                self._listen(attention, partial(self._enter_attention, block, name))
                self._listen_out(attention, lambda _output: setattr(self, "inside", None))
        self._listen_out(block.module, self._end_block)

    def _enter_attention(self, block: BlockAnatomy, name: str, _args: object, _kwargs: object) -> None:
        if self._runs(block):
            self.inside = name

    def _attach_spot(self, block: BlockAnatomy, spot: Spot, stations: list[str]) -> None:
        if spot.side == "in":
            self._listen(spot.module, lambda args, kwargs: self._report(block, stations, (*args, *kwargs.values())))
        else:
            self._listen_out(spot.module, lambda output: self._report(block, stations, output))

    def _runs(self, block: BlockAnatomy) -> bool:
        """Whether the block is the one that is running: its parts may belong to other blocks too, or run alone."""
        return self.visit is not None and self.visit.block is block

    def _listen(self, module: nn.Module, act: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> None:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            act(args, kwargs)

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _listen_out(self, module: nn.Module, act: Callable[[Any], object]) -> None:
        def hook(_module: nn.Module, _args: object, output: Any) -> None:
            act(output)

        self._handles.append(module.register_forward_hook(hook))

    def _begin_pass(self) -> None:
        self.masks.begin()
        self._count, self.visit, self.inside = 0, None, None

    def _begin_block(self, block: BlockAnatomy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._count += 1
        self.visit = Visit(self._count, block)
        tokens = first_tokens((*args, *kwargs.values()))
        if tokens is not None:
            self.visit.shape = tokens.shape
            self.visit.mask = self.masks.real(*self._batch_first(tokens, self.visit).shape[:2])

    def _end_block(self, _output: Any) -> None:
        if self.visit is not None and self.on_visit is not None:
            self.on_visit(self.visit)
        self.visit = None

    def _report(self, block: BlockAnatomy, stations: list[str], value: Any) -> None:
        visit = self.visit
        if visit is None or visit.block is not block:
            return
        tokens = first_tokens(value)
        if tokens is None:
            raise ValueError(
                f"expected tokens at station {stations[0]!r} of {block.name!r}, got {type(value).__name__}"
            )
        batch_first = self._batch_first(tokens, visit)
        for station in stations:
            self.on_tokens(visit, station, batch_first, tokens)

    def _batch_first(self, tokens: Tensor, visit: Visit) -> Tensor:
        found = batch_first(tokens, self.anatomy.token_axis, visit.shape)
        if found is None:
            raise ValueError(
                f"expected tokens (batch, n, d) from {visit.block.name!r}, got shape {tuple(tokens.shape)}; "
                "name the blocks that pass tokens with blocks='path.to.layers.*'"
            )
        return found


def batch_first(tokens: Tensor, token_axis: int, shape: torch.Size | None) -> Tensor | None:
    """The tokens as (batch, n, d), a view, whatever the model's layout; None if they cannot be read so.

    `shape` is that of the block's input: OPT's FFN flattens the batch.
    """
    if tokens.ndim == 2 and shape is not None and len(shape) == 3 and tokens.shape[0] == shape[0] * shape[1]:
        tokens = tokens.view(*shape[:2], -1)
    if tokens.ndim == 2:
        tokens = tokens.unsqueeze(1 - token_axis)  # no batch axis
    if tokens.ndim != 3:
        return None
    return tokens if token_axis == 1 else tokens.transpose(0, 1)


def first_tokens(value: Any) -> Tensor | None:
    """The token matrix in what a module takes or returns: the first floating-point tensor of three axes.

    Without one, the first of two axes (no batch, or OPT's flattened batch) or more: a conditioning vector
    (batch, d) that stands before the tokens is not taken for them.
    """
    found = list(_floating(value))
    for axes in (3, 2):
        for tensor in found:
            if tensor.ndim == axes:
                return tensor
    return next((tensor for tensor in found if tensor.ndim > 3), None)


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        yield from _floating(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floating(item)
