"""Uniform attention as a remedy sees it: the mean of all real tokens or, in a causal model, of those so far; and what
the remedies share that are relative to it (`AttnScale`, `FeatScale`).

Wang et al. 2022 take attention apart into 11ᵀ/n, which every token gets alike, and the rest. In a causal model the
uniform attention that sees no later token is the lower triangular one with 1/i in row i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from depthscope.models.token_means import Full, MeanKind, accumulator, uniform_causal
from depthscope.passes.caches import recall, remember
from depthscope.passes.hooks import TokenHook
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


def kind_for(mixing: str, site: Site) -> MeanKind | None:
    """Which mean a name stands for in a block; None: each call of the block tells."""
    if mixing == "auto":
        return None if site.call_decides else "full" if site.causal is False else "causal"
    return "full" if mixing == "full" else "causal"


@dataclass(frozen=True)
class Scaling(Remedy):
    """Base of the remedies that scale what differs from uniform attention: numbers per block, trained unless
    `learnable=False`, and the mean that they are relative to."""

    mixing: str = field(default="auto", kw_only=True)
    learnable: bool = field(default=True, kw_only=True)

    numbers: ClassVar[Mapping[str, str]] = {}  # option, which is a start → the parameter of a block
    without_leak: ClassVar[str] = "use mixing='auto' or 'prefix'"

    def __post_init__(self) -> None:
        for name in self.numbers:
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
                raise ValueError(f"expected {name} to be a finite number, got {given!r}")
            object.__setattr__(self, name, float(given))
        if not isinstance(self.learnable, bool):
            raise ValueError(f"expected learnable to be true or false, got {self.learnable!r}")
        if self.mixing not in MIXINGS:
            raise ValueError(f"expected mixing='auto', 'full' or 'prefix', got {self.mixing!r}")
        super().__post_init__()

    def mixing_in(self, site: Site) -> Mixing:
        """Where a call decides, a full mean is judged call by call."""
        kind = kind_for(self.mixing, site)
        return "by call" if kind is None or (kind == "full" and site.call_decides) else kind

    @property
    def learns(self) -> bool:
        return self.learnable


class ScalingHook(TokenHook):
    """A scaling remedy in one block. What is trained belongs to the block, and leaves it with the hook."""

    remedy: Scaling

    def __init__(self, remedy: Scaling, site: Site):
        self.remedy, self.running, self.owner = remedy, site.running, site.block.module

    def add_parameters(self, size: int) -> None:
        """One number for each of `size` things; in float32 or better, since a step of training is small."""
        like = next(self.owner.parameters())
        for option, name in self.remedy.numbers.items() if self.remedy.learnable else ():
            start = torch.full((size,), getattr(self.remedy, option), dtype=accumulator(like), device=like.device)
            self.owner.register_parameter(name, nn.Parameter(start))

    def taken_down(self, module: nn.Module) -> None:
        for name in self.remedy.numbers.values():
            self.owner._parameters.pop(name, None)

    def parameters(self) -> dict[str, nn.Parameter]:
        names = self.remedy.numbers.values() if self.remedy.learnable else ()
        return {name: getattr(self.owner, name) for name in names}

    def in_force(self, option: str) -> Tensor | float:
        """What has been learned, or the number that was given."""
        found = getattr(self.owner, self.remedy.numbers[option]) if self.remedy.learnable else None
        return getattr(self.remedy, option) if found is None else found

    def values_in_force(self) -> dict[str, float | list[float]]:
        values = {option: self.in_force(option) for option in self.remedy.numbers}
        return {option: value.tolist() if isinstance(value, Tensor) else value for option, value in values.items()}

    def scaled(self, tokens: Tensor) -> Tensor:
        """The new tokens, for tokens (batch, n, d)."""
        raise NotImplementedError

    def change(self, tokens: Tensor) -> Tensor:
        x = self.running.batch_first(tokens)
        changed, real = self.scaled(x), self.running.now.real
        if real is not None:  # padding keeps its values
            changed = torch.where(real.unsqueeze(-1), changed, x)
        return self.running.as_given(changed, tokens)
