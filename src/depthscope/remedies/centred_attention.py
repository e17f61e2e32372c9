"""Centred attention: attention without what it gives to all tokens alike, A − τU with U = 11ᵀ/n.

Ali, Galanti & Wolf 2023 (arXiv:2306.01610) take U out of attention (τ = 1), and so do Nait Saada, Naderi & Tanner 2025
("Mind the Gap"), since U carries the one large singular value. (A − τU)V = AV − τ·mean(V): fused attention's context
minus the mean of the values, and no n × n matrix. Both papers take 11ᵀ/n also where attention is causal, which lets
tokens see later ones; here U is then the uniform attention over the tokens so far, 1/i in row i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.remedies.remedy import Site, register_remedy
from depthscope.remedies.uniform import RealTokensHook, RelativeToMean, check_number
from depthscope.remedies.values import CONTEXT, by_head, context_of, heads_of, listen_to_mean


def centred_context(context: Tensor, uniform: Tensor, heads: int, tau: float = 1.0) -> Tensor:
    """C − τU V of every head, from C = A V and U V, what uniform attention makes of the values.

    context (…, n, h·d_v), uniform (…, 1 or n, g·d_v) → (…, n, h·d_v), in the dtype of the context.
    """
    shift = tau * by_head(uniform, heads, context.shape[-1] // heads).flatten(-2)
    return context - shift.to(context.dtype)


@register_remedy
@dataclass(frozen=True)
class CentredAttention(RelativeToMean):
    """Takes τ times uniform attention out of attention, in every head.

    τ = 1 in the papers. In bidirectional models it is the same as de-escalating the values, since the rows of A sum to
    1. In causal ones ("auto", "prefix") uniform attention is over the tokens so far, so that attention gives nothing to
    the first token; "full" would let a token see later ones, and `allow_leak=True` permits it. Padding neither counts
    nor changes. `AttnScale` keeps the mean and scales the rest.
    """

    tau: float = 1.0

    name: ClassVar[str] = "centred-attention"
    always_shown: ClassVar[tuple[str, ...]] = ("tau",)

    def __post_init__(self) -> None:
        check_number(self, "tau")
        super().__post_init__()

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """It changes what the output projection reads, inside the attention branch."""
        return (CONTEXT,)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        heads, context = heads_of(self, site.block), context_of(self, site.block)
        site.put_inside(self, CentreContext(self, site, heads), context, CONTEXT)


class CentreContext(RealTokensHook):
    """Centred attention on what the output projection of one block reads."""

    def __init__(self, remedy: CentredAttention, site: Site, heads: int):
        self.remedy, self.running, self.heads = remedy, site.running, heads
        self.values = listen_to_mean(remedy, remedy.mixing, site)

    def values_in_force(self) -> dict[str, float | list[float]]:
        return {"tau": self.remedy.tau}

    def changed(self, tokens: Tensor) -> Tensor:
        return centred_context(tokens, self.values.taken(tokens.shape[1]), self.heads, self.remedy.tau)
