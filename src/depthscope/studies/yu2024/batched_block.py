"""Algorithm 1 of Yu & Zhang 2024 for many trials at once, as plain functions of tensors.

Equal to `depthscope.models.Block` (post-norm, scores over √d) with the same weights. Every trial has its own
weights; *streams* of tokens may share them (de-escalated with different τ, say), so tokens are
(trials, streams, n, d).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.measures import TokenMatrix
from depthscope.studies.yu2024.weights import Linear, Weights, generators

NORM_EPS = 1e-5  # nn.LayerNorm's


class Stations(NamedTuple):
    """The five trunk stations, X and Y₁ to Y₄ of Algorithm 1, and the attention; (trials, streams, …)."""

    input: Tensor
    after_attention: Tensor
    ffn_input: Tensor
    after_ffn: Tensor
    output: Tensor
    attention: Tensor  # P (trials, streams, h, n, n)


def apply_linear(linear: Linear, x: Tensor) -> Tensor:
    """Each trial's tokens times its own matrix: (trials, streams, n, in) → (trials, streams, n, out)."""
    rows = x.flatten(1, 2)  # (trials, streams·n, in)
    transposed = linear.weight.mT
    y = rows @ transposed if linear.bias is None else torch.baddbmm(linear.bias, rows, transposed)
    return y.unflatten(1, x.shape[1:3])


def attend(weights: Weights, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """[P₁XW₁ … P_hXW_h]W_O and P, the scores over √d (eq. 2)."""
    q, k, v = (
        apply_linear(linear, x).unflatten(-1, (heads, -1)).transpose(-3, -2)  # (trials, streams, h, n, d/h)
        for linear in (weights.query, weights.key, weights.value)
    )
    p = torch.softmax(q @ k.mT * x.shape[-1] ** -0.5, dim=-1)  # (trials, streams, h, n, n)
    y = (p @ v).transpose(-3, -2).flatten(-2)
    return (y if weights.output is None else apply_linear(weights.output, y)), p


def post_norm_block(weights: Weights, x: Tensor, *, heads: int, alpha: float = 1.0) -> Stations:
    """Algorithm 1: attention and residual, norm, FFN and residual, norm."""
    attended, p = attend(weights, x, heads)
    y1 = x + alpha * attended
    y2 = _norm(y1)
    y3 = y2 + apply_linear(weights.contract, apply_linear(weights.expand, y2).relu_())
    return Stations(x, y1, y2, y3, _norm(y3), p)


def input_gradient(weights: Weights, x: Tensor, gradient: Tensor, *, heads: int, tau: Tensor) -> Tensor:
    """The gradient at the block's input, given the one after its de-escalation (`tau` (streams, 1, 1))."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = post_norm_block(weights, x, heads=heads).output
    (found,) = torch.autograd.grad(
        y, x, gradient - tau * gradient.mean(dim=-2, keepdim=True)
    )  # I − τΠ₁ = its transpose
    return found


def standard_normal_tokens(
    trials: int, streams: int, n: int, d: int, seed: int | tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """X ~ N(0, 1), one per trial, the same for all streams of a trial; (trials, streams, n, d)."""
    (stream,) = generators(seed, 1)
    x = torch.from_numpy(stream.standard_normal((trials, 1, n, d))).to(dtype)
    return x.expand(-1, streams, -1, -1).contiguous()


def feed(attention: Tensor, tokens: TokenMatrix) -> Tensor:
    """ω of every head (eq. 12), (…, h), for P (…, h, n, n) and tokens (…, n, d).

    `measures.omega` in O(hnd): eᵀPΠ⊥X needs P's column means only, not PX.
    """
    columns = attention.double().mean(dim=-2)  # (…, h, n)
    carried = torch.linalg.vector_norm(columns @ tokens.deviations.double(), dim=-1)
    return tokens.count.sqrt().unsqueeze(-1) * carried / tokens.mean_norm.unsqueeze(-1)


def chunks(trials: int, most: int) -> list[int]:
    """Trials in parts of at most `most`, so that the weights of one part fit into memory."""
    return [min(most, trials - start) for start in range(0, trials, most)]


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
