"""Remedies on the trunk that keep tokens apart: what they share, PairNorm and ContraNorm.

PairNorm (Zhao & Akoglu 2020, arXiv:1909.12223) centres the tokens, and keeps their spread:

    x̃_i = x_i − mean, y_i = s · x̃_i / √(mean over tokens and features of x̃²)

The paper's own s, over the norms of whole tokens, is s√d here. It is de-escalation with τ = 1 and one rescaling of the
whole token matrix.

ContraNorm (Guo et al. 2023, ICLR) pushes each token away from the tokens that point where it points:

    Y = (1 + s)X − s·S X, S = softmax(X̂X̂ᵀ/T), X̂ the tokens over their norms

S X is attention with the tokens as queries, keys and values, so that the fused kernel computes it and S is not formed.
Where tokens are nearly equal, or T is large, S is uniform, and Y is de-escalation with τ = s/(1 + s), times 1 + s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.anatomy import BlockAnatomy
from depthscope.models.attention import seen_tokens
from depthscope.models.token_means import NAMED, Prefix, accumulator
from depthscope.remedies.change import Change, MeanAt, RelativeToMean, Uniform
from depthscope.remedies.remedy import Site, register_remedy
from depthscope.stations import trunk_is_a_sum

STATIONS = ("input", "after_attention", "ffn_input", "output")  # of the trunk, where a remedy can act
EPSILON = 1e-6  # under the root, as in the authors' code: tokens that are all equal become 0


class OnTrunk(RelativeToMean):
    """Base of those that change the tokens at one station of the trunk. Their field `at` names it."""

    at: Any

    always_shown: ClassVar[tuple[str, ...]] = ("at",)

    def __post_init__(self) -> None:
        if self.at not in STATIONS:
            raise ValueError(f"expected at one of {', '.join(STATIONS)}, got {self.at!r}")
        super().__post_init__()

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        return (_station_for(block, self.at),)

    def install(self, site: Site) -> None:
        block, station = site.block, _station_for(site.block, self.at)
        if station not in block.spots:
            seen = ", ".join(s for s in STATIONS if _station_for(block, s) in block.spots)
            what = f"{block.name!r} does not show its {self.at}"
            raise ValueError(f"{what}; stations that can be changed: {seen}{site.unseen}")
        site.put(self, self.hook(site, station), station)

    def hook(self, site: Site, station: str) -> Change:
        """What changes the tokens at this station of this block."""
        return Change(self, site, MeanAt(self, site, station))


def _station_for(block: BlockAnatomy, at: str) -> str:
    """The station of a block that a name stands for. Where no norm stands on the trunk, `ffn_input` is a copy of it,
    normed or not; the trunk there is what the norm is given."""
    if at == "ffn_input" and trunk_is_a_sum(block.placement):
        return "after_cross_attention" if "after_cross_attention" in block.spots else "after_attention"
    return at


def pair_norm(tokens: Tensor, scale: float = 1.0, mask: Tensor | None = None, *, mixing: str = "full") -> Tensor:
    """y = s·(x − mean)/RMS, tokens (…, n, d), mask (…, n) true for real tokens → (…, n, d); padding is unchanged.

    "prefix" is the causal form: token i is centred by the mean of tokens 1 … i and divided by the RMS of the centred
    tokens so far. The first token, which would be its own mean, is not centred. Equal tokens become 0.
    """
    real = None if mask is None else mask.bool()
    wide = tokens.to(accumulator(tokens))
    centred = wide - NAMED[mixing].mean(tokens, real)
    squares = centred.square().mean(dim=-1, keepdim=True)  # (…, n, 1)
    mean = (Uniform() if mixing == "prefix" else NAMED["full"]).mean(squares, real)
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
        return contra_norm(tokens, self.scale, here.running.now.real, temperature=self.temperature, causal=causal)
