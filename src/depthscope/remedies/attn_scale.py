"""AttnScale (Wang et al. 2022): more weight on what attention does beyond taking the mean.

    Â_h = 11ᵀ/n + (1 + ω_h)(A_h − 11ᵀ/n), with one ω per head and block, 0 at the start.

Â is affine in A, so no n × n matrix is needed: with C_h = A_h V_h, the context that fused attention returns,
Â_h V_h = C_h + ω_h (C_h − 11ᵀ/n V_h), and 11ᵀ/n V_h is the mean of the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.remedies.change import Change, Listener, MeanAt, RelativeToMean
from depthscope.remedies.remedy import Site, register_remedy

CONTEXT = "context"


def scaled_context(context: Tensor, uniform: Tensor, omega: Tensor) -> Tensor:
    """C + ω_h (C − U): Â V of every head, from C = A V and U, what uniform attention makes of the values.

    context (…, n, h·d_v), uniform (…, 1 or n, g·d_v) with g heads of values that each serve h/g heads, omega (h)
    → (…, n, h·d_v), in the dtype of the context. With ω = 0 the context itself.
    """
    heads = len(omega)
    width = context.shape[-1] // heads
    by_head = uniform.unflatten(-1, (-1, width))  # (…, g, d_v)
    by_head = by_head.repeat_interleave(heads // by_head.shape[-2], dim=-2)  # (…, h, d_v)
    change = omega.unsqueeze(-1) * (context.unflatten(-1, (heads, width)) - by_head)
    return context + change.flatten(-2).to(context.dtype)


@register_remedy
@dataclass(frozen=True)
class AttnScale(RelativeToMean):
    """Scales attention's difference from uniform attention by 1 + ω, one ω per head and block.

    `omega` is where ω starts, 0 in the paper. It is trained (the state_dict of each block gains `attn_scale_omega`, one
    number per head) unless `learnable=False`, which keeps it. ω > 0 sharpens: tokens get less of what all of them get.
    `mixing`: "auto" compares with 11ᵀ/n in bidirectional models, and in causal ones with the uniform attention over the
    tokens so far ("prefix"); "full" would let a token see later ones there, and `allow_leak=True` permits it. Padding
    neither counts nor changes. Attention that sees only a window is compared with the same uniform attention.
    """

    omega: float = 0.0
    mixing: str = field(default="auto", kw_only=True)
    learnable: bool = field(default=True, kw_only=True)

    name: ClassVar[str] = "attn-scale"
    always_shown: ClassVar[tuple[str, ...]] = ("omega",)
    numbers: ClassVar[Mapping[str, float]] = {"omega": -inf}

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """What the output projection reads, inside the attention branch: no station of the trunk."""
        return (CONTEXT,)

    def install(self, site: Site) -> None:
        block, fused = site.block, site.block.fused_values
        values = block.values if fused is None else fused.spot
        if values is None or block.projections is None or block.context is None:
            raise ValueError(
                f"{block.name!r} ({type(block.module).__name__}) does not show what its attention reads and returns "
                f"for each head: {self.name} cannot be put in there; blocks= chooses others"
            )
        mean = Listener(site, values, MeanAt(self, site, "values"), None if fused is None else fused.cut)
        hook = ScaleContext(self, site, mean, block.projections().value.shape[0])
        site.put_inside(self, hook, block.context, CONTEXT)


class ScaleContext(Change):
    """AttnScale on the context of one block; `heard` has what uniform attention makes of its values."""

    def __init__(self, remedy: AttnScale, site: Site, heard: Listener, heads: int):
        super().__init__(remedy, site)
        self.heard, self.heads = heard, heads

    def shape(self, block: BlockAnatomy) -> tuple[int, ...]:
        return (self.heads,)

    def changed(self, tokens: Tensor) -> Tensor:
        uniform, omega, n = self.heard.take(), self.in_force("omega"), tokens.shape[1]
        if uniform is None:
            raise ValueError(
                f"the values of {self.block!r} were not computed in this pass, so that {self.remedy.name} does not "
                "have them: start again without a cache"
            )
        omega = omega if isinstance(omega, Tensor) else uniform.new_full((self.heads,), omega)
        return scaled_context(tokens, uniform[:, -n:], omega)  # earlier values are of a memory that attention reads
