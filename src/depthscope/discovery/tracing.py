"""What was made from what: one pass of a model, recorded function by function and module by module.

Every tensor that is made from the model's inputs gets a number, its *state*, and remembers the states it was made from.
Numbers grow with time, and a tensor that is written to gets a new one. Nothing of the tensors themselves is kept, no
gradient is asked for, and the model has nothing to do with it: the functions of torch are watched, not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
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
    all_around: list[Call]  # the calls that it is part of, from the inside out
    number: int  # in the order in which calls begin
    entered: tuple[Passed, ...]
    left: tuple[Passed, ...] = ()

    @property
    def depth(self) -> int:
        """How many calls stand around it."""
        return len(self.all_around)


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
    """While it is entered, numbers the tensors that are made from those that have a number."""

    def __init__(self) -> None:
        super().__init__()
        self.states = States()
        self.state_of = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        versions = [_version(tensor) for tensor in given]
        result = func(*args, **kwargs)
        made = [t for t in tensors_in(result) if not any(t is other for other in given)]
        written = [t for t, version in zip(given, versions, strict=True) if _version(t) != version]
        if given and given[0].is_inference() and _writes(func):  # it does not count how often it was written to
            written.append(given[0])
        known = [t for t in given if t in self.state_of]
        parents = tuple({self.state_of[t] for t in known})
        whole = tuple({self.state_of[t] for t in known if not t.is_floating_point()})
        for tensor in {id(t): t for t in (*made, *written)}.values():
            # A mask that is read off the tokens is not made of them.
            if of_these := parents if tensor.is_floating_point() else whole:
                self.state_of[tensor] = self.states.add(tensor, of_these)
                base = tensor._base  # what is written into a part is written into the whole
                if base is not None and base in self.state_of:
                    self.state_of[base] = self.states.add(base, (self.state_of[base], self.state_of[tensor]))
        if func in _SUMS and len(args) == len(parents) == 2 and not kwargs and result.is_floating_point():
            self.states.sums[self.state_of[result]] = frozenset(parents)
        return result


def follow(model: nn.Module, batch: Batch) -> tuple[list[Call], States]:
    """The calls of all modules in one pass, in the order in which they begin."""
    tracing = Tracing()
    states, state_of = tracing.states, tracing.state_of
    calls: list[Call] = []
    running: list[Call] = []
    spread: list[tuple[str, Tensor]] = []  # what modules are given that several processes have

    def passed(value: Any) -> tuple[Passed, ...]:
        return tuple(Passed(path, t.shape, state_of.get(t)) for path, t in floating_in(value))

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = list(tensors_in((args, kwargs)))
        spread.extend((name, tensor) for tensor in given if is_spread(tensor))
        if not calls:  # these are the model's inputs
            for tensor in given:
                state_of[tensor] = states.add(tensor)
        running.append(Call(name, module, running[::-1], len(calls), passed((args, kwargs))))
        calls.append(running[-1])

    def leave(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        call = running.pop()
        inside = tuple(p.state for p in call.entered if p.state is not None)
        for tensor in tensors_in(output):  # made where no function of torch was seen: by a kernel of its own
            if inside and tensor not in state_of:
                state_of[tensor] = states.add(tensor, inside)
        call.left = passed(output)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            before = TemporaryHook(partial(enter, name))
            hooks = (
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=not name),
                module.register_forward_hook(TemporaryHook(leave), with_kwargs=True),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        with tracing:
            try:
                call(model, batch)
            except (RuntimeError, ValueError):
                if spread:
                    refuse_spread(*spread[0])
                raise
    return calls, states


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _writes(func: Any) -> bool:
    """Whether a function writes into its first argument, by its name: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
