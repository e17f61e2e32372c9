"""What was made from what: one pass of a model, followed function by function and module by module.

Every tensor that is made from the model's inputs gets a number, its *state*, and remembers the states it was made from.
Numbers grow with time, and a tensor that is written to gets a new one. Nothing of the tensors themselves is kept, no
gradient is asked for, and the model has nothing to do with it: the functions of torch are watched, not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from depthscope.anatomy import Path
from depthscope.hooks.tokens import floating_in, is_spread, refuse_spread
from depthscope.inputs.batches import Batch, call, tensors_in
from depthscope.safety import TemporaryHook

_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}


@dataclass(frozen=True)
class Passed:
    """A floating-point tensor among what a module was given or has returned."""

    path: Path
    shape: torch.Size
    state: int | None  # None: it was not made from the model's inputs (a parameter, say)


@dataclass(eq=False)
class Call:
    """One call of a module."""

    name: str
    module: nn.Module
    around: Call | None  # the call that it is part of
    number: int  # in the order in which calls begin
    entered: tuple[Passed, ...]
    left: tuple[Passed, ...] = ()

    def all_around(self) -> list[Call]:
        """The calls that it is part of, from the inside out."""
        return [] if self.around is None else [self.around, *self.around.all_around()]

    @property
    def depth(self) -> int:
        """How many calls stand around it."""
        return len(self.all_around())


@dataclass
class States:
    """Which states were made from which."""

    parents: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # how many numbers each has
    sums: dict[int, frozenset[int]] = field(default_factory=dict)  # those that are x + y, and nothing else

    def add(self, tensor: Tensor, parents: tuple[int, ...] = ()) -> int:
        self.parents.append(parents)
        self.sizes.append(tensor.numel())
        return len(self.parents) - 1

    def walk(self, start: int, stop: frozenset[int] = frozenset()) -> Iterator[int]:
        """The states that one was made from, itself included; what those in `stop` were made from is not followed."""
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            yield state
            if state not in stop:
                new = [parent for parent in self.parents[state] if parent not in seen]
                seen.update(new)
                waiting += new


class Tracing(TorchFunctionMode):
    """While it is entered, numbers the tensors that are made, and notes the calls of the modules it listens to."""

    def __init__(self) -> None:
        super().__init__()
        self.states = States()
        self.calls: list[Call] = []
        self._state = WeakTensorKeyDictionary()
        self._running: Call | None = None
        self.spread: tuple[str, Tensor] | None = None  # the first module that is given a tensor of several processes

    def mark(self, value: Any) -> None:
        """These tensors are the model's inputs."""
        for tensor in tensors_in(value):
            self._state[tensor] = self.states.add(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        versions = [_version(tensor) for tensor in given]
        result = func(*args, **kwargs)
        made = [t for t in tensors_in(result) if not any(t is other for other in given)]
        written = [t for t, version in zip(given, versions, strict=True) if _version(t) != version]
        if given and given[0].is_inference() and _writes(func):  # it does not count how often it was written to
            written.append(given[0])
        known = [t for t in given if t in self._state]
        parents = tuple({self._state[t] for t in known})
        whole = tuple({self._state[t] for t in known if not t.is_floating_point()})
        for tensor in {id(t): t for t in (*made, *written)}.values():
            # A mask that is read off the tokens is not made of them.
            if of_these := parents if tensor.is_floating_point() else whole:
                self._note(tensor, of_these)
        if func in _SUMS and len(args) == len(parents) == 2 and not kwargs and result.is_floating_point():
            self.states.sums[self._state[result]] = frozenset(parents)
        return result

    def _note(self, tensor: Tensor, parents: tuple[int, ...]) -> None:
        self._state[tensor] = self.states.add(tensor, parents)
        base = tensor._base  # what is written into a part is written into the whole
        if base is not None and base in self._state:
            whole = (self._state[base], self._state[tensor])
            self._state[base] = self.states.add(base, whole)

    # --- modules ----------------------------------------------------------------------------------

    def listen(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        """Notes every call of a module, until the stack is closed."""

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.spread is None:
                self.spread = next(((name, t) for t in tensors_in((args, kwargs)) if is_spread(t)), None)
            self._running = Call(name, module, self._running, len(self.calls), self._passed((args, kwargs)))
            self.calls.append(self._running)

        def leave(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self._running
            assert call is not None
            inside = tuple(p.state for p in call.entered if p.state is not None)
            for tensor in tensors_in(output):  # made where no function of torch was seen: by a kernel of its own
                if inside and tensor not in self._state:
                    self._state[tensor] = self.states.add(tensor, inside)
            call.left = self._passed(output)
            self._running = call.around

        stack.callback(module.register_forward_pre_hook(TemporaryHook(enter), with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(TemporaryHook(leave), with_kwargs=True).remove)

    def _passed(self, value: Any) -> tuple[Passed, ...]:
        return tuple(Passed(path, t.shape, self._state.get(t)) for path, t in floating_in(value))


def follow(model: nn.Module, batch: Batch) -> tuple[list[Call], States]:
    """The calls of all modules in one pass, in the order in which they begin."""
    tracing = Tracing()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            tracing.listen(stack, name, module)

        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tracing.mark((args, kwargs))

        first = model.register_forward_pre_hook(TemporaryHook(begin), with_kwargs=True, prepend=True)
        stack.callback(first.remove)
        with tracing:
            try:
                call(model, batch)
            except (RuntimeError, ValueError):
                if tracing.spread is not None:
                    refuse_spread(*tracing.spread)
                raise
    return tracing.calls, tracing.states


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _writes(func: Any) -> bool:
    """Whether a function writes into its first argument, by its name: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
