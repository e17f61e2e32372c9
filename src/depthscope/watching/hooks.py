"""The hooks that a watch hangs on the model that training calls. In a copy of the model they do nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from depthscope.anatomy import Side
from depthscope.hooks import Machine


class Hook:
    """A hook on a module. A copy of the model (a moving average of its weights, say) is not watched."""

    def __init__(self, owner: object, act: Callable[..., object]):
        self.owner, self.act = owner, act

    def __call__(self, *given: Any) -> None:
        self.act(*given)

    def __reduce__(self) -> tuple[type[NotWatched], tuple[()]]:
        return NotWatched, ()


class Counter(Hook):
    """On the model as long as the watch is open."""


class End(Hook):
    """On the model during a watched pass."""


class Writes(Hook):
    """On a layer that may write a branch, during a watched pass."""


class NotWatched:
    """What becomes of the hooks in a copy of the model."""

    def __call__(self, *_given: object) -> None:
        pass


Guard = Callable[[], AbstractContextManager[None]]


def guarded(guard: Guard, act: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and what fails in it is the guard's affair."""

    def acts(*given: Any) -> Any:
        with guard():
            return act(*given)

    return acts


class GuardedMachine(Machine):
    """A machine whose hooks are guarded."""

    def __init__(self, guard: Guard, *given: Any, **more: Any):
        self._guard = guard
        super().__init__(*given, **more)

    def _hang(self, module: nn.Module, side: Side, act: Callable[[Any], Any], *, prepend: bool = False) -> None:
        super()._hang(module, side, guarded(self._guard, act), prepend=prepend)
