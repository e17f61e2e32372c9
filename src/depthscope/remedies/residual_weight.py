"""A weight on the branches: x + α·F(x) instead of x + F(x).

Beyond about 100 blocks de-escalation alone makes gradients grow with depth; a small α keeps them (order and chaos,
see `recommend`). As a remedy of its own it slows the escalation: ρ = 1 + α²…, but does not stop it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.passes.hooks import TokenHook, hang
from depthscope.remedies.remedy import Remedy, Site, register_remedy
from depthscope.remedies.selection import check_selection
from depthscope.stations import BRANCHES


@register_remedy
@dataclass(frozen=True)
class ResidualWeight(Remedy):
    """Multiplies what attention and FFN add to the trunk by `alpha`, in all blocks or some."""

    alpha: float
    blocks: tuple[int, ...] | None = None
    every: int = 1

    name: ClassVar[str] = "residual-weight"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"expected alpha of at least 0, got {self.alpha}")
        object.__setattr__(self, "blocks", check_selection(self.blocks, self.every))

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """The stations that it changes."""
        return tuple(branch for branch in BRANCHES if branch in block.spots)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        spots = site.block.spots
        for branch in ("attention_branch", "ffn_branch"):
            if branch not in spots:
                raise ValueError(
                    f"{site.block.name!r} does not show its {branch}, so that it cannot be weighted; "
                    f"stations of this block: {', '.join(spots)}"
                )
        for branch in self.stations_in(site.block):
            hang(spots[branch].module, Weighted(self, site.block.name, branch), "out")


class Weighted(TokenHook):
    """One branch, times α."""

    side = "out"

    def __init__(self, remedy: ResidualWeight, block: str, branch: str):
        self.remedy = remedy
        self.block = block
        self.station = branch

    def change(self, tokens: Tensor) -> Tensor:
        return self.remedy.alpha * tokens
