"""Whether a model has been trained, read from its norms alone: nothing is run and nothing is changed."""

from __future__ import annotations

import math
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn

from depthscope import walking
from depthscope.anatomy import Anatomy
from depthscope.offloading import brought


class WeightLook(TypedDict):
    """What the norms of the blocks look like."""

    look: Literal["initialised", "trained", "unknown"]
    norms: int  # how many have parameters
    moved: int  # how many of them are not as an initialiser leaves them


def look_of_weights(anatomy: Anatomy) -> WeightLook:
    """Freshly initialised or trained, from the gains and biases of the norms inside the blocks.

    Initialisers leave a norm's bias at exactly 0 and, without a bias, all its gains at one number (1, or 0 in
    Gemma); a single step of an optimiser moves them. Some initialisers draw gains at random
    (Transformer-XL), so where there are biases they decide. "unknown" without norms that have parameters,
    or with entries that are not finite. It cannot see a model whose norms were frozen during training.
    """
    seen = {id(norm): norm for block in anatomy.blocks for norm in _norms(block.module)}
    untouched = [_untouched(norm) for norm in seen.values()]
    known = [value for value in untouched if value is not None]
    moved = sum(not value for value in known)
    if not known or len(known) < len(untouched):
        return {"look": "unknown", "norms": len(known), "moved": moved}
    return {"look": "trained" if moved else "initialised", "norms": len(known), "moved": moved}


def _norms(block: nn.Module) -> list[nn.Module]:
    """The norms inside a block that have a gain, known by the name of their class and by their shape."""
    return [
        module
        for module in walking.modules(block)
        if "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None
        if isinstance(module.weight, nn.Parameter) and module.weight.ndim == 1
    ]


def _untouched(norm: nn.Module) -> bool | None:
    """Whether a norm is as an initialiser leaves it; None if its numbers are not finite, or not to be had."""
    with torch.no_grad(), brought(norm):
        gain, bias = norm.weight, getattr(norm, "bias", None)
        assert isinstance(gain, Tensor)
        decides = bias if isinstance(bias, Tensor) else gain - gain[0]
        if decides.is_meta:
            return None
        size = torch.linalg.vector_norm(decides, 1, dtype=torch.float64).item()  # one question for both
        return size == 0 if math.isfinite(size) else None
