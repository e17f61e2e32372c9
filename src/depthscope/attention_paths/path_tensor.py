"""A tensor that carries its paths: a block's own code runs on it, and what leaves is split by the paths that led there.

With attention, the scales of norms and the gates of activations frozen at what they are in this pass, a block is an
affine map of its tokens. `PathTensor` is what the model computes, bit for bit, and beside it, made only where it is
asked for, the same split into `Terms`: every function of PyTorch that the model calls with it is looked up among the
rules (`rules.py`), which say what becomes of the terms. What no rule knows is not guessed: the terms of its
result are refused, by name, if anything asks for them. Nothing asks for those of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from depthscope.attention_paths.terms import Terms
from depthscope.attention_paths.unfollowed_reads import UnfollowedReads, ours

# What a tensor may stand for in a product: "" only what is split; "gate", an activation, and "weights", a softmax, are
# frozen beside it; so is "scale", what a norm divides by, which leaves what it scales a plain tensor.
Kind = Literal["", "gate", "weights", "scale"]


Made = tuple[Callable[[], Any], Kind]  # what a rule gives: how the terms of the result are made, and its kind
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of a sum of terms, in units of the largest entry


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
    contexts: list[Terms] | None = None  # P_h V_h of every self-attention (k, batch, h, n, d_v), where wanted
    left_over: int | None = None  # the place of a term that need not go through weights: see `through_weights`
    attends: Callable[[], bool] = lambda: True  # whether attention runs now: a softmax elsewhere is none
    tolerance: float | None = None  # where set, every step must add up, and the first that does not is named
    reads: UnfollowedReads | None = None  # sees who else reads tokens
    ended: bool = False  # whether the block that this is of has ended


@dataclass
class State:
    """What a `PathTensor` knows beside its numbers."""

    make: Callable[[], Terms] | None  # called once, when the terms are asked for
    log: Log
    name: str  # of the function that made it
    kind: Kind = ""
    base: PathTensor | None = None  # what it is a view of
    terms: Terms | None = None
    uses: int = 0  # calls that it was given to
    written: str = ""  # what has written into a part of it, after which its terms are not known


class PathTensor(Tensor):
    """What the model computes, and its split by length of path."""

    state: State

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from depthscope.attention_paths.dispatch import apply

        return apply(func, args, kwargs or {})


def carrying(tokens: Tensor, terms: Terms, log: Log) -> PathTensor:
    """Tokens that enter a block, with the terms that they are the sum of."""
    return wrapped(tokens, State(None, log, "input", terms=terms))


def wrapped(primal: Tensor, state: State) -> PathTensor:
    """A tensor of the model with what is known of it."""
    with torch._C.DisableTorchFunctionSubclass(), ours():
        made = primal.as_subclass(PathTensor)
        if state.log.reads is not None:
            state.log.reads.know(primal)
    made.state = state
    return made


def plain(value: Any) -> Any:
    """What the model would have without us: tensors without their paths, in whatever holds them."""
    with torch._C.DisableTorchFunctionSubclass(), ours():
        return tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, PathTensor) else x, value)


def terms_of(tensor: Tensor) -> Terms:
    """The split of a tensor; one without paths is constant."""
    if not isinstance(tensor, PathTensor):
        return Terms.constant(tensor.detach())
    state = tensor.state
    around: PathTensor | None = tensor
    while around is not None:
        if around.state.written:
            raise NotFollowed(f"{around.state.written!r} writes into a part of a tensor, where paths are not followed")
        around = around.state.base
    if state.terms is None:
        assert state.make is not None
        with torch._C.DisableTorchFunctionSubclass(), ours():
            state.terms, state.make = state.make(), None
            if state.log.tolerance is not None:
                _require_sum(tensor.as_subclass(Tensor), state)
    return state.terms


def consumed(tensor: Tensor, overwrite: Callable[[Tensor], Tensor], copy: Callable[[Tensor], Tensor]) -> Terms:
    """A linear map of the terms of an argument: in place where nobody else reads them, which saves their memory."""
    terms = terms_of(tensor)
    if not isinstance(tensor, PathTensor) or tensor.state.uses != 1 or tensor.state.name not in _FRESH:
        return terms.map(copy)
    tensor.state.terms, tensor.state.make = None, _overwritten
    return terms.map(overwrite)


_FRESH = frozenset({"linear", "add", "__add__"})  # what makes terms in memory of their own


def _overwritten() -> Terms:
    raise NotFollowed("these terms have been overwritten")


def refused(why: str, kind: Kind = "") -> Made:
    """The terms are not known, which matters where they are asked for."""

    def make() -> Terms:
        raise NotFollowed(why)

    return make, kind


def product_of_tokens(kind: Kind = "") -> Made:
    """Refuses."""
    return refused("a product of tokens with tokens is not linear: paths are not followed through it", kind)


def given(names: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that have these names, in this order; None where one is not given."""
    found = dict(zip(names.split(), args, strict=False)) | kwargs
    return [found.get(name) for name in names.split()]


def log_of(value: Any) -> Log:
    """That of the first tensor with paths."""
    return next(leaf.state.log for leaf in tree_leaves(value) if isinstance(leaf, PathTensor))


def _require_sum(primal: Tensor, state: State) -> None:
    assert state.terms is not None
    error = relative_error(state.terms.whole(), primal)
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


_DEPTH = 4  # of what holds what holds a tensor
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}


def unwrap(model: nn.Module) -> None:
    """What a model has kept of a pass (a last output, a running mean, a cache) stays there without our paths.

    Exchanges every tensor with paths among the attributes and buffers of its modules for the model's own.
    """
    for module in model.modules():
        kept = vars(module)
        for name in [name for name in kept if name not in _OF_EVERY_MODULE]:
            changed = _without_paths(kept[name], _DEPTH)
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
