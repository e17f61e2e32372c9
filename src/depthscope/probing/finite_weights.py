"""Weights that are no numbers. Some attention kernels turn NaN into zeros, and nothing of it is seen behind them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from depthscope import walking


def weights_not_finite(model: nn.Module) -> list[str]:
    """Names of weights with NaN or infinity in them; of split ones, in the part that this process holds.

    The norm of all of them is asked for first: one call, and finite only if all of them are.
    """
    named = [(name, _local(weights.detach())) for name, weights in walking.named_parameters(model)]
    numbers = [(name, weights) for name, weights in named if _can_be_asked(weights)]
    plain = [weights for _, weights in numbers]
    if not plain or math.isfinite(get_total_norm(plain)):
        return []
    return [name for name, weights in numbers if not _is_finite(weights)]


def _local(weights: Tensor) -> Tensor:
    return weights.to_local() if hasattr(weights, "to_local") else weights


def _can_be_asked(weights: Tensor) -> bool:
    return not weights.is_meta and weights.is_floating_point() and weights.dtype.itemsize > 1


def _is_finite(weights: Tensor) -> bool:
    """The sum is read first, which is many times faster and finite only if all of them are."""
    total = weights.sum(dtype=torch.promote_types(weights.dtype, torch.float32))
    return bool(total.isfinite()) or bool(weights.isfinite().all())
