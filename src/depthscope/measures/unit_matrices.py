"""Matrices over their Frobenius norms, as products with vectors: nothing overflows, and no entry has to be divided."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.norms import SAFE_NORMS

_WIDE = 2**17  # entries that are float64 at a time: they stay in the processor's caches


class UnitMatrices(NamedTuple):
    """B_i = factor_i · values_i, with ‖B_i‖_F = 1, or 0 where that has no meaning."""

    values: Tensor  # (matrices, n, m)
    factor: Tensor  # (matrices,), float64

    def gram(self, rows: Tensor) -> Tensor:
        """BᵀB v for every row v, (matrices, k, m)."""
        factor = self.factor.to(self.values.dtype)[:, None, None]
        return ((rows * factor) @ self.values.mT * factor) @ self.values

    def images(self, vectors: Tensor) -> Tensor:
        """Each B times its vector (matrices, m) in float64; some are widened at a time."""
        some = max(_WIDE // self.values[0].numel(), 1)
        parts = zip(self.values.split(some), vectors.split(some), strict=True)
        products = torch.cat([(m.double() @ v.unsqueeze(-1)).squeeze(-1) for m, v in parts])
        return products * self.factor.unsqueeze(-1)


def frobenius_norms(values: Tensor) -> tuple[Tensor, bool]:
    """‖·‖_F of each matrix (matrices, n, m), float64, and whether all of them can be trusted, and inverted."""
    rows = torch.linalg.vector_norm(values, dim=-1)
    norms = torch.linalg.vector_norm(rows.double(), dim=-1)
    low, high = SAFE_NORMS[values.dtype]
    return norms, bool(((norms > low) & (norms < high)).all())
