"""The values of attention, and the context that it makes of them, as the remedies of attention hear and change them.

What is affine in attention's matrix A needs no n × n matrix: the context A V is what fused attention returns. Two
remedies bring the values V₁ of a part's first block back into later ones, token by token, so that no token sees another
one by them. V₁ is kept to the part's last block, and no longer: a block that activation checkpointing runs again has to
do without, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy, Spot
from depthscope.discovery import depth_of
from depthscope.hooks import Pass
from depthscope.hooks.staying import Hook, hang, hooks_in
from depthscope.remedies.change import Change, Listener
from depthscope.remedies.means import MeanAt, RelativeToMean
from depthscope.remedies.remedy import Remedy, Site

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


def _hidden(remedy: Remedy, block: BlockAnatomy) -> ValueError:
    return ValueError(
        f"{block.name!r} ({type(block.module).__name__}) does not show what its attention reads and returns "
        f"for each head: {remedy.name} cannot be put in there; blocks= chooses others"
    )


def by_head(values: Tensor, heads: int, width: int) -> Tensor:
    """Values (…, g·d_v) of g heads that each serve h/g heads → (…, h, d_v)."""
    own = values.unflatten(-1, (-1, width))  # (…, g, d_v)
    return own if own.shape[-2] == heads else own.repeat_interleave(heads // own.shape[-2], dim=-2)


class OnContext(Remedy):
    """Base of those that change what the output projection reads, inside the attention branch, and need the values."""

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """It is no station of the trunk."""
        return (CONTEXT,)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        block = site.block
        values_of(self, block)
        if block.projections is None or block.context is None:
            raise _hidden(self, block)
        heads = block.projections().value.shape[0]
        if (hook := self.hook(site, heads)) is not None:
            site.put_inside(self, hook, block.context, CONTEXT)

    def hook(self, site: Site, heads: int) -> OnHeads | None:
        """What changes the context of this block, of so many heads; None: nothing does."""
        return OnHeads(self, site, heads)


class OnHeads(Change):
    """Changes the context of one block; `heard` has its values, or what uniform attention makes of them."""

    def __init__(self, remedy: Remedy, site: Site, heads: int):
        super().__init__(remedy, site)
        self.heads = heads
        mean = MeanAt(remedy, site, VALUES) if isinstance(remedy, RelativeToMean) else None
        self.heard = ValueListener(remedy, site, mean)

    def shape(self, block: BlockAnatomy) -> tuple[int, ...]:
        return (self.heads,)


class ValueListener(Listener):
    """The values of a block have been computed."""

    def __init__(self, remedy: Remedy, site: Site, mean: MeanAt | None):
        spot, self.cut = values_of(remedy, site.block)
        super().__init__(spot, mean)
        self.running, self.name = site.running, remedy.name
        self.hang(site, spot)

    def read(self, tokens: Tensor) -> Tensor:
        values = self.running.batch_first(tokens if self.cut is None else self.cut(tokens))
        return values if self.mean is None else self.mean.of(values)

    def taken(self, n: int) -> Tensor:
        """What was kept, once, for the last n tokens: others belong to a memory that attention also reads."""
        found = self.take()
        if found is None:
            raise ValueError(
                f"the values of {self.block!r} were not computed in this pass, so that {self.name} does not have them: "
                "start again without a cache"
            )
        return found[:, -n:] if found.shape[1] > n else found


# --- the values of the first block -----------------------------------------------------------------


class FirstValues(Listener):
    """The first block of a part has computed its values: they are kept for the others, as the model lays them out."""

    def __init__(self, name: str, spot: Spot, cut: Cut | None):
        super().__init__(spot)
        self.name, self.cut = name, cut

    def read(self, tokens: Tensor) -> Tensor:
        return tokens if self.cut is None else self.cut(tokens)

    def like(self, own: Tensor, block: str, running: Pass | None = None) -> Tensor:
        """V₁ for values of this shape, with `running` batch first; a ValueError where the blocks differ, or V₁ is not
        there."""
        found = self.kept.found
        if found is not None and running is not None:
            found = running.batch_first(found)[:, -own.shape[1] :]
        if found is None or found.shape != own.shape:
            why = "are not kept (activation checkpointing)" if found is None else f"are {tuple(found.shape)}"
            raise ValueError(
                f"{self.name}: {block!r} has values {tuple(own.shape)}, and those of the first block {why}"
            )
        return found


class Forget(Hook):
    """The last block has run: V₁ is let go."""

    def __init__(self, first: FirstValues):
        self.first = first

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        self.first.take()


def first_values(remedy: Remedy, site: Site) -> FirstValues:
    """What keeps V₁ of the site's part; hung up once for all blocks of it."""
    for _, hook in hooks_in(site.model):
        if isinstance(hook, FirstValues) and (hook.name, hook.part) == (remedy.name, site.block.part):
            return hook
    anatomy, depth = site.anatomy, depth_of(site.model, site.anatomy)
    if depth > len(anatomy.blocks):
        raise ValueError(f"the blocks of this model share their weights: {remedy.name} needs a first one of its own")
    if all(block is anatomy.of_part(block.part)[0] for _, block in remedy.blocks_of(anatomy, depth)):
        raise ValueError(  # it would change nothing, in silence
            f"{remedy.name} brings the values of the first block into later blocks, and only the first was chosen: "
            f"expected blocks= with a later one of the {len(anatomy.blocks)}"
        )
    blocks = anatomy.of_part(site.block.part)
    spot, cut = values_of(remedy, blocks[0])
    found = FirstValues(remedy.name, spot, cut)
    found.hang(site, spot)
    hang(blocks[-1].module, Forget(found), "out")
    return found
