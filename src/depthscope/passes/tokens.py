"""The token matrix in what a module takes or returns: found, turned to (batch, n, d), exchanged for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def first_tokens(value: Any) -> Tensor | None:
    """The token matrix in what a module takes or returns: the first floating-point tensor of three axes.

    Without one, the first of two axes (no batch, or OPT's flattened batch) or more: a conditioning vector
    (batch, d) that stands before the tokens is not taken for them.
    """
    found = list(_floating(value))
    for axes in (3, 2):
        for tensor in found:
            if tensor.ndim == axes:
                return tensor
    return next((tensor for tensor in found if tensor.ndim > 3), None)


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        yield from _floating(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floating(item)


def batch_first(tokens: Tensor, token_axis: int, shape: torch.Size | None) -> Tensor | None:
    """The tokens as (batch, n, d), a view, whatever the model's layout; None if they cannot be read so.

    `shape` is that of the block's input: OPT's FFN flattens the batch.
    """
    if tokens.ndim == 2 and shape is not None and len(shape) == 3 and tokens.shape[0] == shape[0] * shape[1]:
        tokens = tokens.view(*shape[:2], -1)
    if tokens.ndim == 2:
        tokens = tokens.unsqueeze(1 - token_axis)  # no batch axis
    if tokens.ndim != 3:
        return None
    return tokens if token_axis == 1 else tokens.transpose(0, 1)


def as_given(tokens: Tensor, token_axis: int, like: Tensor) -> Tensor:
    """Undoes `batch_first`: tokens (batch, n, d) in the layout of the tensor that they were read from."""
    return (tokens if token_axis == 1 else tokens.transpose(0, 1)).reshape(like.shape)


def exchange(value: Any, old: Tensor | None, new: Any) -> Any:
    """What a module takes or returns, of whatever shape, with one tensor exchanged for another."""
    if value is old:
        return new
    if isinstance(value, dict):
        changed = {key: exchange(item, old, new) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple | list):
        items = [exchange(item, old, new) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def edit_tokens(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module takes or returns, with its token matrix changed."""
    if isinstance(value, Tensor):
        return change(value)
    tokens = first_tokens(value)
    if tokens is None:
        raise ValueError(f"expected tokens to change here, got {type(value).__name__}")
    return exchange(value, tokens, change(tokens))
