"""De-escalation (Yu & Zhang 2024, eq. 21): take the mean out of the tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def deescalate(tokens: Tensor, tau: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
    """Y = (I − τ 11ᵀ/n) X = X − τ·mean(X), the mean over the real tokens of each sequence.

    tokens (…, n, d), mask (…, n) true for real tokens → (…, n, d). Multiplies the odds
    t_sim/t_div by (1 − τ)². Padding is returned unchanged, and so is a sequence without real tokens;
    a single token becomes (1 − τ) times itself. The mean is accumulated in float32 or better.
    In a causal model this lets a position see later tokens.
    """
    working = tokens if tokens.dtype == torch.float64 else tokens.float()
    if mask is None:
        mean = working.mean(dim=-2, keepdim=True)  # (…, 1, d)
        return tokens - (tau * mean).to(tokens.dtype)
    real = mask.bool().unsqueeze(-1)  # (…, n, 1)
    mean = torch.where(real, working, 0.0).sum(dim=-2, keepdim=True) / real.sum(dim=-2, keepdim=True).clamp(min=1)
    return torch.where(real, tokens - (tau * mean).to(tokens.dtype), tokens)
