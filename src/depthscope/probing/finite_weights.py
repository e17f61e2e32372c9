"""Weights that are no numbers. Some attention kernels turn NaN into zeros, and nothing of it is seen behind them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def weights_not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the weights with NaN or infinity in them; of split ones, in the part that this process holds.

    The norms of all of them are asked for first: one answer, and finite only if all of them are.
    """
    with torch.no_grad():
        numbers: list[tuple[str, Tensor]] = []
        alike: dict[Any, list[Tensor]] = {}
        for name, given in named:
            plain = type(given) in (Tensor, nn.Parameter)
            weights = given if plain else _local(given)
            if _can_be_asked(weights):
                numbers.append((name, weights))
                alike.setdefault((weights.device, weights.dtype) if plain else id(weights), []).append(weights)
        # A norm may overflow where no weight is infinite: then each is asked.
        if all(math.isfinite(_norm(weights)) for weights in alike.values()):
            return []
        return [name for name, weights in numbers if not _is_finite(weights)]


def _norm(weights: list[Tensor]) -> float:
    """One number, finite only if all of these are."""
    if len(weights) == 1:
        return torch.linalg.vector_norm(weights[0]).item()
    return torch.stack(torch._foreach_norm(weights)).sum().item()


def _local(weights: Tensor) -> Tensor:
    return weights.to_local() if hasattr(weights, "to_local") else weights


def _can_be_asked(weights: Tensor) -> bool:
    return not weights.is_meta and weights.is_floating_point() and weights.dtype.itemsize > 1


def _is_finite(weights: Tensor) -> bool:
    """The sum is read first, which is many times faster and finite only if all of them are."""
    total = weights.sum(dtype=torch.promote_types(weights.dtype, torch.float32))
    return bool(total.isfinite()) or bool(weights.isfinite().all())
