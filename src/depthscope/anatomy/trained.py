"""Whether a model has been trained, read from its norms alone: nothing is run and nothing is changed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from depthscope import walking
from depthscope.anatomy import Anatomy
from depthscope.anatomy.structure import is_named_norm
from depthscope.offloading import brought


class TrainingState(TypedDict):
    """What the norms of the blocks look like."""

    look: Literal["initialised", "trained", "unknown"]
    norms: int  # how many have parameters
    moved: int  # how many of them are not as an initialiser leaves them


def norms_of_blocks(_model: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """What is named a norm inside the blocks, each once."""
    inside = {id(module): module for block in anatomy.blocks for module in walking.modules(block.module)}
    return [module for module in inside.values() if is_named_norm(module)]


def training_state(blocks: Anatomy | list[nn.Module]) -> TrainingState:
    """Freshly initialised or trained, from the gains and biases of the norms inside the blocks, or of these norms.

    Initialisers leave a norm's bias at exactly 0 and, without a bias, all its gains at one number (1, or 0 in
    Gemma); a single step of an optimiser moves them. Some initialisers draw gains at random
    (Transformer-XL), so where there are biases they decide. "unknown" without norms that have parameters,
    or with entries that are not finite. It cannot see a model whose norms were frozen during training.
    """
    norms = norms_of_blocks(nn.Module(), blocks) if isinstance(blocks, Anatomy) else blocks
    untouched = _untouched([norm for norm in norms if _has_gain(norm)])
    known = [value for value in untouched if value is not None]
    moved = sum(not value for value in known)
    if not known or len(known) < len(untouched):
        return {"look": "unknown", "norms": len(known), "moved": moved}
    return {"look": "trained" if moved else "initialised", "norms": len(known), "moved": moved}


def _has_gain(norm: nn.Module) -> bool:
    """Known by its shape."""
    gain = getattr(norm, "weight", None)
    return isinstance(gain, nn.Parameter) and gain.ndim == 1


def _untouched(norms: list[nn.Module]) -> list[bool | None]:
    """Whether each norm is as an initialiser leaves it; None if its numbers are not finite, or not to be had.

    Norms of one width are asked together: one operation and one answer, where each of its own would cost as much as
    the measures of a small model.
    """
    alike: dict[Any, list[tuple[int, Tensor]]] = {}
    found: list[bool | None] = [None] * len(norms)
    with torch.no_grad():
        for place, norm in enumerate(norms):
            with brought(norm) if "_hf_hook" in vars(norm) else nullcontext():
                gain, bias = norm.weight, getattr(norm, "bias", None)
                assert isinstance(gain, Tensor)
                decides = bias if isinstance(bias, Tensor) else gain - gain[0]
                if decides.is_meta:
                    continue
                plain = type(decides) in (Tensor, nn.Parameter)  # one of several processes is asked alone
                key = (decides.shape, decides.dtype, decides.device) if plain else place
                alike.setdefault(key, []).append((place, decides.detach()))
        for group in alike.values():
            for (place, _), size in zip(group, _sizes([decides for _, decides in group]), strict=True):
                found[place] = size == 0 if math.isfinite(size) else None
    return found


def _sizes(vectors: list[Tensor]) -> list[float]:
    """Σ|v_i| of vectors of one shape: 0 only if all entries are, and finite only if all are."""
    if len(vectors) == 1:
        return [torch.linalg.vector_norm(vectors[0], 1, dtype=torch.float64).item()]
    return torch.linalg.vector_norm(torch.stack(vectors), 1, dim=-1, dtype=torch.float64).tolist()
