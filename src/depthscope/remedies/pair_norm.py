"""PairNorm (Zhao & Akoglu 2020, arXiv:1909.12223): centre the tokens, and keep their spread.

    x̃_i = x_i − mean, y_i = s · x̃_i / √(mean over tokens and features of x̃²)

The paper's own s, over the norms of whole tokens, is s√d here. It is de-escalation with τ = 1 and one rescaling of the
whole token matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from depthscope.models.token_means import accumulator, uniform_causal
from depthscope.remedies.deescalation import token_mean
from depthscope.remedies.remedy import Site, register_remedy
from depthscope.remedies.trunk import TrunkRemedy
from depthscope.remedies.uniform import RealTokensHook, UniformAttention, check_number

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
    mean = uniform_causal(squares, real)[0] if mixing == "prefix" else token_mean("full").mean(squares, real)
    changed = rescaled(centred, mean, scale).to(tokens.dtype)
    return changed if real is None else torch.where(real.unsqueeze(-1), changed, tokens)


def rescaled(centred: Tensor, squares: Tensor, scale: float) -> Tensor:
    """Centred tokens (…, n, d) over the root of the mean squares (…, 1 or n, 1), times s."""
    return scale * centred / (squares + EPSILON).sqrt()


@register_remedy
@dataclass(frozen=True)
class PairNorm(TrunkRemedy):
    """Centres the tokens at a station of the trunk, and brings them to the root mean square `scale`.

    `at`: "input", "after_attention", "ffn_input" or "output". The causal form ("auto" in causal models, "prefix") is
    that of `pair_norm`; "full" would let a token see later ones there, and `allow_leak=True` permits it. Padding
    neither counts nor changes.
    """

    scale: float = 1.0

    name: ClassVar[str] = "pair-norm"

    def __post_init__(self) -> None:
        check_number(self, "scale", above=0.0)
        super().__post_init__()

    def hook(self, site: Site, station: str) -> NormPairs:
        """What changes the tokens at this station of this block."""
        return NormPairs(self, site, station)


class NormPairs(RealTokensHook):
    """PairNorm at one station of one block."""

    def __init__(self, remedy: PairNorm, site: Site, station: str):
        self.remedy, self.running = remedy, site.running
        self.mean = UniformAttention(remedy, remedy.mixing, site, station, spare_first=True)
        self.squares = UniformAttention(remedy, remedy.mixing, site, f"{station}, squared", warns=False)

    def values_in_force(self) -> dict[str, float | list[float]]:
        return {"scale": self.remedy.scale}

    def changed(self, tokens: Tensor) -> Tensor:
        centred = tokens.to(accumulator(tokens)) - self.mean.of(tokens)
        squares = self.squares.of(centred.square().mean(dim=-1, keepdim=True))
        return rescaled(centred, squares, self.remedy.scale).to(tokens.dtype)
