"""Centred attention: attention without what it gives to all tokens alike, A − τU with U = 11ᵀ/n.

Ali, Galanti & Wolf 2023 (arXiv:2306.01610) take U out of attention (τ = 1), and so do Nait Saada, Naderi & Tanner 2025
("Mind the Gap"), since U carries the one large singular value. (A − τU)V = AV − τ·mean(V): fused attention's context
minus the mean of the values, and no n × n matrix. Both papers take 11ᵀ/n also where attention is causal, which lets
tokens see later ones; here U is then the uniform attention over the tokens so far, 1/i in row i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from torch import Tensor

from depthscope.remedies.means import RelativeToMean
from depthscope.remedies.remedy import register_remedy
from depthscope.remedies.values import OnContext, OnHeads, by_head


def centred_context(context: Tensor, uniform: Tensor, heads: int, tau: float = 1.0) -> Tensor:
    """C − τU V of every head, from C = A V and U V, what uniform attention makes of the values.

    context (…, n, h·d_v), uniform (…, 1 or n, g·d_v) → (…, n, h·d_v), in the dtype of the context.
    """
    shift = tau * by_head(uniform, heads, context.shape[-1] // heads).flatten(-2)
    return context - shift.to(context.dtype)


@register_remedy
@dataclass(frozen=True)
class CentredAttention(RelativeToMean, OnContext):
    """Takes τ times uniform attention out of attention, in every head.

    τ = 1 in the papers. In bidirectional models it is the same as de-escalating the values, since the rows of A sum to
    1. In causal ones ("auto", "prefix") uniform attention is over the tokens so far, so that attention gives nothing to
    the first token; "full" would let a token see later ones, and `allow_leak=True` permits it. Padding neither counts
    nor changes. `AttnScale` keeps the mean and scales the rest.
    """

    tau: float = 1.0
    mixing: str = field(default="auto", kw_only=True)

    name: ClassVar[str] = "centred-attention"
    always_shown: ClassVar[tuple[str, ...]] = ("tau",)
    numbers: ClassVar[Mapping[str, float]] = {"tau": -inf}

    def changed(self, context: Tensor, here: OnHeads) -> Tensor:
        """The formula, for a context (batch, n, h·d_v)."""
        return centred_context(context, here.heard.taken(context.shape[1]), here.heads, self.tau)
