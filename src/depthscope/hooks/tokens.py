"""The token matrix in what a module takes or returns: found, turned to (batch, n, d), exchanged for another.

What the axes of a station's tensor mean is known here and nowhere else: `batch_first`, `as_given` and
`sequences_and_tokens` read them. A stream of several (hyper-connections, (batch, n, streams, d)) is read as a sequence
of its own, those of one sequence side by side: nothing mixes streams but the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from depthscope.anatomy import Path


def first_tokens(value: Any) -> Tensor | None:
    """The token matrix in what a module takes or returns: the first floating-point tensor of three axes.

    Without one, the first of two axes (no batch, or OPT's flattened batch) or more: a conditioning vector
    (batch, d) that stands before the tokens is not taken for them.
    """
    found = [tensor for _, tensor in floating_in(value)]
    by_axes = {tensor.ndim: tensor for tensor in reversed(found)}
    return by_axes.get(3, by_axes.get(2, next((tensor for tensor in found if tensor.ndim > 3), None)))


def floating_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The floating-point tensors in what a module takes or returns, each with the way that leads to it."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, dict | tuple | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, Tensor | dict | tuple | list):
                yield from floating_in(item, (*path, key))


def tokens_at(value: Any, path: Path | None) -> Tensor | None:
    """The token matrix that a path leads to; without a path, the first (`first_tokens`). None: there is none."""
    if path is None:
        return first_tokens(value)
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, tuple | list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def count_ways(entered: Sequence[torch.Size], left: Sequence[torch.Size]) -> int:
    """In how many ways tokens can enter a module and leave it with the same shape."""
    ways = [sum(a == b and len(a) == axes for a in entered for b in left) for axes in (3, 2)]
    return ways[0] or ways[1]


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, each once."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def batch_first(
    tokens: Tensor, token_axis: int, shape: torch.Size | None, maps: bool = False, streams: bool = False
) -> Tensor | None:
    """The tokens as (batch, n, d), a view, whatever the model's layout; None if they cannot be read so.

    `shape` is that of the block's input: OPT's FFN flattens the batch. `maps`: (batch, height, width, d) is read too.
    `streams`: (batch, n, streams, d) is read as (batch · streams, n, d), and tokens without that axis once per stream.
    """
    if streams and shape is not None and len(shape) == 4:
        if tokens.ndim == 4:
            return tokens.transpose(1, 2).flatten(0, 1)
        return tokens.repeat_interleave(shape[2], dim=0) if tokens.ndim == 3 else None
    if tokens.ndim == 2 and shape is not None and len(shape) == 3 and tokens.shape[0] == shape[0] * shape[1]:
        tokens = tokens.view(*shape[:2], -1)
    if tokens.ndim == 2:
        tokens = tokens.unsqueeze(1 - token_axis)  # no batch axis
    if tokens.ndim == 4 and maps:
        tokens = tokens.flatten(1, 2)  # a map (batch, height, width, d)
    if tokens.ndim != 3:
        return None
    return tokens if token_axis == 1 else tokens.transpose(0, 1)


def sequences_and_tokens(shape: torch.Size, token_axis: int, streams: bool = False) -> tuple[int, int]:
    """How many sequences, and how many tokens of each, are in a tensor of this shape with a batch axis."""
    if len(shape) == 4 and not streams:  # a map (batch, height, width, d)
        return shape[0], shape[1] * shape[2]
    return (shape[0], shape[1]) if token_axis == 1 else (shape[1], shape[0])


def as_given(tokens: Tensor, token_axis: int, like: Tensor, streams: bool = False) -> Tensor:
    """Undoes `batch_first`: tokens (batch, n, d) in the layout of the tensor that they were read from."""
    if streams and like.ndim == 4:
        return tokens.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2).contiguous()
    if streams and like.ndim == 3:
        return tokens[:: len(tokens) // len(like)]
    return (tokens if token_axis == 1 else tokens.transpose(0, 1)).reshape(like.shape)


def exchange(value: Any, old: Tensor | None, new: Any) -> Any:
    """What a module takes or returns, of whatever shape, with one tensor exchanged for another."""
    if value is old:
        return new
    return _made_again(value, lambda _key, item: exchange(item, old, new))


def edit_tokens(
    value: Any, change: Callable[[Tensor], Tensor], path: Path | None = None, *, everywhere: bool = False
) -> Any:
    """What a module takes or returns, with its token matrix changed: the one that a path leads to, or the first.

    `everywhere`: also where the same tensor stands once more, as in the list that attention over earlier blocks reads.
    """
    if isinstance(value, Tensor):
        return change(value)
    tokens = tokens_at(value, path)
    if tokens is None:
        raise ValueError(f"expected tokens to change here, got {type(value).__name__}")
    new = change(tokens)
    return exchange(value, tokens, new) if path is None or everywhere else _placed(value, path, new)


def _placed(value: Any, path: Path, new: Tensor) -> Any:
    """What a module takes or returns, with another tensor at the end of a path, and at no other place."""
    if not path:
        return new
    return _made_again(value, lambda key, item: _placed(item, path[1:], new) if key == path[0] else item)


def _made_again(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A dictionary, list or tuple of the same class, with each item changed, by its key; anything else as it is."""
    if isinstance(value, dict):
        changed = {key: change(key, item) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple | list):
        items = [change(index, item) for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def is_spread(tensor: Tensor) -> bool:
    """Whether it is a DTensor, a tensor of several processes: its numbers are not all here."""
    return hasattr(tensor, "device_mesh")


def refuse_spread(block: str, tokens: Tensor) -> None:
    """Tokens of several processes cannot be measured in one."""
    if is_spread(tokens):
        raise ValueError(
            f"expected tokens to enter {block!r} as a plain tensor, got a DTensor {tuple(tokens.shape)}, spread over "
            "processes; keep tokens whole between blocks (no sequence parallelism, use_local_output=True)"
        )
