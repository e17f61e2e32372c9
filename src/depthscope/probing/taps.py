"""What listens during a forward pass: hooks at the stations of an anatomy. They change nothing and are
always removed.

A block module may be applied several times in one pass (ALBERT): blocks are numbered by application.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, BlockAnatomy, Spot

OnTokens = Callable[["Visit", str, Tensor, Tensor], None]


class Visit:
    """One application of a block: its number, and what its tokens look like."""

    def __init__(self, number: int, block: BlockAnatomy, first_of_part: bool, mask: Tensor | None):
        self.number = number
        self.block = block
        self.first_of_part = first_of_part
        self.mask = mask  # (batch, n) true for real tokens, or None
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
        self._arguments: dict[str, Any] = {}
        self._part: str | None = None
        self._count = 0
        self._handles: list[Any] = []

    def __enter__(self) -> Taps:
        try:
            self._listen(self.model, self._begin_pass)
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
                self._attach_spot(Spot(module, side), stations)  # type: ignore[arg-type]
        for side in ("in", "out"):
            if stations := at.get((block.module, side), []):
                self._attach_spot(Spot(block.module, side), stations)  # type: ignore[arg-type]
        for name, attention in (("attention", block.attention), ("cross_attention", block.cross_attention)):
            if attention is not None:
                self._listen(attention, partial(self._enter_attention, name))
                self._listen_out(attention, lambda _output: setattr(self, "inside", None))
        self._listen_out(block.module, self._end_block)

    def _enter_attention(self, name: str, _args: object, _kwargs: object) -> None:
        self.inside = name

    def _attach_spot(self, spot: Spot, stations: list[str]) -> None:
        if spot.side == "in":
            self._listen(spot.module, lambda args, kwargs: self._report(stations, (*args, *kwargs.values())))
        else:
            self._listen_out(spot.module, lambda output: self._report(stations, output))

    def _listen(self, module: nn.Module, act: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> None:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            act(args, kwargs)

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _listen_out(self, module: nn.Module, act: Callable[[Any], object]) -> None:
        def hook(_module: nn.Module, _args: object, output: Any) -> None:
            act(output)

        self._handles.append(module.register_forward_hook(hook))

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = inspect.signature(self.model.forward).bind_partial(*args, **kwargs).arguments
        self._arguments |= self._arguments.pop("kwargs", {})
        self._count, self._part, self.visit, self.inside = 0, None, None, None

    def _begin_block(self, block: BlockAnatomy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._count += 1
        first = self._count == 1 or block.part != self._part
        self._part = block.part
        tokens = first_tokens((*args, *kwargs.values()))
        shape = None if tokens is None else tokens.shape
        self.visit = Visit(self._count, block, first, self._real_tokens(block, kwargs, shape))
        self.visit.shape = shape

    def _end_block(self, _output: Any) -> None:
        if self.visit is not None and self.on_visit is not None:
            self.on_visit(self.visit)
        self.visit = None

    def _report(self, stations: list[str], value: Any) -> None:
        if self.visit is None:
            return  # the module was called outside of a block
        tokens = first_tokens(value)
        if tokens is None:
            where = f"station {stations[0]!r} of {self.visit.block.name!r}"
            raise ValueError(f"expected tokens at {where}, got {type(value).__name__}")
        batch_first = self._batch_first(tokens, self.visit)
        for station in stations:
            self.on_tokens(self.visit, station, batch_first, tokens)

    def _batch_first(self, tokens: Tensor, visit: Visit) -> Tensor:
        """(batch, n, d), whatever the model's layout."""
        shape = visit.shape
        if tokens.ndim == 2 and shape is not None and len(shape) == 3 and tokens.shape[0] == shape[0] * shape[1]:
            tokens = tokens.view(*shape[:2], -1)  # OPT's FFN flattens the batch
        if tokens.ndim == 2:
            tokens = tokens.unsqueeze(1 - self.anatomy.token_axis)  # no batch axis
        if tokens.ndim != 3:
            raise ValueError(
                f"expected tokens (batch, n, d) from {visit.block.name!r}, got shape {tuple(tokens.shape)}; "
                "name the blocks that pass tokens with blocks='path.to.layers.*'"
            )
        return tokens if self.anatomy.token_axis == 1 else tokens.transpose(0, 1)

    def _real_tokens(self, block: BlockAnatomy, kwargs: dict[str, Any], shape: torch.Size | None) -> Tensor | None:
        """The mask of the model's own call (blocks get processed masks); PyTorch's layers get it as it is."""
        name = block.mask_argument or self.anatomy.mask_argument
        if name is None:
            return None
        mask = self._arguments.get(name)
        if mask is None and name == "src_key_padding_mask":
            mask = kwargs.get(name)
        if mask is None or not isinstance(mask, Tensor):
            return None
        if mask.ndim != 2:
            raise ValueError(f"expected {name} of shape (batch, n), got {tuple(mask.shape)}")
        # PyTorch turns a mask of padding into 0 and −inf before its layers see it.
        real = mask == 0 if self.anatomy.mask_marks_padding else mask != 0
        if shape is not None and len(shape) == 3:
            expected = (shape[0], shape[1]) if self.anatomy.token_axis == 1 else (shape[1], shape[0])
            if tuple(real.shape) != expected:
                raise ValueError(f"{name} is {tuple(mask.shape)}, but the tokens of {block.name!r} are {expected}")
        return real


def first_tokens(value: Any) -> Tensor | None:
    """The token matrix in what a module takes or returns: the first floating-point tensor of at least two axes."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.ndim >= 2 else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((found for item in value if (found := first_tokens(item)) is not None), None)
    return None
