"""A mean of tokens that a model subtracts and carries from segment to segment, as a part of the model.

Yu & Zhang 2024 (eq. 21) subtract the mean over all tokens. In a language model that lets a token see its own future,
so the causal means of `token_means.py` go over the tokens up to and including a token's own, over all segments of the
stream: a total per block and stream, and one weight, are all that the next segment needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from depthscope.models.token_means import CausalMean, Full, Prefix, Running, TokenMean

PREFIX = Prefix()


@dataclass(frozen=True)
class CarriedMean:
    """Y = X − τ·mean: a strength and a token mean.

    `Prefix()` (causal): the mean over the whole stream. In training nearly all of it is what earlier weights made, and
        has no gradient: it does not stop what the loss makes common to all tokens.
    `Ema(decay=β)` (causal): the same with a short memory.
    `Full()` (the paper's): the mean over the segment, of which nothing is carried on. Every token sees the segment's
        last one, and a segment of one token becomes (1 − τ) times itself.
    """

    tau: float = 1.0
    mean: TokenMean = PREFIX

    def __post_init__(self) -> None:
        if not isinstance(self.mean, CausalMean | Full):
            raise ValueError(f"expected a mean of tokens, such as Prefix(), Ema() or Full(), got {self.mean!r}")
        if not 0 <= self.tau <= 1:
            raise ValueError(f"expected tau between 0 and 1, got {self.tau}")

    @property
    def leaks(self) -> bool:
        """Whether a token sees later ones."""
        return self.mean.kind == "full"

    def weight_after(self, n: int, weight: Tensor) -> Tensor:
        """The weight () of a stream's total after n more tokens, the same for all blocks: β^n·w + Σ_{i<n} β^i."""
        assert isinstance(self.mean, CausalMean)
        beta = self.mean.beta
        return beta**n * weight + sum(beta**i for i in range(n))

    def subtract(self, tokens: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """tokens (batch, n, d), before (batch, d) the stream's total, of this weight () → tokens without their causal
        means, total after.

        The total after the segment has no gradient.
        """
        assert isinstance(self.mean, CausalMean)
        means, after = self.mean.running_mean(tokens, before=Running(before[:, None], weight))
        return tokens - (self.tau * means).to(tokens.dtype), after.total[:, 0].detach()

    def subtract_of_segment(self, tokens: Tensor) -> Tensor:
        """The paper's operation: lets every token (batch, n, d) see the segment's last one."""
        assert isinstance(self.mean, Full)
        return tokens - (self.tau * self.mean.mean(tokens)).to(tokens.dtype)


def total_dtype(weights: torch.dtype) -> torch.dtype:
    """In which totals are kept: float32 or wider."""
    return torch.promote_types(weights, torch.float32)
