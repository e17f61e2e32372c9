"""The hooks that a watch hangs on the model that training calls. In a copy of the model they do nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from depthscope.anatomy import Side
from depthscope.hooks import Machine

if TYPE_CHECKING:
    from depthscope.watching.watcher import Watch


class Counter:
    """The hook on the model. A copy of the model (a moving average of its weights, say) is not watched."""

    def __init__(self, watch: Watch):
        self.watch = watch

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.watch.before_pass(args, kwargs)

    def __reduce__(self) -> tuple[type[NotWatched], tuple[()]]:
        return NotWatched, ()


class End:
    """A hook that ends a watched pass. In a copy of the model it does nothing."""

    def __init__(self, watch: Watch, act: Callable[[], object]):
        self.watch, self.act = watch, act

    def __call__(self, _module: nn.Module, _args: object, _output: object) -> None:
        self.act()

    def __reduce__(self) -> tuple[type[NotWatched], tuple[()]]:
        return NotWatched, ()


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


class NotWatched:
    """What becomes of the hooks in a copy of the model."""

    def __call__(self, *_given: object) -> None:
        pass
