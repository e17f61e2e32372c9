"""Value residual (Zhou et al. 2024, arXiv:2410.17897): the first block's values, mixed into those of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.remedies.change import Change
from depthscope.remedies.remedy import Remedy, Site, register_remedy
from depthscope.remedies.values import VALUES, Cut, FirstValues, first_values, values_of


def mixed_values(own: Tensor, first: Tensor, share: float) -> Tensor:
    """(1 − μ)V_l + μV₁, both (…, n, g·d_v)."""
    return own + share * (first - own)


@register_remedy
@dataclass(frozen=True)
class ValueResidual(Remedy):
    """V_l ← (1 − μ)V_l + μV₁, in block l.

    `share` is μ, 0.5 in the paper. The first block is as it was; a cache of keys and values holds the mixed ones.
    Blocks must show their values, and have values of one shape.
    """

    share: float = 0.5

    name: ClassVar[str] = "value-residual"
    always_shown: ClassVar[tuple[str, ...]] = ("share",)
    numbers: ClassVar[Mapping[str, float]] = {"share": -inf}

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """It changes what the layer of the values returns."""
        return (VALUES,)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        spot, cut = values_of(self, site.block)
        first = first_values(self, site)
        if not site.is_first:
            site.put_inside(self, MixValues(self, site, first, cut), spot, VALUES)


class MixValues(Change):
    """Value residual on what the layer of the values returns, alone or with queries and keys beside them."""

    def __init__(self, remedy: ValueResidual, site: Site, first: FirstValues, cut: Cut | None):
        super().__init__(remedy, site)
        self.first, self.cut = first, cut

    def change(self, tokens: Tensor) -> Tensor:
        own = tokens if self.cut is None else self.cut(tokens)
        mixed = mixed_values(own, self.first.like(own, self.block), self.remedy.share)
        if self.cut is None:
            return mixed
        # The columns that the cut takes: it is a choice of columns, and so it is told by their numbers.
        numbers = torch.arange(tokens.shape[-1], device=tokens.device)
        columns = self.cut(numbers.expand(1, 1, -1)).flatten()
        return tokens.index_copy(-1, columns, mixed.reshape(*tokens.shape[:-1], -1))
