"""A device that is none: its tensors hold one of the CPU, where every operation runs.

What a CPU hides and a GPU does not: tensors of two devices that meet (an error here), and transfers, for which the host
waits until the device has done all that it was given. Each transfer is kept with the line of ours that asked for it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import depthscope
from depthscope.anatomy import projections
from depthscope.probing import finite

HERE = str(Path(depthscope.__file__).parent)
ASKING = {f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")}
KINDS = ("index", "index_put", "index_put_")  # these ask for the number of true elements if an index is of booleans


class _Module(backend_registration._DummyBackendModule):
    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


backend_registration._setup_privateuseone_for_python_backend("other", backend_module=_Module())
OTHER = torch.device("other:0")
transfers: Counter[str] = Counter()  # by the line that asked


class OnOther(Tensor):
    """A tensor on the device."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> OnOther:
        x = Tensor._make_wrapper_subclass(
            cls, inside.shape, inside.stride(), inside.storage_offset(), dtype=inside.dtype, device=OTHER
        )
        x.inside = inside
        return x

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
        return run(function, args, options or {})

    def __repr__(self, **_: Any) -> str:
        return f"OnOther({self.inside})"

    def tolist(self) -> Any:
        count("tolist")
        return self.inside.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor of another device has no array of NumPy: .cpu() first")

    __array__ = numpy


def run(function: Any, args: Any, options: dict[str, Any]) -> Any:
    """An operation, on what is inside."""
    given = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
    others = {id(x.inside): x for x in given if isinstance(x, OnOther)}
    name = function.name().split(".")[0]
    device = options.get("device")
    if not others and (device is None or torch.device(device).type != OTHER.type):
        return function(*args, **options)
    copies = name in ("aten::copy_", "aten::_to_copy")
    if others and not copies and (strangers := [x for x in given if not isinstance(x, OnOther) and x.ndim]):
        raise RuntimeError(f"{name} was given tensors of two devices: {[tuple(x.shape) for x in strangers]} on the CPU")
    stays = device is None or torch.device(device).type == OTHER.type
    if name == "aten::copy_":
        stays = isinstance(args[0], OnOther)
    booleans = name.removeprefix("aten::") in KINDS and any(i is not None and i.dtype == torch.bool for i in args[1])
    if others and (not stays or name in ASKING or booleans):
        count(name)
    if device is not None:
        options = options | {"device": "cpu"}
    plain = tree_map(lambda x: x.inside if isinstance(x, OnOther) else x, (args, options))
    result = function(*plain[0], **plain[1])
    if not stays:
        return args[0] if name == "aten::copy_" else result
    return tree_map(lambda x: others.get(id(x), OnOther(x)) if isinstance(x, Tensor) else x, result)


def count(name: str) -> None:
    """A transfer, asked for by the innermost line of ours, or by a model's own."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(HERE):
            transfers[f"{Path(file).relative_to(HERE)}:{frame.f_lineno} {name}"] += 1
            return
        if "/transformers/" in file:
            break
        frame = frame.f_back
    transfers[f"not ours: {name}"] += 1


@torch.library.impl("aten::empty_strided", "PrivateUse1")  # which PyTorch's own kernels call
def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> OnOther:
    return OnOther(torch.empty_strided(size, stride, dtype=dtype))


@torch.library.impl("aten::_copy_from", "PrivateUse1")
def copy_from(source: Tensor, to: Tensor, _non_blocking: bool = False) -> Tensor:
    run(torch.ops.aten.copy_.default, (to, source), {})
    return to


class Factories(TorchDispatchMode):
    """Makes on the device what is asked for there."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
        return run(function, args, options or {})


def to_other(x: Any) -> Any:
    """Tensors, a model with its weights and buffers, or a tree of these, on the device."""
    if isinstance(x, nn.Module):
        for module in x.modules():
            for name, weights in module._parameters.items():
                if weights is not None:
                    module._parameters[name] = nn.Parameter(OnOther(weights.detach().clone()), weights.requires_grad)
            module._buffers.update({n: to_other(b) for n, b in module._buffers.items() if b is not None})
        return x
    return tree_map(lambda item: OnOther(item.clone()) if isinstance(item, Tensor) else item, x)


@contextmanager
def pretended() -> Iterator[Counter[str]]:
    """Within, the device makes tensors, and what is yielded counts the transfers of ours by line."""
    transfers.clear()
    known = projections.has_own_operations

    def has_own_operations(weight: Tensor) -> bool:
        return not isinstance(weight, OnOther) and known(weight)

    with ExitStack() as stack:  # on a real device these are plain tensors
        for module in (projections, finite):
            stack.enter_context(patch.object(module, "has_own_operations", has_own_operations))
        stack.enter_context(Factories())
        yield transfers


def ours() -> int:
    return sum(number for line, number in transfers.items() if not line.startswith("not ours"))
