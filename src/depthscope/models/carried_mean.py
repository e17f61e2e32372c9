"""De-escalation in a stream: the mean of the tokens so far, carried from segment to segment.

Yu & Zhang 2024 (eq. 21) subtract the mean over all tokens. In a language model that lets a token see its
own future, so here it is the mean of the tokens up to and including its own, over all segments of the
stream: two numbers per block and stream, a sum and a count, are all that the next segment needs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Kind = Literal["prefix", "ema", "full_segment_mean_leaks"]


@dataclass(frozen=True)
class Deescalation:
    """Y = X − τ·mean, as a part of a model. The words are those of the remedy `DeEscalate`.

    kind="prefix" (causal): mean_i = Σ_{j ≤ i} x_j / (i + κ) over the whole stream. A stream that lasts for a
        whole training then remembers what the weights of long ago made; where that matters, take "ema".
    kind="ema" (causal): mean_i = Σ_{j ≤ i} β^{i−j} x_j / (κ + Σ_{j ≤ i} β^{i−j}), β = `decay`.
    kind="full_segment_mean_leaks" (the paper's): the mean over the segment; every token sees the segment's
        last one. A segment of one token becomes (1 − τ) times itself.

    κ is `shrink`. None: κ = 0, and the first token of a stream is left alone; its mean is itself, τ = 1 would
    make it zero, and a LayerNorm behind it multiplies gradients by 1/√eps.
    """

    tau: float = 1.0
    kind: Kind = "prefix"
    decay: float = 0.99
    shrink: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"expected kind to be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if not 0 < self.decay < 1:
            raise ValueError(f'expected a decay between 0 and 1, got {self.decay}; a decay of 1 is kind="prefix"')
        if self.shrink is not None and not self.shrink > 0:
            raise ValueError(f"expected shrink above 0, or None to leave the first token alone, got {self.shrink}")

    @property
    def leaks(self) -> bool:
        """Whether a token sees later ones."""
        return self.kind == "full_segment_mean_leaks"


class PrefixWeights(NamedTuple):
    """What the means of one segment are made of, the same for all blocks. β = 1 for kind="prefix"."""

    within: Tensor  # (n, n): β^{i−j} for j ≤ i, else 0
    carried: Tensor  # (n, 1): β^{i+1}, the weight of what was before the segment
    length: Tensor  # (n, 1): Σ_{j ≤ i} β^{i−j} over the stream; the number of its tokens, if β = 1
    divisor: Tensor  # (n, 1): by which sums become means


def prefix_weights(n: int, length: Tensor, deescalation: Deescalation) -> PrefixWeights:
    """For a segment of n tokens, behind a stream of that length."""
    beta = deescalation.decay if deescalation.kind == "ema" else 1.0
    position = torch.arange(n, device=length.device, dtype=length.dtype)
    within = torch.pow(beta, (position[:, None] - position).clamp(min=0)).tril()
    carried = torch.pow(beta, position + 1)
    total = carried * length + within.sum(dim=1)
    first_alone = total.masked_fill(total == 1, torch.inf)  # a mean of 0 for the first token
    divisor = first_alone if deescalation.shrink is None else total + deescalation.shrink
    return PrefixWeights(within, carried[:, None], total[:, None], divisor[:, None])


def subtract_prefix_mean(tokens: Tensor, sums: Tensor, weights: PrefixWeights, tau: float) -> tuple[Tensor, Tensor]:
    """tokens (batch, n, d), sums (batch, d) of the stream before → de-escalated tokens, sums of the stream after.

    Sums are kept in the dtype of `sums`, which is float32 or wider.
    """
    device = tokens.device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):  # no sums in bfloat16
        prefix = weights.within @ tokens.to(sums.dtype) + weights.carried * sums[:, None]  # (batch, n, d)
    mean = prefix / weights.divisor
    return tokens - (tau * mean).to(tokens.dtype), prefix[:, -1].detach()


def subtract_segment_mean(tokens: Tensor, tau: float) -> Tensor:
    """The paper's operation: lets every token see the segment's last one."""
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return tokens - (tau * wide.mean(dim=-2, keepdim=True)).to(tokens.dtype)
