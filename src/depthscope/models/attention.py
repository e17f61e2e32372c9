"""Multi-head self-attention, fused, with the two choices that the theory leaves open."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AttentionScale = Literal["head_width", "width"]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(…, n, d) → (…, h, n, d/h): the columns of each head."""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def join_heads(x: Tensor) -> Tensor:
    """(…, h, n, d/h) → (…, n, d): the heads side by side, as `split_heads` found them."""
    return x.transpose(-3, -2).flatten(-2)


def score_scale(width: int, heads: int, scale: AttentionScale) -> float:
    """What the scores are multiplied by: 1/√(d/h) for "head_width", 1/√d for "width"."""
    return float((width if scale == "width" else width // heads) ** -0.5)


def seen_tokens(n: int, device: torch.device | None = None) -> Tensor:
    """Which tokens (columns) a token (row) sees in causal attention: itself and those before it; (n, n), boolean."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


class Attention(nn.Module):
    """[P₁XW₁ … P_hXW_h] W_O, P_k = softmax(XW_q,k(XW_k,k)ᵀ · scale) (Vaswani et al. 2017).

    `output_projection=False` leaves W_O out, as in Yu & Zhang 2024, Prop. 2.9.
    `scale="head_width"` divides the scores by √(d/h), as every library does; `"width"` by √d, as in
    Yu & Zhang's eq. 2.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        output_projection: bool = True,
        scale: AttentionScale = "head_width",
        bias: bool = True,
    ):
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"expected heads that divide the width, got width {width} and {heads} heads")
        if scale not in ("head_width", "width"):
            raise ValueError(f'expected scale="head_width" or "width", got {scale!r}')
        self.heads = heads
        self.causal = causal
        self.scale = score_scale(width, heads, scale)
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias) if output_projection else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (batch, n, d), mask (batch, n) true for real tokens → (batch, n, d)."""
        q, k, v = (split_heads(project(x), self.heads) for project in (self.query, self.key, self.value))
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        else:
            allowed = mask[:, None, None, :].bool()  # (batch, 1, 1, n)
            if self.causal:
                allowed = allowed & seen_tokens(x.shape[-2], x.device)  # (batch, 1, n, n)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        return self.output(join_heads(y))  # (batch, n, d)
