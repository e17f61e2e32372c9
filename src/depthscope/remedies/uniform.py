"""Uniform attention as a remedy sees it: the mean of all real tokens or, in a causal model, of those so far; and what
the remedies share that are relative to it (`AttnScale`, `FeatScale`, `CentredAttention`, `PairNorm`, …).

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

from depthscope.hooks import Pass
from depthscope.hooks.caches import recall, remember
from depthscope.hooks.staying import TokenHook
from depthscope.models.token_means import Full, MeanKind, Prefix, Running, accumulator, uniform_causal
from depthscope.remedies.remedy import Mixing, Remedy, Site, leak, warn_of_the_prefix_mean

MIXINGS = ("auto", "full", "prefix")


class UniformAttention:
    """What uniform attention would make of the tokens at one place of one block, in each call of it.

    `spare_first`: the causal mean of the first token is 0, as in `Prefix`, and not the token itself. `warns`: say that
    the prefix mean is taken where nobody knows whether the model is causal.
    """

    def __init__(
        self, remedy: Remedy, mixing: str, site: Site, place: str, *, spare_first: bool = False, warns: bool = True
    ):
        self.remedy, self.running, self.block, self.place = remedy, site.running, site.block.name, place
        self.key = (self.block, f"{remedy.name}: {place}")  # in a cache; others may stand at the same place
        self.spare_first = spare_first
        self.kind = kind_for(mixing, site)
        if warns and mixing == "auto" and self.kind == "causal" and site.causal is None and site.is_first:
            warn_of_the_prefix_mean(stacklevel=5)

    def of(self, tokens: Tensor) -> Tensor:
        """tokens (batch, n, d) → (batch, 1, d), or (batch, n, d) where it is causal; in float32 or better."""
        now = self.running.now
        if self.kind_of_this_call() == "full":
            return Full().mean(tokens, now.real)
        if now.cache is None:
            return self._causal(tokens, now.real)[0]
        if now.shape is not None and tokens.shape[1] != now.shape[self.running.token_axis]:
            raise ValueError(
                f"{self.block!r} computes the {self.place} of the tokens in its cache anew, so that "
                f"{self.remedy.name} cannot go on from them: call the model, or generate, with use_cache=False"
            )
        before = recall(now.cache, self.key, now.past)
        found, after = self._causal(tokens, now.real, before)
        remember(now.cache, self.key, now.past + tokens.shape[1], after)
        return found

    def _causal(self, tokens: Tensor, real: Tensor | None, before: Running | None = None) -> tuple[Tensor, Running]:
        return (Prefix().running_mean if self.spare_first else uniform_causal)(tokens, real, before)

    def kind_of_this_call(self) -> MeanKind:
        """Which tokens count in the mean."""
        kind: MeanKind = self.kind or ("full" if self.running.now.bidirectional else "causal")
        if kind == "causal":
            self.running.refuse_unknown_past(self.remedy.name)
        elif self.kind is not None and self.running.now.bidirectional is False and not self.remedy.allow_leak:
            raise ValueError(f"mixing='full' with a src_mask or tgt_mask, which may be causal: {leak(self.remedy)}")
        return kind


def kind_for(mixing: str, site: Site) -> MeanKind | None:
    """Which mean a name stands for in a block; None: each call of the block tells."""
    if mixing == "auto":
        return None if site.call_decides else "full" if site.causal is False else "causal"
    return "full" if mixing == "full" else "causal"


def check_number(remedy: Remedy, name: str, above: float = -math.inf) -> None:
    """Keeps an option as a float that JSON can hold; refuses what is no finite number, or not above a bound."""
    given = getattr(remedy, name)
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ValueError(f"expected {name} to be a finite number, got {given!r}")
    if not given > above:
        raise ValueError(f"expected {name} above {above:g}, got {given}")
    object.__setattr__(remedy, name, float(given))


@dataclass(frozen=True)
class RelativeToMean(Remedy):
    """Base of the remedies that compare tokens with the mean of all, or in causal models of those so far."""

    mixing: str = field(default="auto", kw_only=True)

    without_leak: ClassVar[str] = "use mixing='auto' or 'prefix'"

    def __post_init__(self) -> None:
        if self.mixing not in MIXINGS:
            raise ValueError(f"expected mixing='auto', 'full' or 'prefix', got {self.mixing!r}")
        super().__post_init__()

    def mixing_in(self, site: Site) -> Mixing:
        """Where a call decides, a full mean is judged call by call."""
        kind = kind_for(self.mixing, site)
        return "by call" if kind is None or (kind == "full" and site.call_decides) else kind


@dataclass(frozen=True)
class Scaling(RelativeToMean):
    """Base of those that scale what differs from the mean: numbers per block, trained unless `learnable=False`."""

    learnable: bool = field(default=True, kw_only=True)

    numbers: ClassVar[Mapping[str, str]] = {}  # option, which is a start → the parameter of a block
    optional: ClassVar[tuple[str, ...]] = ()  # of these, the options that may be None

    def __post_init__(self) -> None:
        for name in self.numbers:
            if not (name in self.optional and getattr(self, name) is None):
                check_number(self, name)
        if not isinstance(self.learnable, bool):
            raise ValueError(f"expected learnable to be true or false, got {self.learnable!r}")
        super().__post_init__()

    @property
    def learns(self) -> bool:
        return self.learnable


class RealTokensHook(TokenHook):
    """Changes the real tokens at a place; padding keeps its values."""

    running: Pass

    def changed(self, tokens: Tensor) -> Tensor:
        """The new tokens, for tokens (batch, n, d)."""
        raise NotImplementedError

    def change(self, tokens: Tensor) -> Tensor:
        x = self.running.batch_first(tokens)
        changed, real = self.changed(x), self.running.now.real
        if real is not None:
            changed = torch.where(real.unsqueeze(-1), changed, x)
        return self.running.as_given(changed, tokens)


class ScalingHook(RealTokensHook):
    """A scaling remedy at one place of one block. What is trained belongs to the block, and leaves it with the hook.

    `suffix` ends the names of its parameters, where a block has several such places.
    """

    remedy: Scaling

    def __init__(self, remedy: Scaling, site: Site, suffix: str = "", **starts: float):
        self.remedy, self.running, self.owner, self.suffix = remedy, site.running, site.block.module, suffix
        self.starts = {option: starts.get(option, getattr(remedy, option)) for option in remedy.numbers}

    def add_parameters(self, size: int) -> None:
        """One number for each of `size` things; in float32 or better, since a step of training is small."""
        like = next(self.owner.parameters())
        for option, name in self.remedy.numbers.items() if self.remedy.learnable else ():
            start = torch.full((size,), self.starts[option], dtype=accumulator(like), device=like.device)
            self.owner.register_parameter(name + self.suffix, nn.Parameter(start))

    def taken_down(self, module: nn.Module) -> None:
        for name in self.remedy.numbers.values():
            self.owner._parameters.pop(name + self.suffix, None)

    def parameters(self) -> dict[str, nn.Parameter]:
        names = self.remedy.numbers.values() if self.remedy.learnable else ()
        return {name + self.suffix: getattr(self.owner, name + self.suffix) for name in names}

    def in_force(self, option: str) -> Tensor | float:
        """What has been learned, or the number that was given."""
        if not self.remedy.learnable:
            return self.starts[option]
        found: Tensor = getattr(self.owner, self.remedy.numbers[option] + self.suffix)
        return found

    def values_in_force(self) -> dict[str, float | list[float]]:
        values = {option: self.in_force(option) for option in self.remedy.numbers}
        return {option: value.tolist() if isinstance(value, Tensor) else value for option, value in values.items()}
