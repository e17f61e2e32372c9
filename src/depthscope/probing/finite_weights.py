"""Weights that are no numbers. Some attention kernels turn NaN into zeros, and nothing of it is seen behind them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthscope import walking


def weights_not_finite(model: nn.Module) -> list[str]:
    """Names of weights with NaN or infinity in them; of split ones, in the part that this process holds."""
    return [name for name, weights in walking.named_parameters(model) if not _is_finite(weights.detach())]


def _is_finite(weights: Tensor) -> bool:
    """The sum is read first, which is many times faster and finite only if all of them are."""
    if weights.is_meta or not weights.is_floating_point() or weights.dtype.itemsize < 2:
        return True
    local: Tensor = weights.to_local() if hasattr(weights, "to_local") else weights
    total = local.sum(dtype=torch.promote_types(local.dtype, torch.float32))
    return bool(total.isfinite()) or bool(local.isfinite().all())
