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
from depthscope.transfers import fetched


class TrainingState(TypedDict):
    """What the norms of the blocks look like."""

    look: Literal["initialised", "trained", "unknown"]
    norms: int  # how many have parameters
    moved: int  # how many of them are not as an initialiser leaves them


def norms_of_blocks(_model: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """What is named a norm inside the blocks, each once."""
    inside = {id(module): module for block in anatomy.blocks for module in walking.modules(block.module)}
    return [module for module in inside.values() if is_named_norm(module)]


def training_state(anatomy: Anatomy) -> TrainingState:
    """Freshly initialised or trained, from the gains and biases of the norms inside the blocks.

    Initialisers leave a norm's bias at exactly 0 and, without a bias, all its gains at one number (1, or 0 in
    Gemma); a single step of an optimiser moves them. Some initialisers draw gains at random
    (Transformer-XL), so where there are biases they decide. "unknown" without norms that have parameters,
    or with entries that are not finite. It cannot see a model whose norms were frozen during training.
    """
    sizes = NormSizes(norms_of_blocks(nn.Module(), anatomy))
    return sizes.look(fetched(sizes.asked))


class NormSizes:
    """What `training_state` asks, where the weights are: several such questions make one transfer."""

    def __init__(self, named: list[nn.Module]):
        gains = ((norm, getattr(norm, "weight", None)) for norm in named)
        norms = [norm for norm, gain in gains if isinstance(gain, nn.Parameter) and gain.ndim == 1]
        self._norms = len(norms)
        alike: dict[Any, list[Tensor]] = {}
        with torch.no_grad():
            for place, norm in enumerate(norms):
                with brought(norm) if "_hf_hook" in vars(norm) else nullcontext():
                    gain: Any = norm.weight
                    bias = getattr(norm, "bias", None)
                    decides = (bias if isinstance(bias, Tensor) else gain - gain[0]).detach()
                    if not decides.is_meta:
                        plain = type(decides) in (Tensor, nn.Parameter)  # one of several processes is asked alone
                        key = (decides.shape, decides.dtype, decides.device) if plain else place
                        alike.setdefault(key, []).append(decides)
            # Σ|v_i|: 0 only if all entries are, finite only if all are. Norms of one width together: of its own each
            # would cost as much as the measures of a small model.
            together = (vectors[0] if len(vectors) == 1 else torch.stack(vectors) for vectors in alike.values())
            self.asked = [torch.linalg.vector_norm(v, 1, dim=-1, dtype=torch.float64) for v in together]

    def look(self, answers: list[Tensor]) -> TrainingState:
        """Of the numbers that were asked for; one that is not finite says nothing."""
        sizes = [size for answer in answers for size in answer.reshape(-1).tolist()]
        known = [size for size in sizes if math.isfinite(size)]
        moved = sum(size != 0 for size in known)
        if not known or len(known) < self._norms:
            return {"look": "unknown", "norms": len(known), "moved": moved}
        return {"look": "trained" if moved else "initialised", "norms": len(known), "moved": moved}
