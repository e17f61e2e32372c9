"""The one place where things are undone: hooks taken down, and all of it also when Ctrl-C falls into the middle of it.

An interrupt may come between any two lines, those of an `except` or a `finally` included. What is undone here may be
undone twice, and is: the second time begins anew what an interrupt broke off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from depthscope import walking


@contextmanager
def undone(undo: Callable[[], object], *, only_after_failure: bool = False) -> Iterator[None]:
    """Calls `undo` on the way out, or only if an exception passes; `undo` may be called more than once."""
    try:
        try:
            yield
        except BaseException:
            undo()
            raise
        if not only_after_failure:
            undo()
    except BaseException:
        undo()
        raise


class TemporaryHook:
    """A hook that hangs on a model only while it is measured: `undisturbed` takes down what was left hanging."""

    def __init__(self, act: Callable[..., Any]):
        self.act = act

    def __call__(self, *given: Any) -> Any:
        return self.act(*given)


def temporary_hooks(modules: Iterable[nn.Module]) -> frozenset[int]:
    """The `id` of every one that hangs on these modules."""
    return frozenset(id(hook) for _, _, hook in _hooks(modules) if isinstance(hook, TemporaryHook))


def unhook_one(module: nn.Module, unwanted: Callable[[Any], bool]) -> None:
    """The same as `unhook`, of the hooks on this one module: no walk through a large model."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if unwanted(hook)]:
            _take_down(module, key)


def _take_down(module: nn.Module, key: int) -> None:
    stores: list[Any] = [
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._forward_pre_hooks,
        module._forward_hooks,
    ]
    for store in stores:
        store.pop(key, None)


def unhook(where: nn.Module | Iterable[nn.Module], unwanted: Callable[[Any], bool]) -> None:
    """Takes the forward hooks and pre-hooks down for which `unwanted(hook)` is true: all of a model's, or only those on
    modules that are listed, by whoever knows where they hang."""
    for module, key, hook in _hooks(walking.modules(where) if isinstance(where, nn.Module) else where):
        if unwanted(hook):
            _take_down(module, key)


def _hooks(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, int, Any]]:
    return [
        (module, key, hook)
        for module in modules
        for store in (module._forward_pre_hooks, module._forward_hooks)
        if store
        for key, hook in store.items()
    ]
