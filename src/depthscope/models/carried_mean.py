"""De-escalation in a stream: the mean of the tokens so far, carried from segment to segment.

Yu & Zhang 2024 (eq. 21) subtract the mean over all tokens. In a language model that lets a token see its
own future, so here it is the mean of the tokens up to and including its own, over all segments of the
stream: two numbers per block and stream, a sum and a count, are all that the next segment needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MeanKind = Literal["prefix", "full_segment_mean_leaks"]


@dataclass(frozen=True)
class Deescalation:
    """Y = X − τ·mean, as a part of a model.

    kind="prefix" (causal): mean_i = Σ_{j ≤ i} γ^{i−j} x_j / (κ + Σ_{j ≤ i} γ^{i−j}) over the whole stream.
        γ = 1 − 1/horizon; without a horizon γ = 1, and every token since the stream began counts the same.
        A stream that lasts for a whole training then remembers what the weights of long ago made: give a
        horizon, such as the length of the memory, where the weights change.
        κ = `shrinkage` counts like that many zero tokens before the stream. With κ = 0 and τ = 1 the first
        token would become exactly zero, and a LayerNorm behind it multiplies gradients by 1/√eps.
    kind="full_segment_mean_leaks" (the paper's): the mean over the segment; every token sees the segment's
        last one. A segment of one token becomes (1 − τ) times itself.
    """

    tau: float = 1.0
    kind: MeanKind = "prefix"
    horizon: float | None = None
    shrinkage: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("prefix", "full_segment_mean_leaks"):
            raise ValueError(f'expected kind="prefix" or "full_segment_mean_leaks", got {self.kind!r}')
        if self.horizon is not None and not self.horizon > 1:
            raise ValueError(f"expected a horizon of more than 1 token, or None, got {self.horizon}")
        if not self.shrinkage >= 0:
            raise ValueError(f"expected a shrinkage of at least 0 tokens, got {self.shrinkage}")

    @property
    def leaks(self) -> bool:
        """Whether a token sees later ones."""
        return self.kind != "prefix"


class PrefixWeights(NamedTuple):
    """What the prefix sums of one segment are made of, the same for all blocks."""

    within: Tensor  # (n, n): γ^{i−j} for j ≤ i, else 0
    carried: Tensor  # (n, 1): γ^{i+1}, the weight of what was before the segment
    length: Tensor  # (n, 1): Σ_{j ≤ i} γ^{i−j} over the stream


def prefix_weights(n: int, length: Tensor, horizon: float | None) -> PrefixWeights:
    """For a segment of n tokens, behind a stream of `length` tokens (if γ < 1, of their weights)."""
    gamma = 1.0 if horizon is None else 1 - 1 / horizon
    position = torch.arange(n, device=length.device, dtype=length.dtype)
    within = torch.pow(gamma, (position[:, None] - position).clamp(min=0)).tril()
    carried = torch.pow(gamma, position + 1)
    total = carried * length + within.sum(dim=1)
    return PrefixWeights(within, carried[:, None], total[:, None])


def subtract_prefix_mean(
    tokens: Tensor, sums: Tensor, weights: PrefixWeights, deescalation: Deescalation
) -> tuple[Tensor, Tensor]:
    """tokens (batch, n, d), sums (batch, d) of the stream before → de-escalated tokens, sums of the stream after.

    Sums are kept in the dtype of `sums`, which is float32 or wider.
    """
    prefix = weights.within @ tokens.to(sums.dtype) + weights.carried * sums[:, None]  # (batch, n, d)
    mean = prefix / (weights.length + deescalation.shrinkage)
    return tokens - (deescalation.tau * mean).to(tokens.dtype), prefix[:, -1].detach()


def subtract_segment_mean(tokens: Tensor, deescalation: Deescalation) -> Tensor:
    """The paper's operation: lets every token see the segment's last one."""
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return tokens - (deescalation.tau * wide.mean(dim=-2, keepdim=True)).to(tokens.dtype)
