"""A function of PyTorch is called with a tensor that carries its paths: the call is made, and its rule looked up."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from depthscope.attention_paths import rules
from depthscope.attention_paths.path_tensor import Call, NotFollowed, PathTensor, State, paths_in, plain, wrapped
from depthscope.attention_paths.unfollowed_reads import holds_numbers, ours

IN_PLACE = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div"}
# What gives the numbers of tokens away, so that it is not known what becomes of them; integers are made of them.
ESCAPES = frozenset({"numpy", "__array__", "tolist", "item", "__float__", "__int__", "__index__", "__complex__"})
ESCAPES |= {"__dlpack__", "__reduce_ex__", "__cuda_array_interface__"}
CASTS = frozenset({"to", "type", "type_as", "int", "long", "short", "char", "byte"})


@ours()
def apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of PyTorch as the model does, and gives its result the paths that its arguments have."""
    name = getattr(func, "__name__", str(func))
    name = func.__self__.__name__ if name == "__get__" else name  # of a property
    _refuse_other_ways(name, (args, kwargs))
    ends_as_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if kwargs.get("inplace") or name in IN_PLACE or name == "__setitem__" or ends_as_in_place:
        return _in_place(func, name, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        returned = func(*plain(args), **plain(kwargs))
    log = paths_in((args, kwargs))[0].state.log
    if not any(isinstance(leaf, Tensor) and holds_numbers(leaf) for leaf in tree_leaves(returned)):
        casts = name in CASTS and isinstance(returned, Tensor) and returned.dtype != torch.bool
        if log.reads is not None and (name in ESCAPES or casts):
            log.reads.refuse(name)
        return returned
    # The same tensors, each in an object of its own that a later function in place does not change.
    copies = {id(leaf): wrapped(plain(leaf), leaf.state) for leaf in paths_in((args, kwargs))}
    args, kwargs = tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))
    call = Call(func, name, args, kwargs, returned, log, log.attends())
    rule = rules.rule_for(name)
    make, kind = cache(lambda: rule.terms(call)), rule.kind(call)
    base = args[0] if name.strip("_") in rules.VIEWS and isinstance(args[0], PathTensor) else None
    if isinstance(returned, Tensor):
        return wrapped(returned, State(make, log, kind, base)) if holds_numbers(returned) else returned
    items = [
        wrapped(value, State(lambda place=place: make()[place], log, kind, base))  # type: ignore[misc]
        if isinstance(value, Tensor) and holds_numbers(value)
        else value
        for place, value in enumerate(returned)
    ]
    return type(returned)(items)


def _refuse_other_ways(name: str, passed: Any) -> None:
    """Tokens must come with their paths, and from the block that runs: any other way is not counted among paths."""
    reads = next((leaf.state.log.reads for leaf in paths_in(passed)), None)
    if reads is None:
        return
    for leaf in tree_leaves(passed):
        if isinstance(leaf, PathTensor):
            is_by_another_way = leaf.state.log.ended
        else:
            is_by_another_way = isinstance(leaf, Tensor) and holds_numbers(leaf) and reads.knows(leaf)
        if is_by_another_way:
            reads.refuse(name, leaf)


def _in_place(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As the function that gives a new tensor, which then takes the place of the old one.

    What is written into a part of a tensor is not followed: the whole has no terms from then on.
    """
    target = args[0]
    if not isinstance(target, PathTensor):
        raise NotFollowed(f"{name!r} writes tokens into a tensor without paths, where they are not followed")
    base = IN_PLACE.get(name, name.removesuffix("_"))
    function = func if "inplace" in kwargs else getattr(Tensor, base, None)
    if target.state.base is not None or function is None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            func(*plain(args), **plain(kwargs))
        part: PathTensor | None = target
        while part is not None:
            part.state.written = name
            part = part.state.base
        return target
    before = wrapped(plain(target), target.state)
    rest = {key: value for key, value in kwargs.items() if key != "inplace"}
    new = apply(function, (before, *args[1:]), rest)
    with torch._C.DisableTorchFunctionSubclass():
        target.data = new.as_subclass(Tensor)
    target.state = new.state
    return target
