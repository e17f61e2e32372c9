"""The values of attention, and the context that it makes of them, as the remedies of attention hear and change them.

What is affine in attention's matrix A needs no n × n matrix: the context A V is what fused attention returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy, Spot
from depthscope.hooks import Pass
from depthscope.hooks.staying import Hook, hang
from depthscope.hooks.tokens import tokens_at
from depthscope.remedies.remedy import Remedy, Site
from depthscope.remedies.uniform import UniformAttention
from depthscope.safety import ByThread

CONTEXT = "context"
VALUES = "values"

Cut = Callable[[Tensor], Tensor]


def values_of(remedy: Remedy, block: BlockAnatomy) -> tuple[Spot, Cut | None]:
    """Where the values can be heard, and how they are cut out of what is heard; refuses a block that hides them."""
    if block.fused_values is not None:
        return block.fused_values.spot, block.fused_values.cut
    if block.values is None:
        raise _hidden(remedy, block)
    return block.values, None


def context_of(remedy: Remedy, block: BlockAnatomy) -> Spot:
    """Where the context can be changed; refuses a block that hides it or its values."""
    values_of(remedy, block)
    if block.context is None:
        raise _hidden(remedy, block)
    return block.context


def heads_of(remedy: Remedy, block: BlockAnatomy) -> int:
    """How many heads there are; refuses a block that does not tell."""
    if block.projections is None:
        raise _hidden(remedy, block)
    return block.projections().value.shape[0]


def _hidden(remedy: Remedy, block: BlockAnatomy) -> ValueError:
    return ValueError(
        f"{block.name!r} ({type(block.module).__name__}) does not show what its attention reads and returns "
        f"for each head: {remedy.name} cannot be put in there; blocks= chooses others"
    )


def by_head(values: Tensor, heads: int, width: int) -> Tensor:
    """Values (…, g·d_v) of g heads that each serve h/g heads → (…, h, d_v)."""
    own = values.unflatten(-1, (-1, width))  # (…, g, d_v)
    return own if own.shape[-2] == heads else own.repeat_interleave(heads // own.shape[-2], dim=-2)


class Kept(ByThread):
    """What was made of the values of the pass that runs in this thread, until its context is there."""

    found: Tensor | None = None


class ValueListener(Hook):
    """The values of a block have been computed: they, or what uniform attention makes of them, are kept."""

    hears_last = True

    def __init__(self, running: Pass, uniform: UniformAttention | None, spot: Spot, cut: Cut | None, name: str):
        self.running, self.uniform, self.path, self.cut, self.name = running, uniform, spot.path, cut, name
        self.kept = Kept()

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        values = tokens_at(last, self.path)
        assert values is not None
        values = self.running.batch_first(values if self.cut is None else self.cut(values))
        self.kept.found = values if self.uniform is None else self.uniform.of(values)

    def taken(self, n: int) -> Tensor:
        """What was kept, once, for the last n tokens: others belong to a memory that attention also reads."""
        found, self.kept.found = self.kept.found, None
        if found is None:
            raise ValueError(
                f"the values of {self.block!r} were not computed in this pass, so that {self.name} does not have them: "
                "start again without a cache"
            )
        return found[:, -n:] if found.shape[1] > n else found


def listen_to_mean(remedy: Remedy, mixing: str, site: Site) -> ValueListener:
    """Hangs up a listener that keeps what uniform attention makes of the values of a block."""
    return _listen(remedy, UniformAttention(remedy, mixing, site, VALUES), site)


def listen_to_values(remedy: Remedy, site: Site) -> ValueListener:
    """Hangs up a listener that keeps the values of a block."""
    return _listen(remedy, None, site)


def _listen(remedy: Remedy, uniform: UniformAttention | None, site: Site) -> ValueListener:
    spot, cut = values_of(remedy, site.block)
    listener = ValueListener(site.running, uniform, spot, cut, remedy.name)
    listener.block = site.block.name
    hang(spot.module, listener, spot.side)
    return listener
