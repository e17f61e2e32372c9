"""What was measured of each part of a model: an encoder and a decoder, a vision and a text tower."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from depthscope.anatomy import Anatomy
from depthscope.hooks import Visit

if TYPE_CHECKING:
    from depthscope.probing.profile import Profile


class PartSeen:
    """One part, as its blocks ran."""

    def __init__(self, anatomy: Anatomy, visit: Visit):
        block = visit.block
        self.first_block = self.last_block = visit.number
        self.tokens = self.width = self.samples = 0
        self.family = block.family or anatomy.family
        self.placement = block.placement
        self.causal = anatomy.causal if block.causal is None else block.causal
        self.token_axis = anatomy.axis_of(block)

    def see(self, number: int, tokens: Tensor, *, begins: bool) -> None:
        """What enters a block, (batch, n, d); `begins`: the first one of a pass."""
        self.last_block = max(self.last_block, number)
        self.tokens = max(self.tokens, tokens.shape[1])
        if begins:
            self.samples += tokens.shape[0]
            self.width = tokens.shape[2]

    @property
    def blocks(self) -> int:
        return self.last_block - self.first_block + 1

    def to_dict(self) -> dict[str, Any]:
        """For the metadata of a profile."""
        return dict(vars(self))


def most_alike(profile: Profile) -> str:
    """The part whose tokens end up most alike: the one to be judged, and to be helped."""
    measured = profile.names()
    name = next((n for n in ("direction_similarity", "token_similarity") if n in measured), None)
    ends = {part: profile.curve(name, part=part)[-1] if name else math.nan for part in profile.parts}
    return max(ends, key=lambda part: -1.0 if math.isnan(ends[part]) else ends[part])
