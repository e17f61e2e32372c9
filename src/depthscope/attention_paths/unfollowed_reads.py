"""Who reads tokens without their paths: everything that PyTorch computes while a model is followed is looked at.

A `PathTensor` hears what is called with it. It does not hear what compiled code (`torch.jit.script`), `torch.vmap`, a
plain alias of it, or a second argument of a block does with the same numbers, and what comes of that would pass for
constant. Hence `UnfollowedReads`, which sees the operations themselves: one that reads the memory of tokens, and that
none of our rules has called, is noted, and the block that ran is refused.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthscope.safety import ByThread

# These read a tensor's shape and type, and not its numbers.
_SHAPES = ("new_", "_like", "empty", "sym_", "is_same_size", "_has_")


class UnfollowedReads(TorchDispatchMode):
    """Context manager around one pass of the model. Between blocks, what is made of tokens is tokens too."""

    def __init__(self) -> None:
        super().__init__()
        self.block = 0  # that runs; 0: none
        self.refusal = ""  # of the block that runs: why its paths are not known
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}  # where tokens are, and since when

    def know(self, tokens: Tensor) -> None:
        """These are tokens, or made of them."""
        if place := _place(tokens):
            with torch._C.DisableTorchFunctionSubclass():
                self._known[place] = StorageWeakRef(tokens.untyped_storage()), self.block
        elif tokens.numel():
            self.refuse("torch.func")

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor has the memory of tokens, which may have been given to another since."""
        known = self._known.get(_place(tensor))
        return known is not None and not known[0].expired()

    def refuse(self, name: str, tensor: Tensor | None = None) -> None:
        """A function has taken tokens whose paths it does not know."""
        if self.refusal or not self.block:
            return
        known = None if tensor is None else self._known.get(_place(tensor))
        if known is not None and known[1] < self.block:
            what = "takes tokens of an earlier block, which come by another way than the block's own input"
        else:
            what = "takes tokens without their paths (a second argument, TorchScript, torch.vmap, another library)"
        self.refusal = f"{name!r} {what}: paths are not followed there"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if _OURS.depth or not self._known:
            return returned
        name = func.__name__.split(".")[0]
        if any(part in name for part in _SHAPES):
            return returned
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and self.knows(leaf):
                self.refuse(name, leaf)
                for made in tree_leaves(returned):
                    if isinstance(made, Tensor) and holds_numbers(made):
                        self.know(made)
                break
        return returned


def holds_numbers(tensor: Tensor) -> bool:
    """Real or complex ones: integers and truth values are choices, which are frozen."""
    return tensor.is_floating_point() or tensor.is_complex()


def _place(tensor: Tensor) -> int:
    """Where its memory begins; 0: it has none."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or inside a transform of torch.func
        return 0


class _Ours(ByThread):
    def __init__(self) -> None:
        self.depth = 0  # of calls of ours, in which nothing is noted


_OURS = _Ours()


class ours(ContextDecorator):
    """What runs inside, or in the function that it stands above, is our own."""

    def __enter__(self) -> None:
        _OURS.depth += 1

    def __exit__(self, *_: object) -> None:
        _OURS.depth -= 1
