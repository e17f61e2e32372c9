"""Uniform attention as a remedy sees it: the mean of all real tokens or, in a causal model, of those so far.

Wang et al. 2022 take attention apart into 11ᵀ/n, which every token gets alike, and the rest. In a causal model the
uniform attention that sees no later token is the lower triangular one with 1/i in row i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy
from depthscope.models.token_means import Full, MeanKind, accumulator, uniform_causal
from depthscope.passes.caches import recall, remember
from depthscope.passes.running import Pass
from depthscope.remedies.remedy import Mixing, Remedy, Site, leak, warn_of_the_prefix_mean

MIXINGS = ("auto", "full", "prefix")


class UniformAttention:
    """What uniform attention would make of the tokens at one place of one block, in each call of it."""

    def __init__(self, remedy: Remedy, mixing: str, site: Site, place: str):
        self.remedy, self.running, self.place = remedy, site.running, (site.block.name, place)
        self.kind = kind_for(mixing, site)
        if mixing == "auto" and self.kind == "causal" and site.causal is None and site.is_first:
            warn_of_the_prefix_mean(stacklevel=5)

    def of(self, tokens: Tensor) -> Tensor:
        """tokens (batch, n, d) → (batch, 1, d), or (batch, n, d) where it is causal; in float32 or better."""
        now = self.running.now
        if self._kind_of_this_call() == "full":
            return Full().mean(tokens, now.real)
        if now.cache is None:
            return uniform_causal(tokens, now.real)[0]
        if now.shape is not None and tokens.shape[1] != now.shape[self.running.token_axis]:
            raise ValueError(
                f"{self.place[0]!r} computes the {self.place[1]} of the tokens in its cache anew, so that "
                f"{self.remedy.name} cannot go on from them: call the model, or generate, with use_cache=False"
            )
        before = recall(now.cache, self.place, now.past)
        found, after = uniform_causal(tokens, now.real, before)
        remember(now.cache, self.place, now.past + tokens.shape[1], after)
        return found

    def _kind_of_this_call(self) -> MeanKind:
        if self.kind is None:
            return "full" if self.running.now.bidirectional else "causal"
        if self.kind == "full" and self.running.now.bidirectional is False and not self.remedy.allow_leak:
            raise ValueError(f"mixing='full' with a src_mask or tgt_mask, which may be causal: {leak(self.remedy)}")
        return self.kind


def check_mixing(mixing: Any) -> None:
    """Refuses what is no name of a mean over tokens."""
    if mixing not in MIXINGS:
        raise ValueError(f"expected mixing='auto', 'full' or 'prefix', got {mixing!r}")


def kind_for(mixing: str, site: Site) -> MeanKind | None:
    """Which mean a name stands for in a block; None: each call of the block tells."""
    if mixing == "auto":
        return None if site.call_decides else "full" if site.causal is False else "causal"
    return "full" if mixing == "full" else "causal"


def mixing_for(mixing: str, site: Site) -> Mixing:
    """The same in the words of `Remedy.mixing_in`: where a call decides, a full mean is judged call by call."""
    kind = kind_for(mixing, site)
    return "by call" if kind is None or (kind == "full" and site.call_decides) else kind


def real_only(changed: Tensor, tokens: Tensor, running: Pass) -> Tensor:
    """Tokens (batch, n, d) that are changed where they are real: padding keeps its values."""
    real = running.now.real
    return changed if real is None else torch.where(real.unsqueeze(-1), changed, tokens)


def learned(block: BlockAnatomy, start: float, shape: tuple[int, ...]) -> nn.Parameter:
    """A parameter of a remedy, on the device of the block. In float32 or better: a step of training is small."""
    like = next(block.module.parameters())
    return nn.Parameter(torch.full(shape, start, dtype=accumulator(like), device=like.device))
