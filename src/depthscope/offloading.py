"""Weights that Accelerate keeps on disk, or in another memory, and brings for as long as their module runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from depthscope import walking


def device_of(model: nn.Module, modules: list[nn.Module] | None = None) -> torch.device:
    """Where the model takes its inputs. Refuses weights that have no values and that nobody will bring.

    `modules`: all of the model's, where somebody has listed them already.
    """
    modules = walking.modules(model) if modules is None else modules
    weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
    if True in [weight.is_meta for weight in weights] and nobody_brings(model):
        raise ValueError("the model is on the meta device and has no weights; load it, or move it with to_empty()")
    if not weights:
        return torch.device("cpu")
    if weights[0].is_meta:
        return next(torch.device(hook.execution_device) for hook in map(_bringing, modules) if hook is not None)
    return weights[0].device


def has_offloaded(module: nn.Module) -> bool:
    """Whether some of its weights are not here now."""
    return any(parameter.is_meta for parameter in walking.parameters(module))


def nobody_brings(module: nn.Module) -> bool:
    """Whether some weights have no values and no hook that brings them, on their module or around it."""
    if not has_offloaded(module) or _bringing(module) is not None:
        return False
    own = any(parameter.is_meta for parameter in module.parameters(recurse=False))
    return own or any(map(nobody_brings, module.children()))


@contextmanager
def brought(module: nn.Module) -> Iterator[None]:
    """While it is open, the module's own weights are here, if a hook can bring them."""
    hook = _bringing(module)
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def _bringing(module: nn.Module) -> Any:
    """Accelerate's hook of this module, if it brings weights."""
    hook = vars(module).get("_hf_hook")
    for part in getattr(hook, "hooks", (hook,)):  # several of them stand in a SequentialHook
        if getattr(part, "offload", False):
            return part
    return None
