"""The mean that a remedy compares tokens with: of all real tokens or, in a causal model, of those so far.

Wang et al. 2022 take attention apart into 11ᵀ/n, which every token gets alike, and the rest. In a causal model the
uniform attention that sees no later token is the lower triangular one with 1/i in row i (`Uniform`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.hooks.caches import recall, remember
from depthscope.models.token_means import Full, MeanKind, Prefix, TokenMean
from depthscope.remedies.change import Change
from depthscope.remedies.remedy import Mixing, Remedy, Site, leak
from depthscope.stations import trunk_is_a_sum

MIXINGS = ("auto", "full", "prefix")
STATIONS = ("input", "after_attention", "ffn_input", "output")  # of the trunk, where a remedy can act


@dataclass(frozen=True)
class Uniform(Prefix):
    """What causal attention with equal weights makes of tokens: unlike in `Prefix`, the first is its own mean."""

    def divisor(self, weight: Tensor) -> Tensor:
        return weight

    def _divided(self, total: Tensor, weight: Tensor, inside: Tensor | bool) -> Tensor:
        return total / weight.clamp(min=1)


class RelativeToMean(Remedy):
    """Base of the remedies that compare tokens with a mean. Their field `mixing` says which."""

    mixing: Any

    causal_mean: ClassVar[Prefix] = Uniform()  # what "auto" and "prefix" stand for in a causal model
    without_leak: ClassVar[str] = "use mixing='auto' or 'prefix'"

    def __post_init__(self) -> None:
        self.check_mixing()
        super().__post_init__()

    def check_mixing(self) -> None:
        """Refuses a mean that there is not."""
        if self.mixing not in MIXINGS:
            raise ValueError(f"expected mixing='auto', 'full' or 'prefix', got {self.mixing!r}")

    def mean_in(self, site: Site) -> TokenMean | None:
        """The mean that it takes in a block; None: each call of the block tells."""
        if self.mixing == "auto" and site.call_decides:
            return None
        return Full() if self.mixing == "full" or (self.mixing == "auto" and site.causal is False) else self.causal_mean

    def mixing_in(self, site: Site) -> Mixing:
        """That of its mean. Where a call decides (PyTorch's encoder layers), a full mean is judged call by call."""
        mean = self.mean_in(site)
        return "by call" if mean is None or (mean.kind == "full" and site.call_decides) else mean.kind


class MeanAt:
    """The mean that a remedy takes at one place of one block, in each call of it; a cache carries it on."""

    def __init__(self, remedy: RelativeToMean, site: Site, place: str, causal: Prefix | None = None):
        self.remedy, self.running, self.block, self.place = remedy, site.running, site.block.name, place
        self.key = (self.block, f"{remedy.name}: {place}")  # in a cache; others may stand at the same place
        self.causal = causal or remedy.causal_mean
        found = remedy.mean_in(site)
        self.settled = found if found is None or found.kind == "full" or causal is None else causal

    @property
    def kind(self) -> MeanKind | None:
        """Which tokens count; None: each call tells."""
        return None if self.settled is None else self.settled.kind

    def of_this_call(self) -> TokenMean:
        """The mean itself, or a refusal where it would show tokens that may not be seen, or does not know all."""
        said = self.running.now.bidirectional
        mean = self.settled or (Full() if said else self.causal)
        if mean.kind == "causal":
            self.running.refuse_unknown_past(self.remedy.name)
        elif self.settled is not None and said is False and not self.remedy.allow_leak:
            raise ValueError(f"mixing='full' with a src_mask or tgt_mask, which may be causal: {leak(self.remedy)}")
        return mean

    def of(self, tokens: Tensor) -> Tensor:
        """tokens (batch, n, d) → (batch, 1, d), or (batch, n, d) where it is causal; in float32 or better."""
        return self.of_those(tokens, self.running.now.real)

    def of_those(self, tokens: Tensor, counted: Tensor | None) -> Tensor:
        """The same, with `counted` (batch, n) true for the tokens in the mean."""
        now, mean = self.running.now, self.of_this_call()
        if isinstance(mean, Full) or now.cache is None:
            return mean.mean(tokens, counted)
        if now.shape is not None and tokens.shape[1] != now.size[1]:
            raise ValueError(
                f"{self.block!r} computes the {self.place} of the tokens in its cache anew, so that "
                f"{self.remedy.name} cannot go on from them: call the model, or generate, with use_cache=False"
            )
        before = recall(now.cache, self.key, now.past, now.streams)
        found, after = mean.running_mean(tokens, counted, before)
        remember(now.cache, self.key, now.past + tokens.shape[1], after, now.streams)
        return found


class OnTrunk(RelativeToMean):
    """Base of those that change the tokens at one station of the trunk. Their field `at` names it."""

    at: Any

    always_shown: ClassVar[tuple[str, ...]] = ("at",)

    def __post_init__(self) -> None:
        if self.at not in STATIONS:
            raise ValueError(f"expected at one of {', '.join(STATIONS)}, got {self.at!r}")
        super().__post_init__()

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """The station that it changes."""
        return (_station_for(block, self.at),)

    def install(self, site: Site) -> None:
        """Puts its hook into one block, or refuses."""
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
