"""MV-Split (arXiv:2605.06169): the mean of a branch and what differs from it have weights of their own.

    X ← norm(X + β ⊙ (I − J)F + α ⊙ J(F − X)), J = 11ᵀ/n, for attention and FFN; β ≈ 1/√L, α = 0 at the start

In the paper the norm is an RMSNorm on the trunk. In a model that exists its own norms stay where they are: what is
changed is the branch, F → β ⊙ (F − JF) + α ⊙ J(F − X). In causal models J is the mean of the tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from depthscope.anatomy import Addition, BlockAnatomy
from depthscope.discovery import depth_of
from depthscope.remedies.change import Change, Listener
from depthscope.remedies.means import MeanAt, RelativeToMean
from depthscope.remedies.remedy import Site, register_remedy


def split_branch(
    branch: Tensor, mean: Tensor, trunk_mean: Tensor, beta: Tensor | float, alpha: Tensor | float
) -> Tensor:
    """β ⊙ (F − JF) + α ⊙ (JF − JX) for a branch F (…, n, d), JF and JX (…, 1 or n, d), β and α (d) or numbers.

    In the dtype of the branch. With β = α = 1 the trunk gets F − JX: its mean becomes that of the branch.
    """
    return (beta * (branch - mean) + alpha * (mean - trunk_mean)).to(branch.dtype)


@register_remedy
@dataclass(frozen=True)
class MVSplit(RelativeToMean):
    """Weighs what a branch gives to all tokens alike (`alpha`, and how much of the trunk's mean leaves), and the rest
    (`beta`).

    `beta` is 1/√L unless it is given, with L the blocks of the part; `alpha` is 0, so that no branch moves the mean.
    Both are where one number per feature starts, for each branch (`mv_split_beta_attention_branch`, …), unless
    `learnable=False`, which keeps them. `mixing`: "auto" takes the mean of all tokens in bidirectional models and of
    the tokens so far in causal ones ("prefix"); "full" would let a token see later ones there, and `allow_leak=True`
    permits it. Padding neither counts nor changes. Blocks with parallel branches have no trunk between the two, for
    which the formula is made, and are refused.
    """

    beta: float | None = None
    alpha: float = 0.0
    mixing: str = field(default="auto", kw_only=True)
    learnable: bool = field(default=True, kw_only=True)

    name: ClassVar[str] = "mv-split"
    numbers: ClassVar[Mapping[str, float]] = {"beta": -math.inf, "alpha": -math.inf}

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """The branches that it changes."""
        return tuple(addition.branch for addition in block.additions)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        block = site.block
        shown = {addition.branch for addition in block.additions if addition.beside is None}
        if hidden := [branch for branch in block.branches if branch not in shown]:
            raise ValueError(
                f"{block.name!r} does not show trunk and branch of its {', '.join(hidden)} one after the other, so "
                f"that mv-split cannot be put in; stations of this block: {', '.join(block.spots)}{site.unseen}"
            )
        if any(block.spots[addition.trunk].added_to is not None for addition in block.additions):
            raise ValueError(f"the additions of {block.name!r} stand outside its module: mv-split cannot be put in")
        blocks = len(site.anatomy.of_part(block.part))
        depth = max(blocks, depth_of(site.model, site.anatomy)) if len(site.anatomy.parts) == 1 else blocks
        beta = 1 / math.sqrt(depth) if self.beta is None else self.beta
        for addition in block.additions:
            site.put(self, SplitBranch(self, site, addition, beta), addition.branch)


class SplitBranch(Change):
    """MV-Split on one branch of one block."""

    def __init__(self, remedy: MVSplit, site: Site, addition: Addition, beta: float):
        super().__init__(remedy, site, MeanAt(remedy, site, addition.branch), f"_{addition.branch}", beta=beta)
        self.trunk: Listener | None = None  # without α nothing of the trunk is needed
        if remedy.learns or remedy.alpha:
            spot = site.block.spots[addition.trunk]
            self.trunk = Listener(spot, MeanAt(remedy, site, f"trunk of {addition.branch}"))
            self.trunk.hang(site, spot)

    def changed(self, tokens: Tensor) -> Tensor:
        mean = self.mean.of(tokens)
        trunk = mean if self.trunk is None else self.trunk.take()
        assert trunk is not None
        return split_branch(tokens, mean, trunk, self.in_force("beta"), self.in_force("alpha"))
