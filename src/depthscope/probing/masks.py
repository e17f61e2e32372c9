"""Finds the mask of real tokens, wherever a model takes it.

The modules around the blocks, from the model itself to each block, are asked for the arguments of their
call. The innermost that is a mask of shape (batch, n) counts: a wrapper may give it another name, and a
decoder has another one than its encoder. Masks that a model has already turned into something else
(four axes, additive) are passed over.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from depthscope.anatomy import Anatomy

PADDING_NAMES = frozenset({"src_key_padding_mask", "key_padding_mask"})  # true for padding, as in PyTorch


class MaskFinder:
    """Remembers the masks of the running pass."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.names = PADDING_NAMES | {"attention_mask"} | ({anatomy.mask_argument} - {None})
        self.unused: set[str] = set()  # arguments that look like masks and were not understood
        paths = {"", *(_prefix(b.name, i) for b in anatomy.blocks for i in range(b.name.count(".") + 2))}
        modules = {path: model.get_submodule(path) for path in sorted(paths)}
        self.around = [m for m in modules.values() if not isinstance(m, nn.ModuleList | nn.Sequential)]
        self._signatures = {module: inspect.signature(module.forward) for module in self.around}
        self._current: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        self._current.clear()

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One of the modules around the blocks is called."""
        for name, value in self._arguments(module, args, kwargs).items():
            is_mask = isinstance(value, Tensor) and value.ndim == 2
            if name in self.names:
                if is_mask or value is None:
                    self._current[name] = value
            elif is_mask and ("mask" in name or "pad" in name):
                self.unused.add(name)

    def real(self, batch: int, n: int) -> Tensor | None:
        """True for real tokens, (batch, n); None if all are."""
        for name, mask in self._current.items():
            if mask is None:
                continue
            if tuple(mask.shape) != (batch, n):
                raise ValueError(f"{name} is {tuple(mask.shape)}, but the tokens of the blocks are {(batch, n)}")
            # PyTorch turns a mask of padding into 0 and −inf before its layers see it.
            return mask == 0 if name in PADDING_NAMES else mask != 0
        return None

    def _arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        signature = self._signatures[module]
        try:
            found = dict(signature.bind_partial(*args, **kwargs).arguments)
        except TypeError:  # a call that will fail in the model itself, with a better message
            return kwargs
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                found |= found.pop(parameter.name, {})
        return found


def _prefix(name: str, parts: int) -> str:
    return ".".join(name.split(".")[:parts])
