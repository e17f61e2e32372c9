"""A weight on the branches: x + α·F(x) instead of x + F(x).

Beyond about 100 blocks de-escalation alone makes gradients grow with depth; a small α keeps them (order and chaos,
see `recommend`). As a remedy of its own it slows the escalation: ρ = 1 + α²…, but does not stop it. Learned, it is
what ReZero (Bachlechner et al. 2020: one α per block for both branches, 0 at the start) and LayerScale (Touvron et al.
2021: one per feature and branch, small at the start) add to a model; the model's own norms stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.remedies.change import Change
from depthscope.remedies.remedy import Remedy, Site, register_remedy
from depthscope.stations import BRANCHES

Learned = Literal["no", "block", "feature"]


@register_remedy
@dataclass(frozen=True)
class ResidualWeight(Remedy):
    """Multiplies what attention and FFN add to the trunk by `alpha`, in all blocks or some.

    `learn="block"` trains one α per block, which its branches share, `learn="feature"` one per feature and branch;
    `alpha` is where it starts. The state_dict of a block gains `residual_weight`, or `residual_weight_attention_branch`
    and so on. At α = 0 a block of a pre-norm model hands on what it is given, and α alone has a gradient.
    """

    alpha: float
    learn: Learned = "no"

    name: ClassVar[str] = "residual-weight"

    def __post_init__(self) -> None:
        is_number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if not is_number or not 0 <= self.alpha < float("inf"):
            raise ValueError(f"expected alpha to be a number of at least 0, got {self.alpha!r}")
        if self.learn not in get_args(Learned):
            raise ValueError(f"expected learn='no', 'block' or 'feature', got {self.learn!r}")
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
            site.put(self, Weighted(self, site, branch), branch)

    @property
    def learns(self) -> bool:
        return self.learn != "no"


def LayerScale(start: float = 1e-4) -> ResidualWeight:
    """LayerScale (Touvron et al. 2021): one trained weight per feature of each branch.

    Args:
        start: where the weights begin.

    Returns:
        A `ResidualWeight` that learns.

    Example:
        >>> import depthscope
        >>> depthscope.LayerScale(0.1).learns
        True
    """
    return ResidualWeight(start, learn="feature")


class Weighted(Change):
    """One branch, times α."""

    def __init__(self, remedy: ResidualWeight, site: Site, branch: str):
        super().__init__(remedy, site, alpha=remedy.alpha)
        self.names = {"alpha": "residual_weight" if remedy.learn == "block" else f"residual_weight_{branch}"}

    def shape(self, block: BlockAnatomy) -> tuple[int, ...]:
        return super().shape(block) if self.remedy.learn == "feature" else ()

    def change(self, tokens: Tensor) -> Tensor:
        return (self.in_force("alpha") * tokens).to(tokens.dtype)
