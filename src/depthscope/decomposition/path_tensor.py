"""A tensor that carries its paths: a block's own code runs on it, and what leaves is split by the paths that led there.

With attention, the scales of norms and the gates of activations frozen at what they are in this pass, a block is an
affine map of its tokens. `PathTensor` is what the model computes, bit for bit, and beside it, made only where it is
asked for, the same split into `Tracks`: every function of PyTorch that the model calls with it is looked up among the
rules (`rules.py`), which say what becomes of the tracks. What no rule knows is not guessed: the tracks of its
result are refused, by name, if anything asks for them. Nothing asks for those of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from depthscope.decomposition.tracks import Tracks
from depthscope.decomposition.watch import Watch, ours

# What a tensor may stand for in a product: "" only what is split; "gate", an activation, and "weights", a softmax, are
# frozen beside it; so is "scale", what a norm divides by, which leaves what it scales a plain tensor.
Kind = Literal["", "gate", "weights", "scale"]


class NotFollowed(ValueError):
    """Paths do not lead through this: it is not linear, or not known."""


class Attended(NamedTuple):
    """One call of self-attention, of some heads of a block or of all."""

    heads: int
    queries: int
    start: int  # the shortest path that entered
    sizes: Tensor  # ‖P_h‖² of each, by which heads are told apart (batch, h) or (batch·h)


@dataclass
class Log:
    """What is noted while tensors are split."""

    batch: int = 1
    seen: list[Attended] = field(default_factory=list)  # every self-attention that was passed
    contexts: list[Tracks] | None = None  # P_h V_h of every self-attention (k, batch, h, n, d_v), where wanted
    left_over: int | None = None  # the place of a track that need not go through weights: see `weights.py`
    attends: Callable[[], bool] = lambda: True  # whether attention runs now: a softmax elsewhere is none
    tolerance: float | None = None  # where set, every step must add up, and the first that does not is named
    watch: Watch | None = None  # sees who else reads tokens
    ended: bool = False  # whether the block that this is of has ended


@dataclass
class State:
    """What a `PathTensor` knows beside its numbers."""

    make: Callable[[], Tracks] | None  # called once, when the tracks are asked for
    log: Log
    name: str  # of the function that made it
    kind: Kind = ""
    base: PathTensor | None = None  # what it is a view of
    tracks: Tracks | None = None
    uses: int = 0  # calls that it was given to
    written: str = ""  # what has written into a part of it, after which its tracks are not known


class PathTensor(Tensor):
    """What the model computes, and its split by length of path."""

    state: State

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from depthscope.decomposition.dispatch import apply

        return apply(func, args, kwargs or {})


def carrying(tokens: Tensor, tracks: Tracks, log: Log) -> PathTensor:
    """Tokens that enter a block, with the tracks that they are the sum of."""
    return wrapped(tokens, State(None, log, "input", tracks=tracks))


def wrapped(primal: Tensor, state: State) -> PathTensor:
    """A tensor of the model with what is known of it."""
    with torch._C.DisableTorchFunctionSubclass(), ours():
        made = primal.as_subclass(PathTensor)
        if state.log.watch is not None:
            state.log.watch.know(primal)
    made.state = state
    return made


def plain(value: Any) -> Any:
    """What the model would have without us: tensors without their paths, in whatever holds them."""
    with torch._C.DisableTorchFunctionSubclass(), ours():
        return tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, PathTensor) else x, value)


def tracks_of(tensor: Tensor) -> Tracks:
    """The split of a tensor; one without paths is constant."""
    if not isinstance(tensor, PathTensor):
        return Tracks.constant(tensor.detach())
    state = tensor.state
    around: PathTensor | None = tensor
    while around is not None:
        if around.state.written:
            raise NotFollowed(f"{around.state.written!r} writes into a part of a tensor, where paths are not followed")
        around = around.state.base
    if state.tracks is None:
        assert state.make is not None
        with torch._C.DisableTorchFunctionSubclass(), ours():
            state.tracks, state.make = state.make(), None
            if state.log.tolerance is not None:
                _require_sum(tensor.as_subclass(Tensor), state)
    return state.tracks


def consumed(tensor: Tensor, overwrite: Callable[[Tensor], Tensor], copy: Callable[[Tensor], Tensor]) -> Tracks:
    """A linear map of the tracks of an argument: in place where nobody else reads them, which saves their memory."""
    tracks = tracks_of(tensor)
    if not isinstance(tensor, PathTensor) or tensor.state.uses != 1 or tensor.state.name not in _FRESH:
        return tracks.map(copy)
    tensor.state.tracks, tensor.state.make = None, _overwritten
    return tracks.map(overwrite)


_FRESH = frozenset({"linear", "add", "__add__"})  # what makes tracks in memory of their own


def _overwritten() -> Tracks:
    raise NotFollowed("these tracks have been overwritten")


def product_of_tokens() -> Tracks:
    """Refuses."""
    raise NotFollowed("a product of tokens with tokens is not linear: paths are not followed through it")


def log_of(value: Any) -> Log:
    """That of the first tensor with paths."""
    return next(leaf.state.log for leaf in tree_leaves(value) if isinstance(leaf, PathTensor))


def _require_sum(primal: Tensor, state: State) -> None:
    assert state.tracks is not None
    error = relative_error(state.tracks.whole(), primal)
    if state.log.tolerance is not None and not error <= state.log.tolerance:
        raise NotFollowed(f"{state.name!r} does not add up: the terms differ from what it gives by {error:.1e} of it")


def relative_error(found: Tensor, expected: Tensor, real: Tensor | None = None) -> float:
    """The largest difference in units of the largest entry, among real tokens if these (…, n) are given."""
    if real is not None:
        found, expected = found[real], expected[real]
    if not expected.numel():
        return 0.0
    size = float(expected.abs().amax())
    return float((found - expected).abs().amax()) / (size or 1.0)
