"""Algorithm 1 of Yu & Zhang 2024 for many trials at once, as plain functions of tensors.

Equal to `depthscope.models.Block` (post-norm, scores over √d) with the same weights. Every trial has its own
weights; *streams* of tokens may share them (de-escalated with different τ, say), so tokens are
(trials, streams, n, d).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.measures import TokenMatrix
from depthscope.models.attention import join_heads, score_scale, seen_tokens, split_heads
from depthscope_lab.papers.simulation.weights import Linear, Passing, Weights

NORM_EPS = 1e-5  # nn.LayerNorm's


class Stations(NamedTuple):
    """The five trunk stations, X and Y₁ to Y₄ of Algorithm 1, and the attention; (trials, streams, …)."""

    input: Tensor
    after_attention: Tensor
    ffn_input: Tensor
    after_ffn: Tensor
    output: Tensor
    attention: Tensor  # P (trials, streams, h, n, n)


def apply_linear(linear: Linear | Passing, x: Tensor) -> Tensor:
    """Each trial's tokens times its own matrix: (trials, streams, n, in) → (trials, streams, n, out)."""
    return linear(x.flatten(1, 2)).unflatten(1, x.shape[1:3])


def root(x: Tensor) -> Tensor:
    """R (…, n, k) with RRᵀ = XXᵀ, for tokens (…, n, d), k = min(n, d): for a Gaussian W, XW has the law of RG, where
    G is k rows of W.

    By QR of Xᵀ in float64, which keeps the smallest differences between tokens; a Gram matrix would square them.
    """
    return torch.linalg.qr(x.double().mT, mode="r").R.mT.to(x.dtype)


def attend(
    weights: Weights, x: Tensor, heads: int, *, causal: bool = False, values_of: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[P₁XW₁ … P_hXW_h]W_O and P (trials, streams, h, n, n), the scores over √d (eq. 2).

    The modules of `depthscope.models` use a fused kernel, which does not give P. `causal`: a token sees itself and
    what stands before it. `values_of` is what W_V is applied to, if not the tokens: their `root`.
    """
    q, k, v = (
        split_heads(apply_linear(linear, given), heads)  # (trials, streams, h, n, d/h)
        for linear, given in (
            (weights.query, x),
            (weights.key, x),
            (weights.value, x if values_of is None else values_of),
        )
    )
    n, d = x.shape[-2:]
    scores = q @ k.mT * score_scale(d, heads, "width")
    if causal:
        scores = scores.masked_fill(~seen_tokens(n), -math.inf)
    p = torch.softmax(scores, dim=-1)
    y = join_heads(p @ v)
    return (y if weights.output is None else apply_linear(weights.output, y)), p


def feed_forward(weights: Weights, x: Tensor) -> Tensor:
    """φ(XW₁ + b₁)W₂ + b₂, φ = ReLU."""
    return apply_linear(weights.contract, apply_linear(weights.expand, x).relu_())


def layer_norm(x: Tensor) -> Tensor:
    """LN without gain and bias, which are 1 and 0 at initialisation."""
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)


def post_norm_block(
    weights: Weights, x: Tensor, *, heads: int, alpha: float = 1.0, values_of: Tensor | None = None
) -> Stations:
    """Algorithm 1: attention and residual, norm, FFN and residual, norm. For `values_of` see `attend`."""
    attended, p = attend(weights, x, heads, values_of=values_of)
    y1 = x + alpha * attended
    y2 = layer_norm(y1)
    y3 = y2 + feed_forward(weights, y2)
    return Stations(x, y1, y2, y3, layer_norm(y3), p)


def input_gradient(weights: Weights, x: Tensor, gradient: Tensor, *, heads: int, tau: Tensor) -> Tensor:
    """The gradient at the block's input, given the one after its de-escalation (`tau` (streams, 1, 1))."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = post_norm_block(weights, x, heads=heads).output
    (found,) = torch.autograd.grad(
        y, x, gradient - tau * gradient.mean(dim=-2, keepdim=True)
    )  # I − τΠ₁ = its transpose
    return found


def feed(attention: Tensor, tokens: TokenMatrix) -> Tensor:
    """ω of every head (eq. 12), (…, h), for P (…, h, n, n) and tokens (…, n, d).

    `measures.omega` in O(hnd): eᵀPΠ⊥X needs P's column means only, not PX.
    """
    columns = attention.double().mean(dim=-2)  # (…, h, n)
    carried = torch.linalg.vector_norm(columns @ tokens.deviations.double(), dim=-1)
    return tokens.count.sqrt().unsqueeze(-1) * carried / tokens.mean_norm.unsqueeze(-1)


# --- siblings of Algorithm 1: pre-norm, without an FFN, causal ----------------------------------------


class PreNorm(NamedTuple):
    """What eq. 19 is made of; (trials, streams, …)."""

    normed: Tensor  # X̂ = LN(X)
    attention: Tensor  # P(X̂) (trials, streams, h, n, n)
    branch: Tensor  # P(X̂)X̂W
    after_attention: Tensor  # Y
    ffn_branch: Tensor  # φ(LN(Y)W₁)W₂
    output: Tensor  # Z


def pre_norm_block(weights: Weights, x: Tensor, *, heads: int) -> PreNorm:
    """Yu & Zhang 2024, eq. 19: norms on the branches, an untouched trunk."""
    normed = layer_norm(x)
    branch, p = attend(weights, normed, heads)
    y = x + branch
    fed = feed_forward(weights, layer_norm(y))
    return PreNorm(normed, p, branch, y, fed, y + fed)


def attention_half(
    weights: Weights, x: Tensor, *, heads: int, alpha: float | Tensor = 1.0, causal: bool = False
) -> Tensor:
    """Steps 1 and 2 of Algorithm 1, LN(X + αP(X)XW); `alpha` may differ between streams, (streams, 1, 1)."""
    attended, _ = attend(weights, x, heads, causal=causal)
    return layer_norm(x + alpha * attended)


def ffn_half(weights: Weights, x: Tensor) -> Tensor:
    """Steps 3 and 4 of Algorithm 1, LN(X + φ(XW₁)W₂)."""
    return layer_norm(x + feed_forward(weights, x))
