"""ContraNorm (Guo et al. 2023, ICLR): each token is pushed away from the tokens that point where it points.

    Y = (1 + s)X − s·S X, S = softmax(X̂X̂ᵀ/T), X̂ the tokens over their norms

S X is attention with the tokens as queries, keys and values, so that the fused kernel computes it and S is not formed.
Where tokens are nearly equal, or T is large, S is uniform, and Y is de-escalation with τ = s/(1 + s), times 1 + s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.models.attention import seen_tokens
from depthscope.models.token_means import accumulator
from depthscope.remedies.change import Change
from depthscope.remedies.means import OnTrunk
from depthscope.remedies.remedy import register_remedy


def contra_norm(
    tokens: Tensor,
    scale: float = 1.0,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    causal: bool = False,
) -> Tensor:
    """(1 + s)X − s·S X for tokens (batch, n, d), mask (batch, n) true for real tokens → (batch, n, d).

    `causal` hides later tokens in S. Padding is unchanged, and no real token sees it. Equal tokens are unchanged; so is
    a single one. A token of zeros points nowhere: it sees all others alike.
    """
    real = None if mask is None else mask.bool()
    x = tokens if real is None else torch.where(real.unsqueeze(-1), tokens, 0.0)  # padding may hold nan
    directions = directions_of(x)
    allowed = None
    if real is not None:
        n = x.shape[-2]
        allowed = real.unsqueeze(-2) | torch.eye(n, dtype=torch.bool, device=x.device)  # no row without a token
        allowed = allowed & seen_tokens(n, x.device) if causal else allowed
    smoothed = F.scaled_dot_product_attention(
        directions, directions, x, attn_mask=allowed, is_causal=causal and allowed is None, scale=1 / temperature
    )
    changed = x + scale * (x - smoothed.to(x.dtype))
    return changed if real is None else torch.where(real.unsqueeze(-1), changed, tokens)


def directions_of(tokens: Tensor) -> Tensor:
    """Tokens (…, d) over their norms. A token of zeros stays zero and has no gradient: in float16 the small bound that
    `F.normalize` divides by is 0, and elsewhere its gradient would be 10¹² times too large."""
    wide = tokens.to(accumulator(tokens))
    norms = wide.norm(dim=-1, keepdim=True)
    return (wide / torch.where(norms > 0, norms, 1.0)).to(tokens.dtype)


@register_remedy
@dataclass(frozen=True)
class ContraNorm(OnTrunk):
    """Pushes tokens apart that point the same way, at a station of the trunk, in all blocks or some.

    `scale` is s. At a branch weight of 1 it stops the escalation only above √2 − 1 = 0.414: the odds of a block grow by
    2, and de-escalation with τ = s/(1 + s) takes (1 − τ)² of them. The authors' code has it before a norm
    (`at="after_attention"` in post-norm). It costs about an attention with one head, n²d. In causal models ("auto",
    "prefix") S sees the tokens so far; "full" would let a token see later ones there, and `allow_leak=True` permits it.
    With a cache of keys and values it would need all earlier tokens: `use_cache=False`.
    """

    scale: float = 1.0
    temperature: float = 1.0
    at: str = field(default="output", kw_only=True)
    mixing: str = field(default="auto", kw_only=True)

    name: ClassVar[str] = "contra-norm"
    always_shown: ClassVar[tuple[str, ...]] = ("scale", "at")
    numbers: ClassVar[Mapping[str, float]] = {"scale": -inf, "temperature": 0.0}

    def changed(self, tokens: Tensor, here: Change) -> Tensor:
        """The formula, for tokens (batch, n, d), in a pass that shows all of them."""
        causal = here.mean.of_this_call().kind == "causal"
        if causal and here.running.now.past:
            raise ValueError(
                f"{self.name} compares a token with all tokens before it, and a cache of keys and values does "
                "not hold them: call the model, or generate, with use_cache=False"
            )
        return contra_norm(tokens, self.scale, here.real, temperature=self.temperature, causal=causal)
