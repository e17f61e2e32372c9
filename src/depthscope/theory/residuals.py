"""Tokens as X = 1xᵀ + R, both parts carried through a network by themselves. Ours.

A collapse cannot be followed in X: float64 rounds differences of tokens away at 1e-16 of the tokens, float32 at
1e-7, while the theory of Dong et al. 2021 speaks of e, c·e³, c⁴·e⁹, … Here no step subtracts nearly equal numbers,
so R keeps its relative precision down to about 1e-290, where float64 itself ends. The steps are exact; none is an
expansion in R. An error of x of one rounding acts as a change of the input by one rounding: in a network that is
chaotic in x (an MLP of large gain) it grows from layer to layer, and what is followed is a neighbour's residual.

R holds its largest differences to a rounding of themselves, smaller ones to a rounding of the largest. So tokens that
stand in groups, each much narrower than the distance of the groups, lose what tells the tokens of a group apart, and a
next layer in which all rows attend to one group needs it.

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
from depthscope.theory.differences import activation_named


@dataclass(frozen=True)
class SplitTokens:
    """X = 1xᵀ + R. Every step that is not `_uncentred` keeps the mean of R at 0: x is then the mean of the tokens."""

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

    def centred(self) -> SplitTokens:
        """The same tokens with the mean of R at 0."""
        mean = self.residual.mean(dim=-2, keepdim=True)
        return SplitTokens(self.shared + mean.squeeze(-2), self.residual - mean)

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
    """What softmax sees of the tokens, relative to what it sees of one of them, j*: score_ij = common_j + varying_ij.

    Of that token both parts are 0. Softmax drops what is the same in a row, so that any token may be j*.
    """

    common: Tensor  # (…, h, 1, n): the same for every row
    varying: Tensor  # E_ij = r_i W_Q W_Kᵀ(r_j − r_j*)/√d_qk (…, h, n, n): quadratic in R
    apart: Tensor  # r_j − r_j* (…, h, n, d)


def split_scores(tokens: SplitTokens, heads: Heads, *, apart: Tensor | None = None) -> Scores:
    """The scores, from r_j − r_j* (…, h or 1, n, d); without it, relative to the token that the shared one attends to
    most.

    (x + r_i)W_Q·(r_j − r_j*)W_K: tokens that are equal to j* have scores of exactly 0.
    """
    asked = _asked(tokens, heads)
    if apart is None:
        r = tokens.residual.unsqueeze(-3)  # (…, 1, n, d)
        apart = r - r.take_along_dim(_most_attended(tokens, heads), dim=-2)
    keys = apart @ heads.key  # (…, h, n, d_qk)
    scale = 1 / math.sqrt(heads.key.shape[-1])
    varying = scale * (tokens.residual.unsqueeze(-3) @ heads.query) @ keys.mT
    return Scores(scale * asked @ keys.mT, varying, apart)


def _most_attended(tokens: SplitTokens, heads: Heads) -> Tensor:
    """j*, the token of the largest q, (…, h, 1, 1)."""
    return (_asked(tokens, heads) @ (tokens.residual.unsqueeze(-3) @ heads.key).mT).argmax(dim=-1, keepdim=True)


def _asked(tokens: SplitTokens, heads: Heads) -> Tensor:
    """xW_Q + b_Q (…, h, 1, d_qk)."""
    asked = tokens.shared[..., None, None, :] @ heads.query
    return asked if heads.query_bias is None else asked + heads.query_bias.unsqueeze(-2)


def attention_gap(scores: Scores) -> tuple[Tensor, Tensor]:
    """q (…, h, 1, n) and P − 1qᵀ (…, h, n, n), q = softmax(common), without cancellation.

    p_ij − q_j = (u_ij − q_j z_i)/(1 + z_i), u_ij = q_j expm1(E_ij), z_i = Σ_m u_im. The scores are relative to the
    token j* of the largest q: u_ij* = 0, and z_i is a sum over the others, however close q_j* is to 1.

    A row that prefers another token to j* by more than 30 is far from q: there the difference is taken as it is,
    which cannot overflow.
    """
    total = scores.common + scores.varying
    q = torch.softmax(scores.common, dim=-1)
    calm = total.amax(dim=-1, keepdim=True) <= 30  # (…, h, n, 1)
    near = scores.varying <= 1
    small = q * torch.expm1(torch.where(near, scores.varying, 0.0))
    large = torch.exp(torch.where(calm, total, 0.0) - torch.logsumexp(scores.common, dim=-1, keepdim=True)) - q
    u = torch.where(near, small, large)
    z = torch.where(calm, u.sum(dim=-1, keepdim=True), 0.0)
    return q, torch.where(calm, (u - q * z) / (1 + z), torch.softmax(total, dim=-1) - q)


def attend(tokens: SplitTokens, heads: Heads) -> SplitTokens:
    """Σ_h P_h X W_h + 1bᵀ, as `attend_uncentred`, with the mean of the new tokens as their shared part."""
    return attend_uncentred(tokens, heads).centred()


def attend_uncentred(tokens: SplitTokens, heads: Heads, *, apart: Tensor | None = None) -> SplitTokens:
    """x' = Σ_h(x + q_hᵀR)W_h + b, R' = Σ_h(P_h − 1q_hᵀ)RW_h: what the theorems of `theory.collapse` bound.

    The rows of P − 1qᵀ sum to 0, so R may be taken relative to the token of the largest q (`apart`): where all rows
    attend to one token, what is left are the others, small, and not the one twice, large.
    """
    scores = split_scores(tokens, heads, apart=apart)
    q, gap = attention_gap(scores)
    r = tokens.residual.unsqueeze(-3)
    shared = ((tokens.shared[..., None, None, :] + q @ r) @ heads.value).sum(dim=-3).squeeze(-2)
    return SplitTokens(_plus(shared, heads.bias), (gap @ scores.apart @ heads.value).sum(dim=-3))


def attend_causally(tokens: SplitTokens, heads: Heads) -> SplitTokens:
    """The same with a causal mask: P_h X = 1(x + r_1)ᵀ + P_h(R − 1r_1ᵀ), because P1 = 1.

    No q is common to all rows here. They can become equal only by attending to what the first token is, which has
    nothing else to attend to: relative to it, what is left is small.
    """
    r = tokens.residual.unsqueeze(-3)
    scores = split_scores(tokens, heads, apart=r - r[..., :1, :])
    later = torch.ones(scores.varying.shape[-2:], dtype=torch.bool, device=r.device).triu(1)
    p = torch.softmax((scores.common + scores.varying).masked_fill(later, -math.inf), dim=-1)
    first = tokens.shared + tokens.residual[..., 0, :]
    shared = (first[..., None, None, :] @ heads.value).sum(dim=-3).squeeze(-2)
    return SplitTokens(_plus(shared, heads.bias), (p @ scores.apart @ heads.value).sum(dim=-3)).centred()


def normalise(tokens: SplitTokens, *, eps: float = 1e-5) -> SplitTokens:
    """LayerNorm. With a, b_i the centred features of x and r_i, σ² = ‖a‖²/d + ε and σ_i² = σ²(1 + t_i):

    LN(x + r_i) − LN(x) = b_i/σ_i + (a/σ)·expm1(−½ log1p(t_i)), t_i = (2a·b_i + ‖b_i‖²)/(dσ²).

    nan where x has equal features and ε = 0: LN(x) has no meaning there.
    """
    return normalise_uncentred(tokens, eps=eps).centred()


def normalise_uncentred(tokens: SplitTokens, *, eps: float = 1e-5) -> SplitTokens:
    """x' = LN(x), as `normalise` has it."""
    a = tokens.shared - tokens.shared.mean(dim=-1, keepdim=True)  # (…, d)
    b = tokens.residual - tokens.residual.mean(dim=-1, keepdim=True)  # (…, n, d)
    variance = a.square().mean(dim=-1, keepdim=True) + eps  # (…, 1)
    unit = (a / variance.sqrt()).unsqueeze(-2)  # (…, 1, d)
    t = (b * (2 * a.unsqueeze(-2) + b)).mean(dim=-1, keepdim=True) / variance.unsqueeze(-1)  # (…, n, 1)
    # Near t = −1 the token x + r_i itself has equal features: then t is the rounding of a subtraction.
    change = torch.expm1(-0.5 * torch.log1p(t))  # σ/σ_i − 1
    return SplitTokens(unit.squeeze(-2), b / variance.sqrt().unsqueeze(-1) * (1 + change) + unit * change)


class Mlp(NamedTuple):
    """The weights of φ(XW₁ + 1b₁ᵀ)W₂ + 1b₂ᵀ."""

    expand: Tensor  # W₁ (…, d, f)
    contract: Tensor  # W₂ (…, f, d)
    expand_bias: Tensor | None = None  # (…, f)
    contract_bias: Tensor | None = None  # (…, d)
    activation: str = "relu"


def feed_forward(tokens: SplitTokens, mlp: Mlp) -> SplitTokens:
    """φ(XW₁ + 1b₁ᵀ)W₂ + 1b₂ᵀ, with φ(x + r_i) − φ(x) by `theory.differences`."""
    hidden = _activated(tokens, mlp).centred()
    return SplitTokens(*_linear(hidden, mlp.contract, mlp.contract_bias))


def _activated(tokens: SplitTokens, mlp: Mlp) -> SplitTokens:
    phi = activation_named(mlp.activation)
    shared, residual = _linear(tokens, mlp.expand, mlp.expand_bias)
    return SplitTokens(phi.function(shared), phi.difference(shared.unsqueeze(-2), residual))


def _linear(tokens: SplitTokens, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _plus((tokens.shared.unsqueeze(-2) @ weight).squeeze(-2), bias), tokens.residual @ weight


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
