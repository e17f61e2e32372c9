"""Tokens as X = 1xᵀ + R, both parts carried through a network by themselves. Ours.

A collapse cannot be followed in X: float64 rounds differences of tokens away at 1e-16 of the tokens, float32 at
1e-7, while the theory of Dong et al. 2021 speaks of e, c·e³, c⁴·e⁹, … Here no step subtracts nearly equal numbers,
so R keeps its relative precision down to about 1e-290, where float64 itself ends. The steps are exact; none is an
expansion in R. An error of x of one rounding acts as a change of the input by one rounding: in a network that is
chaotic in x (an MLP of large gain) it grows from layer to layer, and what is followed is a neighbour's residual.

Below R ≈ 1e-97 the next attention step, which is cubic, leaves the numbers of float64: R becomes 0, and stays 0.

Tokens (…, n, d), weights in the layout x ↦ xW: (…, in, out), with leading axes that broadcast. Use float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures import TokenMatrix
from depthscope.theory.differences import ACTIVATIONS, Activation


@dataclass(frozen=True)
class SplitTokens:
    """X = 1xᵀ + R. Every step but `attend_uncentred` keeps the mean of R at 0, so that x is the mean of the tokens."""

    shared: Tensor  # x (…, d)
    residual: Tensor  # R (…, n, d)

    @classmethod
    def of(cls, tokens: Tensor) -> SplitTokens:
        """The mean and the deviations from it."""
        matrix = TokenMatrix(tokens)
        return cls(matrix.mean.to(tokens.dtype), matrix.deviations)

    @property
    def tokens(self) -> Tensor:
        """X (…, n, d): what is left of the residual after rounding."""
        return self.shared.unsqueeze(-2) + self.residual

    def scaled(self, factor: float | Tensor) -> SplitTokens:
        """1xᵀ + factor·R: the same shared token, other differences."""
        return SplitTokens(self.shared, factor * self.residual)

    def __add__(self, other: SplitTokens) -> SplitTokens:
        """A skip connection: X + F(X)."""
        return SplitTokens(self.shared + other.shared, self.residual + other.residual)


class Heads(NamedTuple):
    """The weights of an attention layer: Σ_h P_h X W_h + 1bᵀ, P_h = softmax((XW_Q + 1b_Qᵀ)(XW_K)ᵀ/√d_qk).

    W_h = W_{V,h}W_{O,h}. A bias of the keys adds the same to all scores of a row: softmax drops it, and so do we.
    """

    query: Tensor  # W_Q (…, h, d, d_qk)
    key: Tensor  # W_K (…, h, d, d_qk)
    value: Tensor  # W_h (…, h, d, d_out)
    query_bias: Tensor | None = None  # b_Q (…, h, d_qk)
    bias: Tensor | None = None  # b (…, d_out)


class Scores(NamedTuple):
    """What softmax sees of the tokens, without what it drops: score_ij = common_j + varying_ij."""

    common: Tensor  # (…, h, 1, n): the same for every row
    varying: Tensor  # E = R W_Q W_Kᵀ Rᵀ/√d_qk (…, h, n, n): quadratic in R


def split_scores(tokens: SplitTokens, heads: Heads) -> Scores:
    """The scores, up to what is the same in a row: (x + r_i)W_Q·(x + r_j)W_K without (x + r_i)W_Q·xW_K."""
    r = tokens.residual.unsqueeze(-3)  # (…, 1, n, d)
    asked = tokens.shared[..., None, None, :] @ heads.query  # (…, h, 1, d_qk)
    if heads.query_bias is not None:
        asked = asked + heads.query_bias.unsqueeze(-2)
    keys = r @ heads.key  # (…, h, n, d_qk)
    scale = 1 / math.sqrt(heads.key.shape[-1])
    return Scores(scale * asked @ keys.mT, scale * (r @ heads.query) @ keys.mT)


def attention_gap(scores: Scores) -> tuple[Tensor, Tensor]:
    """q (…, h, 1, n) and P − 1qᵀ (…, h, n, n), q = softmax(common), without cancellation.

    p_ij − q_j = q_j(expm1(E_ij) − z_i)/(1 + z_i), z_i = Σ_m q_m expm1(E_im). Rows with a score above 1 in size are
    far from q: there the difference is taken as it is, which cannot overflow.
    """
    q = torch.softmax(scores.common, dim=-1)
    small = scores.varying.abs().amax(dim=-1, keepdim=True) <= 1  # (…, h, n, 1)
    rise = torch.expm1(torch.where(small, scores.varying, 0.0))
    z = rise @ q.mT  # (…, h, n, 1)
    plain = torch.softmax(scores.common + scores.varying, dim=-1) - q
    return q, torch.where(small, q * (rise - z) / (1 + z), plain)


def attend(tokens: SplitTokens, heads: Heads) -> SplitTokens:
    """Σ_h P_h X W_h + 1bᵀ, as `attend_uncentred`, with the mean of the new tokens as their shared part."""
    attended = attend_uncentred(tokens, heads)
    return _centred(attended.shared, attended.residual)


def attend_uncentred(tokens: SplitTokens, heads: Heads) -> SplitTokens:
    """x' = Σ_h(x + q_hᵀR)W_h + b, R' = Σ_h(P_h − 1q_hᵀ)RW_h: what the theorems of `theory.collapse` bound."""
    q, gap = attention_gap(split_scores(tokens, heads))
    r = tokens.residual.unsqueeze(-3)
    shared = ((tokens.shared[..., None, None, :] + q @ r) @ heads.value).sum(dim=-3).squeeze(-2)
    return SplitTokens(_plus(shared, heads.bias), (gap @ r @ heads.value).sum(dim=-3))


def attend_causally(tokens: SplitTokens, heads: Heads) -> SplitTokens:
    """The same with a causal mask: R' = Σ_h P_h R W_h, because P1 = 1. No q is common to all rows here."""
    scores = split_scores(tokens, heads)
    later = torch.ones(scores.varying.shape[-2:], dtype=torch.bool, device=scores.varying.device).triu(1)
    p = torch.softmax((scores.common + scores.varying).masked_fill(later, -math.inf), dim=-1)
    shared = (tokens.shared[..., None, None, :] @ heads.value).sum(dim=-3).squeeze(-2)
    return _centred(_plus(shared, heads.bias), (p @ tokens.residual.unsqueeze(-3) @ heads.value).sum(dim=-3))


def normalise(
    tokens: SplitTokens, gain: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> SplitTokens:
    """LayerNorm. With a, b_i the centred features of x and r_i, σ² = ‖a‖²/d + ε and σ_i² = σ²(1 + t_i):

    LN(x + r_i) − LN(x) = b_i/σ_i + (a/σ)·expm1(−½ log1p(t_i)), t_i = (2a·b_i + ‖b_i‖²)/(dσ²).

    nan where x has equal features and ε = 0: LN(x) has no meaning there.
    """
    a = tokens.shared - tokens.shared.mean(dim=-1, keepdim=True)  # (…, d)
    b = tokens.residual - tokens.residual.mean(dim=-1, keepdim=True)  # (…, n, d)
    variance = a.square().mean(dim=-1, keepdim=True) + eps  # (…, 1)
    unit = (a / variance.sqrt()).unsqueeze(-2)  # (…, 1, d)
    t = (b * (2 * a.unsqueeze(-2) + b)).mean(dim=-1, keepdim=True) / variance.unsqueeze(-1)  # (…, n, 1)
    # Near t = −1 the token x + r_i itself has equal features: then t is the rounding of a subtraction.
    change = torch.expm1(-0.5 * torch.log1p(t))  # σ/σ_i − 1
    residual = b / variance.sqrt().unsqueeze(-1) * (1 + change) + unit * change
    shared = unit.squeeze(-2)
    if gain is not None:
        shared, residual = shared * gain, residual * gain.unsqueeze(-2)
    return _centred(_plus(shared, bias), residual)


def linear(tokens: SplitTokens, weight: Tensor, bias: Tensor | None = None) -> SplitTokens:
    """XW + 1bᵀ."""
    shared = (tokens.shared.unsqueeze(-2) @ weight).squeeze(-2)
    return SplitTokens(_plus(shared, bias), tokens.residual @ weight)


def activate(tokens: SplitTokens, activation: str) -> SplitTokens:
    """φ(X) = 1φ(x)ᵀ + (φ(x + r_i) − φ(x)), by `theory.differences`."""
    phi = activation_named(activation)
    return _centred(phi.function(tokens.shared), phi.difference(tokens.shared.unsqueeze(-2), tokens.residual))


def activation_named(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ValueError(f"expected an activation among {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


class Mlp(NamedTuple):
    """The weights of φ(XW₁ + 1b₁ᵀ)W₂ + 1b₂ᵀ."""

    expand: Tensor  # W₁ (…, d, f)
    contract: Tensor  # W₂ (…, f, d)
    expand_bias: Tensor | None = None  # (…, f)
    contract_bias: Tensor | None = None  # (…, d)
    activation: str = "relu"


def feed_forward(tokens: SplitTokens, mlp: Mlp) -> SplitTokens:
    """φ(XW₁ + 1b₁ᵀ)W₂ + 1b₂ᵀ."""
    hidden = activate(linear(tokens, mlp.expand, mlp.expand_bias), mlp.activation)
    return linear(hidden, mlp.contract, mlp.contract_bias)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _centred(shared: Tensor, residual: Tensor) -> SplitTokens:
    mean = residual.mean(dim=-2, keepdim=True)
    return SplitTokens(shared + mean.squeeze(-2), residual - mean)
