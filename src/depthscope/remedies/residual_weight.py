"""A weight on the branches: x + α·F(x) instead of x + F(x).

Beyond about 100 blocks de-escalation alone makes gradients grow with depth; a small α keeps them (order and chaos,
see `recommend`). As a remedy of its own it slows the escalation: ρ = 1 + α²…, but does not stop it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.passes.hooks import TokenHook
from depthscope.remedies.remedy import Remedy, Site, register_remedy
from depthscope.stations import BRANCHES


@register_remedy
@dataclass(frozen=True)
class ResidualWeight(Remedy):
    """Multiplies what attention and FFN add to the trunk by `alpha`, in all blocks or some."""

    alpha: float

    name: ClassVar[str] = "residual-weight"

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not 0 <= self.alpha < float("inf"):
            raise ValueError(f"expected alpha of at least 0, got {self.alpha}")
        super().__post_init__()

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """The stations that it changes."""
        return tuple(branch for branch in BRANCHES if branch in block.spots)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        spots = site.block.spots
        for branch in site.block.branches:
            if branch not in spots:
                raise ValueError(
                    f"{site.block.name!r} does not show its {branch}, so that it cannot be weighted; "
                    f"stations of this block: {', '.join(spots)}{site.unseen}"
                )
        for branch in self.stations_in(site.block):
            site.put(self, Weighted(self.alpha), branch)


class Weighted(TokenHook):
    """One branch, times α."""

    def __init__(self, alpha: float):
        self.alpha = alpha

    def change(self, tokens: Tensor) -> Tensor:
        return self.alpha * tokens
