"""A function of PyTorch is called with a tensor that carries its paths: the call is made, and its rule looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from depthscope.attention_paths import rules
from depthscope.attention_paths.path_tensor import Kind, Log, NotFollowed, PathTensor, State, log_of, plain, wrapped
from depthscope.attention_paths.terms import Terms
from depthscope.attention_paths.unfollowed_reads import holds_numbers, ours

IN_PLACE = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div"}


# What gives the numbers of tokens away, so that it is not known what becomes of them; integers are made of them.
ESCAPES = frozenset({"numpy", "__array__", "tolist", "item", "__float__", "__int__", "__index__", "__complex__"})
ESCAPES |= {"__dlpack__", "__reduce_ex__", "__cuda_array_interface__"}
CASTS = frozenset({"to", "type", "type_as", "int", "long", "short", "char", "byte"})


@ours()
def apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of PyTorch as the model does, and gives its result the paths that its arguments have."""
    name = rules.name_of(func)
    _look_at(name, (args, kwargs))
    if kwargs.get("inplace"):
        return _in_place(func, name, args, kwargs)
    if name in IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in rules.PASSED_ON):
        return _in_place(func, name, args, kwargs)
    if name == "__setitem__":
        return _in_place(func, name, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        returned = func(*plain(args), **plain(kwargs))
    if not any(isinstance(leaf, Tensor) and holds_numbers(leaf) for leaf in tree_leaves(returned)):
        if name in ESCAPES or (name in CASTS and returned.dtype != torch.bool):
            _refuse(name, (args, kwargs))
        return returned
    args, kwargs = _as_they_are((args, kwargs))
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, PathTensor):
            leaf.state.uses += 1
    make, kind = rules.rule_for(name)(func, args, kwargs, returned)
    return _carry(returned, _Once(make), kind, name, args, log_of((args, kwargs)))


def _look_at(name: str, given: Any) -> None:
    """Tokens must come with their paths, and from the block that runs: any other way is not counted among paths."""
    leaves = tree_leaves(given)
    reads = next((leaf.state.log.reads for leaf in leaves if isinstance(leaf, PathTensor)), None)
    if reads is None:
        return
    for leaf in leaves:
        if isinstance(leaf, PathTensor):
            is_by_another_way = leaf.state.log.ended
        else:
            is_by_another_way = isinstance(leaf, Tensor) and holds_numbers(leaf) and reads.knows(leaf)
        if is_by_another_way:
            reads.refuse(name, leaf)


def _refuse(name: str, given: Any) -> None:
    reads = log_of(given).reads
    if reads is not None:
        reads.refuse(name)


def _as_they_are(given: Any) -> Any:
    """The same tensors, each in an object of its own that a later function in place does not change."""
    copies: dict[int, PathTensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, PathTensor):
            return value
        return copies.setdefault(id(value), wrapped(plain(value), value.state))

    return tree_map(copied, given)


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

    def one(value: Any, make: Callable[[], Terms]) -> Any:
        if not isinstance(value, Tensor) or not holds_numbers(value):
            return value
        return wrapped(value, State(make, log, name, kind, source))

    if isinstance(returned, Tensor):
        return one(returned, made)
    items = [one(value, lambda place=place: made()[place]) for place, value in enumerate(returned)]  # type: ignore[misc]
    return type(returned)(items)


def _in_place(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As the function that gives a new tensor, which then takes the place of the old one.

    What is written into a part of a tensor is not followed: the whole has no terms from then on.
    """
    target, base = args[0], IN_PLACE.get(name, name.removesuffix("_"))
    if not isinstance(target, PathTensor):
        raise NotFollowed(f"{name!r} writes tokens into a tensor without paths, where they are not followed")
    function = func if "inplace" in kwargs else getattr(Tensor, base, None)
    if target.state.base is not None or function is None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            func(*plain(args), **plain(kwargs))
        _forget(target, name)
        return target
    before = wrapped(plain(target), target.state)
    rest = {key: value for key, value in kwargs.items() if key != "inplace"}
    new = apply(function, (before, *args[1:]), rest)
    with torch._C.DisableTorchFunctionSubclass():
        target.data = new.as_subclass(Tensor)
    target.state = new.state
    return target


def _forget(written: PathTensor, name: str) -> None:
    part: PathTensor | None = written
    while part is not None:
        part.state.written = name
        part = part.state.base
