"""What a model has kept of a pass (a last output, a running mean, a cache) stays there without our paths."""

from __future__ import annotations

from typing import Any

from torch import nn

from depthscope.decomposition.path_tensor import PathTensor, plain

DEPTH = 4  # of what holds what holds a tensor
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}


def unwrap(model: nn.Module) -> None:
    """Exchanges every tensor with paths among the attributes and buffers of its modules for the model's own."""
    for module in model.modules():
        kept = vars(module)
        for name in [name for name in kept if name not in _OF_EVERY_MODULE]:
            changed = _without_paths(kept[name], DEPTH)
            if changed is not kept[name]:
                kept[name] = changed


def _without_paths(value: Any, depth: int) -> Any:
    """The same object, changed in place where it can be."""
    if isinstance(value, PathTensor):
        return plain(value)
    if depth == 0 or isinstance(value, nn.Module | type):
        return value
    if isinstance(value, tuple):
        items = [_without_paths(item, depth - 1) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        pairs: Any = enumerate(value)
    elif isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(held := getattr(value, "__dict__", None), dict):
        _without_paths(held, depth - 1)
        return value
    else:
        return value
    for key, item in pairs:
        changed = _without_paths(item, depth - 1)
        if changed is not item:
            value[key] = changed
    return value
