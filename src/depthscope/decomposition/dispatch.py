"""A function of PyTorch is called with a tensor that carries its paths: the call is made, and its rule looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from depthscope.decomposition import rules
from depthscope.decomposition.path_tensor import Kind, Log, NotFollowed, PathTensor, State, log_of, plain, wrapped
from depthscope.decomposition.tracks import Tracks

IN_PLACE = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div"}


def apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of PyTorch as the model does, and gives its result the paths that its arguments have."""
    name = rules.name_of(func)
    if name in IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in rules.PASSED_ON):
        return _in_place(func, name, args, kwargs)
    if name == "__setitem__":
        return _in_place(func, name, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        returned = func(*plain(args), **plain(kwargs))
    made = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not made:
        return returned
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, PathTensor):
            leaf.state.uses += 1
    make, kind = rules.rule_for(name)(func, args, kwargs, returned)
    return _carry(returned, _Once(make), kind, name, args, log_of((args, kwargs)))


class _Once:
    """Makes what several results share only once."""

    def __init__(self, make: Callable[[], Any]):
        self.make: Callable[[], Any] | None = make
        self.made: Any = None

    def __call__(self) -> Any:
        if self.make is not None:
            self.made, self.make = self.make(), None
        return self.made


def _carry(returned: Any, made: _Once, kind: Kind, name: str, args: Any, log: Log) -> Any:
    source = args[0] if name in rules.VIEWS and isinstance(args[0], PathTensor) else None

    def one(value: Any, make: Callable[[], Tracks]) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return wrapped(value, State(make, log, name, kind, source))

    if isinstance(returned, Tensor):
        return one(returned, made)
    items = [one(value, lambda place=place: made()[place]) for place, value in enumerate(returned)]  # type: ignore[misc]
    return type(returned)(items)


def _in_place(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As the function that gives a new tensor, which then takes the place of the old one.

    What is written into a part of a tensor is not followed: the whole has no tracks from then on.
    """
    target, base = args[0], IN_PLACE.get(name, name.removesuffix("_"))
    if not isinstance(target, PathTensor):
        raise NotFollowed(f"{name!r} writes tokens into a tensor without paths, where they are not followed")
    if target.state.base is not None or not hasattr(Tensor, base):
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            func(*plain(args), **plain(kwargs))
        _forget(target, name)
        return target
    before = wrapped(plain(target), target.state)
    new = apply(getattr(Tensor, base), (before, *args[1:]), kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        target.data = new.as_subclass(Tensor)
    target.state = new.state
    return target


def _forget(written: PathTensor, name: str) -> None:
    part: PathTensor | None = written
    while part is not None:
        part.state.written = name
        part = part.state.base
