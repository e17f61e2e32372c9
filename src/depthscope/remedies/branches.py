"""Remedies on the branches: a weight for what they add to the trunk, and MV-Split.

A weight: x + α·F(x) instead of x + F(x). Beyond about 100 blocks de-escalation alone makes gradients grow with depth; a
small α keeps them (order and chaos, see `recommend`). As a remedy of its own it slows the escalation: ρ = 1 + α²…, but
does not stop it. Learned, it is what ReZero (Bachlechner et al. 2020: one α per block for both branches, 0 at the
start) and LayerScale (Touvron et al. 2021: one per feature and branch, small at the start) add to a model; the model's
own norms stay.

MV-Split (arXiv:2605.06169): the mean of a branch and what differs from it have weights of their own.

    X ← norm(X + β ⊙ (I − J)F + α ⊙ J(F − X)), J = 11ᵀ/n, for attention and FFN; β ≈ 1/√L, α = 0 at the start

In the paper the norm is an RMSNorm on the trunk. In a model that exists its own norms stay where they are: what is
changed is the branch, F → β ⊙ (F − JF) + α ⊙ J(F − X). In causal models J is the mean of the tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from torch import Tensor

from depthscope.anatomy import Addition, BlockAnatomy
from depthscope.discovery import depth_of
from depthscope.remedies.change import Change, Listener, MeanAt, RelativeToMean
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
        return tuple(branch for branch in BRANCHES if branch in block.spots)

    def install(self, site: Site) -> None:
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
        return tuple(addition.branch for addition in block.additions)

    def install(self, site: Site) -> None:
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
            mean = MeanAt(remedy, site, f"trunk of {addition.branch}")
            self.trunk = Listener(site, site.block.spots[addition.trunk], mean)

    def changed(self, tokens: Tensor) -> Tensor:
        mean = self.mean.of(tokens)
        trunk = mean if self.trunk is None else self.trunk.take()
        assert trunk is not None
        return split_branch(tokens, mean, trunk, self.in_force("beta"), self.in_force("alpha"))
