"""FeatScale (Wang et al. 2022): the attention branch with its mean and its rest weighed anew, feature by feature.

    Y = SA + s ⊙ DC[SA] + t ⊙ HC[SA], DC[X] = 11ᵀ/n X, HC[X] = X − DC[X], with s, t ∈ R^d per block, 0 at the start.

The formula is followed. Code that was published with the paper adds the two terms twice in one backbone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy
from depthscope.passes.hooks import TokenHook
from depthscope.remedies.deescalation import gain_of
from depthscope.remedies.remedy import Mixing, Remedy, Site, register_remedy
from depthscope.remedies.uniform import UniformAttention, check_mixing, learned, mixing_for, real_only

BRANCH = "attention_branch"


def feat_scaled(branch: Tensor, mean: Tensor, s: Tensor | float, t: Tensor | float) -> Tensor:
    """X + s⊙DC + t⊙(X − DC) for a branch X (…, n, d) with the mean DC (…, 1 or n, d); s, t (d) or numbers → (…, n, d).

    In the dtype of the branch. With s = t = 0 the branch itself, with s = t it is scaled by 1 + s.
    """
    return branch + (s * mean + t * (branch - mean)).to(branch.dtype)


@register_remedy
@dataclass(frozen=True)
class FeatScale(Remedy):
    """Weighs what the attention branch gives to all tokens alike (`s`) and what it gives beyond that (`t`).

    `s` and `t` are where the two start, 0 in the paper. They are trained, one number per feature each (each block gets
    `feat_scale_s` and `feat_scale_t`) unless `learnable=False`, which keeps them. The branch is taken where it is added
    to the trunk: behind a norm of its own, where there is one. `mixing`: "auto" takes the mean of all tokens in
    bidirectional models and of the tokens so far in causal ones ("prefix"); "full" would let a token see later ones
    there, and `allow_leak=True` permits it. Padding neither counts nor changes.
    """

    s: float = 0.0
    t: float = 0.0
    mixing: str = "auto"
    learnable: bool = True

    name: ClassVar[str] = "feat-scale"
    without_leak: ClassVar[str] = "use mixing='auto' or 'prefix'"

    def __post_init__(self) -> None:
        for name in ("s", "t"):
            given = getattr(self, name)
            if isinstance(given, bool) or not math.isfinite(given):
                raise ValueError(f"expected {name} to be a finite number, got {given}")
            object.__setattr__(self, name, float(given))
        if not isinstance(self.learnable, bool):
            raise ValueError(f"expected learnable to be true or false, got {self.learnable!r}")
        check_mixing(self.mixing)
        super().__post_init__()

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """The station that it changes."""
        return (BRANCH,)

    def mixing_in(self, site: Site) -> Mixing:
        return mixing_for(self.mixing, site)

    @property
    def learns(self) -> bool:
        return self.learnable

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
        hook = ScaleFeatures(self, site)
        site.put(self, hook, BRANCH)  # first: taking it down takes the parameters out
        if self.learnable:
            width = gain_of(block).numel()
            for name, start in ((hook.names[0], self.s), (hook.names[1], self.t)):
                block.module.register_parameter(name, learned(block, start, (width,)))


class ScaleFeatures(TokenHook):
    """FeatScale on the attention branch of one block."""

    names = ("feat_scale_s", "feat_scale_t")

    def __init__(self, remedy: FeatScale, site: Site):
        self.remedy = remedy
        self.running, self.owner = site.running, site.block.module
        self.mean = UniformAttention(remedy, remedy.mixing, site, BRANCH)

    def taken_down(self, module: nn.Module) -> None:
        for name in self.names:
            self.owner._parameters.pop(name, None)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: getattr(self.owner, name) for name in self.names} if self.remedy.learnable else {}

    def values_in_force(self) -> dict[str, float | list[float]]:
        s, t = self._weights()
        return {
            "s": s.tolist() if isinstance(s, Tensor) else s,
            "t": t.tolist() if isinstance(t, Tensor) else t,
        }

    def _weights(self) -> tuple[Tensor | float, Tensor | float]:
        if not self.remedy.learnable:
            return self.remedy.s, self.remedy.t
        s, t = (getattr(self.owner, name) for name in self.names)
        return s, t

    def change(self, tokens: Tensor) -> Tensor:
        x = self.running.batch_first(tokens)
        changed = feat_scaled(x, self.mean.of(x), *self._weights())
        return self.running.as_given(real_only(changed, x, self.running), tokens)
