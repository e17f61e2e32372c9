"""What the model's head reads: the tokens after the final norm, found by watching where a block's output goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from depthscope import walking
from depthscope.anatomy import Anatomy
from depthscope.anatomy.structure import is_named_norm
from depthscope.hooks import Visit
from depthscope.hooks.tokens import first_tokens
from depthscope.safety import TemporaryHook, undone, unhook


def norms_outside(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    """The norms that stand in no block, by path: they have no parameters but vectors."""
    inside = {id(module) for block in anatomy.blocks for module in walking.modules(block.module)}
    return {
        name: module
        for name, module in walking.named_modules(model)
        if id(module) not in inside and is_named_norm(module) and all(p.ndim <= 1 for p in walking.parameters(module))
    }


class FinalNorm:
    """While it is open, calls `hear(visit, tokens)` with what one of these norms makes of a block's output.

    A norm counts if it is given the very tensor that a block has returned, and returns tokens of that shape. One that
    the model computes without a module, or that reads something else (the first token alone, a copy), is not found.
    Which block is the last one, only the listener knows.
    """

    def __init__(self, norms: dict[str, nn.Module], hear: Callable[[Visit, Tensor], object]):
        self.norms, self.hear = norms, hear
        self.name: str | None = None  # of the module that was heard last
        self._returned: tuple[weakref.ref[Tensor], int | None, Visit] | None = None
        self._hooks: list[TemporaryHook] = []

    def remember(self, visit: Visit, output: Tensor) -> None:
        """A block has returned this tensor."""
        self._returned = weakref.ref(output), _version(output), visit

    def __enter__(self) -> FinalNorm:
        with undone(self._close, only_after_failure=True):
            for name, module in self.norms.items():
                self._hooks.append(TemporaryHook(partial(self._heard, name)))
                module.register_forward_hook(self._hooks[-1], with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        with undone(self._close):
            pass

    def _close(self) -> None:
        self._returned = None
        unhook(self.norms.values(), lambda hook: hook in self._hooks)
        self._hooks = []

    def _heard(self, name: str, _module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given, tokens = first_tokens((*args, *kwargs.values())), first_tokens(output)
        if given is None or tokens is None or tokens.shape != given.shape or self._returned is None:
            return
        reference, version, visit = self._returned
        if reference() is given and _version(given) == version:
            self.name = name
            self.hear(visit, tokens)


def _version(tensor: Tensor) -> int | None:
    """How often it was written to; tensors of inference mode do not count."""
    return None if tensor.is_inference() else tensor._version
