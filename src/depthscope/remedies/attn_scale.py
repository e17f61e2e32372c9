"""AttnScale (Wang et al. 2022): more weight on what attention does beyond taking the mean.

    Â_h = 11ᵀ/n + (1 + ω_h)(A_h − 11ᵀ/n), with one ω per head and block, 0 at the start.

Â is affine in A, so no n × n matrix is needed: with C_h = A_h V_h, the context that fused attention returns,
Â_h V_h = C_h + ω_h (C_h − 11ᵀ/n V_h), and 11ᵀ/n V_h is the mean of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy, Spot
from depthscope.passes.by_thread import ByThread
from depthscope.passes.hooks import Hook, hang
from depthscope.passes.tokens import tokens_at
from depthscope.remedies.remedy import Site, register_remedy
from depthscope.remedies.uniform import Scaling, ScalingHook, UniformAttention

CONTEXT = "context"


def scaled_context(context: Tensor, uniform: Tensor, omega: Tensor) -> Tensor:
    """C + ω_h (C − U): Â V of every head, from C = A V and U, what uniform attention makes of the values.

    context (…, n, h·d_v), uniform (…, 1 or n, g·d_v) with g heads of values that each serve h/g heads, omega (h)
    → (…, n, h·d_v), in the dtype of the context. With ω = 0 the context itself.
    """
    heads = len(omega)
    width = context.shape[-1] // heads
    own = uniform.unflatten(-1, (-1, width))  # (…, g, d_v)
    if own.shape[-2] != heads:
        own = own.repeat_interleave(heads // own.shape[-2], dim=-2)
    change = omega.unsqueeze(-1) * (context.unflatten(-1, (heads, width)) - own)
    return context + change.flatten(-2).to(context.dtype)


@register_remedy
@dataclass(frozen=True)
class AttnScale(Scaling):
    """Scales attention's difference from uniform attention by 1 + ω, one ω per head and block.

    `omega` is where ω starts, 0 in the paper. It is trained (the state_dict of each block gains `attn_scale_omega`, one
    number per head) unless `learnable=False`, which keeps it. ω > 0 sharpens: tokens get less of what all of them get.
    `mixing`: "auto" compares with 11ᵀ/n in bidirectional models, and in causal ones with the uniform attention over the
    tokens so far ("prefix"); "full" would let a token see later ones there, and `allow_leak=True` permits it. Padding
    neither counts nor changes. Attention that sees only a window is compared with the same uniform attention.
    """

    omega: float = 0.0

    name: ClassVar[str] = "attn-scale"
    always_shown: ClassVar[tuple[str, ...]] = ("omega",)
    numbers: ClassVar[Mapping[str, str]] = {"omega": "attn_scale_omega"}

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """It changes what the output projection reads, inside the attention branch."""
        return (CONTEXT,)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        block = site.block
        spot, cut = _values(block)
        if block.context is None or block.projections is None or spot is None:
            raise ValueError(
                f"{block.name!r} ({type(block.module).__name__}) does not show what its attention reads and returns "
                "for each head: attn-scale cannot be put in there; blocks= chooses others"
            )
        uniform = UniformAttention(self, self.mixing, site, "values")
        listener = ValueListener(uniform, spot, cut)
        listener.block = block.name
        hang(spot.module, listener, spot.side)
        heads = block.projections().value.shape[0]
        hook = ScaleContext(self, site, listener, heads)
        site.put_inside(self, hook, block.context, CONTEXT)  # first: taking it down takes the parameters out
        hook.add_parameters(heads)


def _values(block: BlockAnatomy) -> tuple[Spot | None, Callable[[Tensor], Tensor] | None]:
    """Where the values can be heard, and how they are cut out of what is heard."""
    if block.fused_values is not None:
        return block.fused_values.spot, block.fused_values.cut
    return block.values, None


class Kept(ByThread):
    """What uniform attention makes of the values of the pass that runs in this thread, until its context is there."""

    found: Tensor | None = None


class ValueListener(Hook):
    """The values of a block have been computed: what uniform attention makes of them is kept for its context."""

    def __init__(self, uniform: UniformAttention, spot: Spot, cut: Callable[[Tensor], Tensor] | None):
        self.uniform, self.path, self.cut = uniform, spot.path, cut
        self.kept = Kept()

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        values = tokens_at(last, self.path)
        assert values is not None
        values = values if self.cut is None else self.cut(values)
        self.kept.found = self.uniform.of(self.uniform.running.batch_first(values))

    def taken(self) -> Tensor:
        """What was kept, once."""
        found, self.kept.found = self.kept.found, None
        if found is None:
            raise ValueError(
                f"the values of {self.block!r} were not computed in this pass, so that attn-scale has no mean of them: "
                "start again without a cache"
            )
        return found


class ScaleContext(ScalingHook):
    """AttnScale on what the output projection of one block reads."""

    def __init__(self, remedy: AttnScale, site: Site, values: ValueListener, heads: int):
        super().__init__(remedy, site)
        self.values, self.heads = values, heads

    def changed(self, tokens: Tensor) -> Tensor:
        uniform = self.values.taken()
        if uniform.shape[1] > tokens.shape[1]:
            uniform = uniform[:, -tokens.shape[1] :]  # the first ones belong to a memory that attention also reads
        omega = self.in_force("omega")
        return scaled_context(
            tokens, uniform, omega if isinstance(omega, Tensor) else uniform.new_full((self.heads,), omega)
        )
