"""What the causal mean does to a token over many blocks: it is no projection, so that its powers mix the tokens. Ours.

The full mean's operation I − J (τ = 1) is a projection: done a hundred times it is what it is done once. A causal one
cannot be: the diagonal of a lower triangular projection holds only 0 and 1, and I − τC has 1 − τ/i there. So token i
keeps (1 − τ/i)^L of itself over L blocks, and norms make up for the rest with *earlier* tokens: beneath these it is
lost before any branch has done anything, unless τL is small beside the number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def own_token_share(tokens: int, tau: float, blocks: int) -> Tensor:
    """Share of each token's energy that is its own after `blocks` times I − τC, rows normed in between; (tokens).

    C is the mean of the tokens so far; the first token is left alone, and keeps 1. The tokens are unrelated and of one
    size, and there are no branches: this is the remedy alone, the limit of a small α. float64.
    """
    if tokens < 1 or blocks < 0 or not 0 <= tau <= 1:
        raise ValueError(f"expected tokens ≥ 1, blocks ≥ 0 and τ in [0, 1], got {tokens}, {blocks} and {tau}")
    counts = torch.arange(1, tokens + 1, dtype=torch.float64)[:, None]
    kept = torch.eye(tokens, dtype=torch.float64)
    for _ in range(blocks):
        means = kept.cumsum(dim=0) / counts  # C times what is left: nobody multiplies matrices for a mean
        means[0] = 0
        kept = kept - tau * means
        kept = kept / kept.norm(dim=-1, keepdim=True)
    return kept.diagonal() ** 2
