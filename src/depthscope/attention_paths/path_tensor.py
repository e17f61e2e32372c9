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
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of a sum of terms, in units of the largest entry


PRODUCT = "a product of tokens with tokens is not linear: paths are not followed through it"


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
    """What is noted while the tensors of one block are split."""

    batch: int = 1
    seen: list[Attended] = field(default_factory=list)  # every self-attention that was passed
    attends: Callable[[], bool] = lambda: True  # whether attention runs now: a softmax elsewhere is none
    reads: UnfollowedReads | None = None  # sees who else reads tokens
    ended: bool = False  # whether the block that this is of has ended


@dataclass
class State:
    """What a `PathTensor` knows beside its numbers."""

    make: Callable[[], Terms] | None  # called once, when the terms are asked for
    log: Log
    kind: Kind = ""
    base: PathTensor | None = None  # what it is a view of
    terms: Terms | None = None
    written: str = ""  # what has written into a part of it, after which its terms are not known


@dataclass(frozen=True)
class Call:
    """A function of PyTorch, what it was called with, and what it returned."""

    func: Any
    name: str
    args: Any
    kwargs: dict[str, Any]
    returned: Any
    log: Log
    attends: bool  # whether attention ran then

    def named(self, names: str) -> list[Any]:
        """The arguments of these names, in this order; None where one was not passed."""
        found = dict(zip(names.split(), self.args, strict=False)) | self.kwargs
        return [found.get(name) for name in names.split()]

    @property
    def not_known(self) -> str:
        """Why its terms are refused where there is no rule."""
        return f"{self.name!r} is not linear in the tokens, or not known: paths are not followed through it"

    @property
    def source(self) -> Any:
        """The first argument."""
        return self.args[0] if self.args else self.kwargs["input"]


class PathTensor(Tensor):
    """What the model computes, and its split by length of path."""

    state: State

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from depthscope.attention_paths.dispatch import apply

        return apply(func, args, kwargs or {})


def carrying(tokens: Tensor, terms: Terms, log: Log) -> PathTensor:
    """Tokens that enter a block, with the terms that they are the sum of."""
    return wrapped(tokens, State(None, log, terms=terms))


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


def paths_in(value: Any) -> list[PathTensor]:
    """The tensors with paths in the arguments of a call."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, PathTensor)]


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
    return state.terms


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
        kept = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        _without_paths(kept, _DEPTH + 1)
        for name, value in kept.items():
            if vars(module)[name] is not value:
                vars(module)[name] = value


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
    if isinstance(value, list | dict):
        for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
            changed = _without_paths(item, depth - 1)
            if changed is not item:
                value[key] = changed
    elif isinstance(held := getattr(value, "__dict__", None), dict):
        _without_paths(held, depth - 1)
    return value
