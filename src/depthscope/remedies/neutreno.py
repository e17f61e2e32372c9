"""NeuTRENO (Nguyen et al. 2023, arXiv:2312.00751): the values of the first block, added to what attention makes of its
own: A V_l + λ(V₁ − V_l), in block l."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from torch import Tensor

from depthscope.remedies.remedy import Site, register_remedy
from depthscope.remedies.values import FirstValues, OnContext, OnHeads, by_head, first_values


def neutreno_context(context: Tensor, first: Tensor, own: Tensor, strength: float, heads: int) -> Tensor:
    """C + λ(V₁ − V_l) for context (…, n, h·d_v) and values (…, n, g·d_v) of g heads that each serve h/g heads."""
    change = by_head(first - own, heads, context.shape[-1] // heads).flatten(-2)
    return context + strength * change.to(context.dtype)


@register_remedy
@dataclass(frozen=True)
class NeuTRENO(OnContext):
    """Adds λ(V₁ − V_l) to what attention makes of the values, in block l.

    `strength` is λ, 0.6 as in the authors' code. The first block is as it was. Blocks must show their values and
    context, and have values of one shape.
    """

    strength: float = 0.6

    name: ClassVar[str] = "neutreno"
    always_shown: ClassVar[tuple[str, ...]] = ("strength",)
    numbers: ClassVar[Mapping[str, float]] = {"strength": -inf}

    def hook(self, site: Site, heads: int) -> OnHeads | None:
        """What changes the context of this block."""
        first = first_values(self, site)
        return None if site.is_first else AddFirstValues(self, site, heads, first)


class AddFirstValues(OnHeads):
    """NeuTRENO on what the output projection of one block reads."""

    def __init__(self, remedy: NeuTRENO, site: Site, heads: int, first: FirstValues):
        super().__init__(remedy, site, heads)
        self.first = first

    def changed(self, tokens: Tensor) -> Tensor:
        own = self.heard.taken(tokens.shape[1])
        first = self.first.like(own, self.block, self.running)
        return neutreno_context(tokens, first, own, self.remedy.strength, self.heads)
