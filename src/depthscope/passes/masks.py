"""Finds the mask of real tokens, wherever a model takes it.

The modules around the blocks, from the model itself to each block, are asked for the arguments of their
call. The innermost that is a mask of shape (batch, n) counts: a wrapper may give it another name, and a
decoder has another one than its encoder. Masks that a model has already turned into something else
(four axes, additive) are passed over.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.anatomy.towers import roots_of

PASSED_ON = frozenset(  # seen again as a part's own mask, or one of what it reads
    {"decoder_attention_mask", "encoder_attention_mask", "memory_key_padding_mask", "memory_mask"}
)
PADDING_NAMES = frozenset({"src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask"})  # true for padding


class MaskFinder:
    """Remembers the masks of the running pass.

    It holds names and numbers only, so that it can be copied, pickled and traced by `torch.compile` together
    with the model that it listens to.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        own = {anatomy.mask_argument} if anatomy.mask_argument else set()
        self.names: frozenset[str] = PADDING_NAMES | {"attention_mask"} | own
        self.unused: set[str] = set()  # arguments that look like masks and were not understood
        paths = {"", *(_prefix(b.name, i) for b in anatomy.blocks for i in range(b.name.count(".") + 2))}
        modules = {path: model.get_submodule(path) for path in sorted(paths)}
        blocks = {id(block.module) for block in anatomy.blocks}  # also those that are made from a list of modules
        self.around = [
            m for m in modules.values() if id(m) in blocks or not isinstance(m, nn.ModuleList | nn.Sequential)
        ]
        self._positions = {module: _mask_positions(module, self.names) for module in self.around}
        roots = roots_of(anatomy.blocks)
        self._roots = [module for path, module in modules.items() if path in roots]
        self._current: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        self._current.clear()

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One of the modules around the blocks is called. A tower has only the masks that it is given itself."""
        if any(module is root for root in self._roots):
            self._current.clear()
        for name, value in self._arguments(module, args, kwargs):
            is_mask = isinstance(value, Tensor) and value.ndim == 2
            if name in self.names:
                if is_mask or value is None:
                    self._current[name] = value
            elif is_mask and name not in PASSED_ON:
                self.unused.add(name)

    def real(self, batch: int, n: int, *, past: int = 0) -> Tensor | None:
        """True for real tokens, (batch, n), or (batch, past + n) if it covers cached tokens too; None if all are."""
        for name, mask in self._current.items():
            if mask is None:
                continue
            if mask.shape[0] != batch or mask.shape[1] not in (n, past + n):
                raise ValueError(f"{name} is {tuple(mask.shape)}, but the tokens of the blocks are {(batch, n)}")
            # PyTorch turns a mask of padding into 0 and −inf before its layers see it.
            return mask == 0 if name in PADDING_NAMES else mask != 0
        return None

    def _arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, position in self._positions[module].items():
            if name in kwargs:
                yield name, kwargs[name]
            elif position < len(args):
                yield name, args[position]
        for name, value in kwargs.items():  # what a forward with **kwargs passes on
            if name not in self._positions[module] and _looks_like_a_mask(name, self.names):
                yield name, value


def _mask_positions(module: nn.Module, names: frozenset[str]) -> dict[str, int]:
    parameters = inspect.signature(module.forward).parameters
    return {name: i for i, name in enumerate(parameters) if _looks_like_a_mask(name, names)}


def _looks_like_a_mask(name: str, names: frozenset[str]) -> bool:
    return name in names or "mask" in name or "pad" in name


def _prefix(name: str, parts: int) -> str:
    return ".".join(name.split(".")[:parts])
