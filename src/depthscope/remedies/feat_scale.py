"""FeatScale (Wang et al. 2022): the attention branch with its mean and its rest weighed anew, feature by feature.

    Y = SA + s ⊙ DC[SA] + t ⊙ HC[SA], DC[X] = 11ᵀ/n X, HC[X] = X − DC[X], with s, t ∈ R^d per block, 0 at the start.

The formula is followed. Code that was published with the paper adds the two terms twice in one backbone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.remedies.change import Change
from depthscope.remedies.means import MeanAt, RelativeToMean
from depthscope.remedies.remedy import Site, register_remedy

BRANCH = "attention_branch"


def feat_scaled(branch: Tensor, mean: Tensor, s: Tensor | float, t: Tensor | float) -> Tensor:
    """X + s⊙DC + t⊙(X − DC) for a branch X (…, n, d) with the mean DC (…, 1 or n, d); s, t (d) or numbers → (…, n, d).

    In the dtype of the branch. With s = t = 0 the branch itself, with s = t it is scaled by 1 + s.
    """
    return branch + (s * mean + t * (branch - mean)).to(branch.dtype)


@register_remedy
@dataclass(frozen=True)
class FeatScale(RelativeToMean):
    """Weighs what the attention branch gives to all tokens alike (`s`) and what it gives beyond that (`t`).

    `s` and `t` are where the two start, 0 in the paper. They are trained, one number per feature each (each block gets
    `feat_scale_s` and `feat_scale_t`) unless `learnable=False`, which keeps them. The branch is taken where it is added
    to the trunk: after a norm of its own, where there is one. `mixing`: "auto" takes the mean of all tokens in
    bidirectional models and of the tokens so far in causal ones ("prefix"); "full" would let a token see later ones
    there, and `allow_leak=True` permits it. Padding neither counts nor changes.
    """

    s: float = 0.0
    t: float = 0.0
    mixing: str = field(default="auto", kw_only=True)
    learnable: bool = field(default=True, kw_only=True)

    name: ClassVar[str] = "feat-scale"
    numbers: ClassVar[Mapping[str, float]] = {"s": -inf, "t": -inf}

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """The station that it changes."""
        return (BRANCH,)

    def install(self, site: Site) -> None:
        """Puts its hook into one block, or refuses."""
        block = site.block
        if BRANCH in block.spots and block.attention is None:
            kind = type(block.module).__name__
            raise ValueError(f"{block.name!r} ({kind}) has no attention for feat-scale; blocks= chooses others")
        if BRANCH not in block.spots:
            raise ValueError(
                f"{block.name!r} does not show its {BRANCH}, so that feat-scale cannot be put in; "
                f"stations of this block: {', '.join(block.spots)}{site.unseen}"
            )
        site.put(self, Change(self, site, MeanAt(self, site, BRANCH)), BRANCH)

    def changed(self, branch: Tensor, here: Change) -> Tensor:
        """The formula, for a branch (batch, n, d)."""
        return feat_scaled(branch, here.mean.of(branch), here.in_force("s"), here.in_force("t"))
