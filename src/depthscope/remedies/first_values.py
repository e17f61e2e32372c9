"""Remedies that bring the values V₁ of the first block back into later ones: NeuTRENO and value residual.

Both are token by token, so that no token sees another one by them. V₁ is kept from the first block of a part to its
last, and no longer: a block that activation checkpointing runs again has to do without, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy
from depthscope.discovery import depth_of
from depthscope.hooks.staying import Hook, hang, hooks_in
from depthscope.hooks.tokens import tokens_at
from depthscope.remedies.remedy import Remedy, Site, register_remedy
from depthscope.remedies.selection import chosen_blocks
from depthscope.remedies.uniform import RealTokensHook, check_number
from depthscope.remedies.values import CONTEXT, VALUES, Cut, by_head, context_of, heads_of, listen_to_values, values_of
from depthscope.safety import ByThread


def neutreno_context(context: Tensor, first: Tensor, own: Tensor, strength: float, heads: int) -> Tensor:
    """C + λ(V₁ − V_l) for context (…, n, h·d_v) and values (…, n, g·d_v) of g heads that each serve h/g heads."""
    change = by_head(first - own, heads, context.shape[-1] // heads).flatten(-2)
    return context + strength * change.to(context.dtype)


def mixed_values(own: Tensor, first: Tensor, share: float) -> Tensor:
    """(1 − μ)V_l + μV₁, both (…, n, g·d_v)."""
    return own + share * (first - own)


@dataclass(frozen=True)
class OfFirstValues(Remedy):
    """Base of the two: hears the values of the first block of a part, and changes later blocks."""

    def first_values(self, site: Site) -> FirstValues:
        """What keeps V₁ of the site's part; hung up once for all blocks of it."""
        for _, hook in hooks_in(site.model):
            if isinstance(hook, FirstValues) and (hook.name, hook.part) == (self.name, site.block.part):
                return hook
        blocks = site.anatomy.of_part(site.block.part)
        if depth_of(site.model, site.anatomy) > len(site.anatomy.blocks):
            raise ValueError(f"the blocks of this model share their weights: {self.name} needs a first one of its own")
        self._require_later_blocks(site)
        spot, cut = values_of(self, blocks[0])
        found = FirstValues(self.name, site.block.part, spot.path, cut)
        hang(spot.module, found, spot.side)
        hang(blocks[-1].module, Forget(found), "out")
        return found

    def _require_later_blocks(self, site: Site) -> None:
        """Refuses a choice of first blocks alone: it would change nothing, in silence."""
        anatomy = site.anatomy
        chosen = chosen_blocks(anatomy, depth_of(site.model, anatomy), self.blocks, self.every)
        if all(block is anatomy.of_part(block.part)[0] for _, block in chosen):
            raise ValueError(
                f"{self.name} brings the values of the first block into later blocks, and only the first was chosen: "
                f"expected blocks= with a later one of the {len(anatomy.blocks)}"
            )


class Kept(ByThread):
    """V₁ of the pass that runs in this thread."""

    found: Tensor | None = None


class FirstValues(Hook):
    """The first block of a part has computed its values: they are kept for the others, as the model lays them out."""

    hears_last = True

    def __init__(self, name: str, part: str, path: Any, cut: Cut | None):
        self.name, self.part, self.path, self.cut = name, part, path, cut
        self.kept = Kept()

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        values = tokens_at(last, self.path)
        assert values is not None
        self.kept.found = values if self.cut is None else self.cut(values)

    def like(self, own: Tensor, block: str) -> Tensor:
        """V₁ for values of this shape; a ValueError where the blocks differ, or V₁ is not there."""
        found = self.kept.found
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
        self.first.kept.found = None


@register_remedy
@dataclass(frozen=True)
class NeuTRENO(OfFirstValues):
    """Adds λ(V₁ − V_l) to what attention makes of the values: A V_l + λ(V₁ − V_l), in block l.

    Nguyen et al. 2023 (arXiv:2312.00751), λ = 0.6 as in the authors' code. The first block is as it was. Blocks must
    show their values and context, and have values of one shape.
    """

    strength: float = 0.6

    name: ClassVar[str] = "neutreno"
    always_shown: ClassVar[tuple[str, ...]] = ("strength",)

    def __post_init__(self) -> None:
        check_number(self, "strength")
        super().__post_init__()

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """It changes what the output projection reads, inside the attention branch."""
        return (CONTEXT,)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        heads, context = heads_of(self, site.block), context_of(self, site.block)
        first = self.first_values(site)
        if not site.is_first:
            site.put_inside(self, AddFirstValues(self, site, first, heads), context, CONTEXT)


class AddFirstValues(RealTokensHook):
    """NeuTRENO on what the output projection of one block reads."""

    remedy: NeuTRENO

    def __init__(self, remedy: NeuTRENO, site: Site, first: FirstValues, heads: int):
        self.remedy, self.running, self.first, self.heads = remedy, site.running, first, heads
        self.values = listen_to_values(remedy, site)

    def values_in_force(self) -> dict[str, float | list[float]]:
        return {"strength": self.remedy.strength}

    def changed(self, tokens: Tensor) -> Tensor:
        own = self.values.taken(tokens.shape[1])
        kept = self.first.kept.found
        first = self.first.like(own, self.block) if kept is None else self.running.batch_first(kept)[:, -own.shape[1] :]
        if first.shape != own.shape:
            self.first.like(own, self.block)  # says so
        return neutreno_context(tokens, first, own, self.remedy.strength, self.heads)


@register_remedy
@dataclass(frozen=True)
class ValueResidual(OfFirstValues):
    """Mixes the values of the first block into those of the others: V_l ← (1 − μ)V_l + μV₁.

    Zhou et al. 2024 (arXiv:2410.17897), μ = 0.5. The first block is as it was; a cache of keys and values holds the
    mixed ones. Blocks must show their values, and have values of one shape.
    """

    share: float = 0.5

    name: ClassVar[str] = "value-residual"
    always_shown: ClassVar[tuple[str, ...]] = ("share",)

    def __post_init__(self) -> None:
        check_number(self, "share")
        super().__post_init__()

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """It changes what the layer of the values returns."""
        return (VALUES,)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        spot, cut = values_of(self, site.block)
        first = self.first_values(site)
        if not site.is_first:
            site.put_inside(self, MixValues(self, first, cut), spot, VALUES)


class MixValues(RealTokensHook):
    """Value residual on what the layer of the values returns, alone or with queries and keys beside them."""

    remedy: ValueResidual

    def __init__(self, remedy: ValueResidual, first: FirstValues, cut: Cut | None):
        self.remedy, self.first, self.cut = remedy, first, cut

    def values_in_force(self) -> dict[str, float | list[float]]:
        return {"share": self.remedy.share}

    def change(self, tokens: Tensor) -> Tensor:
        if self.cut is None:
            return mixed_values(tokens, self.first.like(tokens, self.block), self.remedy.share)
        own = self.cut(tokens)
        mixed = mixed_values(own, self.first.like(own, self.block), self.remedy.share)
        # The columns that the cut takes: it is a choice of columns, and so it is told by their numbers.
        numbers = torch.arange(tokens.shape[-1], device=tokens.device)
        columns = self.cut(numbers.expand(1, 1, -1)).flatten()
        return tokens.index_copy(-1, columns, mixed.reshape(*tokens.shape[:-1], -1))
