"""PairNorm (Zhao & Akoglu 2020, arXiv:1909.12223): centre the tokens, and keep their spread.

    x̃_i = x_i − mean, y_i = s · x̃_i / √(mean over tokens and features of x̃²)

The paper's own s, over the norms of whole tokens, is s√d here. It is de-escalation with τ = 1 and one rescaling of the
whole token matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from depthscope.models.token_means import Prefix, accumulator
from depthscope.remedies.change import Change
from depthscope.remedies.deescalation import token_mean
from depthscope.remedies.means import MeanAt, OnTrunk, Uniform
from depthscope.remedies.remedy import Site, register_remedy

EPSILON = 1e-6  # under the root, as in the authors' code: tokens that are all equal become 0


def pair_norm(tokens: Tensor, scale: float = 1.0, mask: Tensor | None = None, *, mixing: str = "full") -> Tensor:
    """y = s·(x − mean)/RMS, tokens (…, n, d), mask (…, n) true for real tokens → (…, n, d); padding is unchanged.

    "prefix" is the causal form: token i is centred by the mean of tokens 1 … i and divided by the RMS of the centred
    tokens so far. The first token, which would be its own mean, is not centred. Equal tokens become 0.
    """
    real = None if mask is None else mask.bool()
    wide = tokens.to(accumulator(tokens))
    centred = wide - token_mean(mixing).mean(tokens, real)
    squares = centred.square().mean(dim=-1, keepdim=True)  # (…, n, 1)
    mean = (Uniform() if mixing == "prefix" else token_mean("full")).mean(squares, real)
    changed = rescaled(centred, mean, scale).to(tokens.dtype)
    return changed if real is None else torch.where(real.unsqueeze(-1), changed, tokens)


def rescaled(centred: Tensor, squares: Tensor, scale: float) -> Tensor:
    """Centred tokens (…, n, d) over the root of the mean squares (…, 1 or n, 1), times s."""
    return scale * centred / (squares + EPSILON).sqrt()


@register_remedy
@dataclass(frozen=True)
class PairNorm(OnTrunk):
    """Centres the tokens at a station of the trunk, and brings them to the root mean square `scale`.

    `at`: "input", "after_attention", "ffn_input" or "output". The causal form ("auto" in causal models, "prefix") is
    that of `pair_norm`; "full" would let a token see later ones there, and `allow_leak=True` permits it. Padding
    neither counts nor changes.
    """

    scale: float = 1.0
    at: str = field(default="output", kw_only=True)
    mixing: str = field(default="auto", kw_only=True)

    name: ClassVar[str] = "pair-norm"
    numbers: ClassVar[Mapping[str, float]] = {"scale": 0.0}

    def hook(self, site: Site, station: str) -> NormPairs:
        """What changes the tokens at this station of this block."""
        return NormPairs(self, site, station)


class NormPairs(Change):
    """PairNorm at one station of one block."""

    def __init__(self, remedy: PairNorm, site: Site, station: str):
        super().__init__(remedy, site, MeanAt(remedy, site, station, causal=Prefix()))
        self.squares = MeanAt(remedy, site, f"{station}, squared")

    def changed(self, tokens: Tensor) -> Tensor:
        centred = tokens.to(accumulator(tokens)) - self.mean.of(tokens)
        squares = self.squares.of(centred.square().mean(dim=-1, keepdim=True))
        return rescaled(centred, squares, self.remedy.scale).to(tokens.dtype)
