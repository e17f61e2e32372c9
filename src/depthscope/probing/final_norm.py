"""What the model's head reads: the tokens behind the final norm, found by watching where a block's output goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from depthscope import walking
from depthscope.anatomy import Anatomy
from depthscope.anatomy.structure import is_named_norm
from depthscope.hooks import Visit
from depthscope.hooks.tokens import first_tokens
from depthscope.safety import TemporaryHook


def norms_outside(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Module]:
    """The norms that stand in no block, by path."""
    norms = [(name, module) for name, module in walking.named_modules(model) if is_named_norm(module)]
    inside = {id(module) for block in anatomy.blocks for module in walking.modules(block.module)}
    return {name: m for name, m in norms if id(m) not in inside and _has_vectors_only(m)}


class FinalNorm:
    """While it is open, calls `hear(visit, tokens)` with what one of these norms makes of a block's output.

    A module counts if its class is named a norm, if it has no parameters but vectors, if it is given the very tensor
    that a block has returned, and if it returns tokens of that shape. A norm that the model computes without a module,
    or that reads something else (the first token alone, a copy), is not found. Which block is the last one, only
    the listener knows.
    """

    def __init__(self, norms: dict[str, nn.Module], hear: Callable[[Visit, Tensor], object]):
        self.norms, self.hear = norms, hear
        self.name: str | None = None  # of the module that was heard last
        self._returned: tuple[weakref.ref[Tensor], int | None, Visit] | None = None
        self._open: ExitStack | None = None

    def remember(self, visit: Visit, output: Tensor) -> None:
        """A block has returned this tensor."""
        self._returned = weakref.ref(output), _version(output), visit

    def __enter__(self) -> FinalNorm:
        with ExitStack() as stack:
            for name, module in self.norms.items():
                stack.callback(module.register_forward_hook(TemporaryHook(self._hook(name)), with_kwargs=True).remove)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        opened, self._open, self._returned = self._open, None, None
        if opened is not None:
            opened.close()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given, tokens = first_tokens((*args, *kwargs.values())), first_tokens(output)
            if given is None or tokens is None or tokens.shape != given.shape or self._returned is None:
                return
            reference, version, visit = self._returned
            if reference() is given and _version(given) == version:
                self.name = name
                self.hear(visit, tokens)

        return hook


def _has_vectors_only(module: nn.Module) -> bool:
    return all(p.ndim <= 1 for p in walking.parameters(module))


def _version(tensor: Tensor) -> int | None:
    """How often it was written to; tensors of inference mode do not count."""
    return None if tensor.is_inference() else tensor._version
