"""De-escalation (Yu & Zhang 2024, eq. 21): take the mean out of the tokens, Y = (I − τ 11ᵀ/n) X."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy
from depthscope.models.token_means import NAMED, Ema, Full, Prefix, TokenMean
from depthscope.remedies.change import Change, MeanAt
from depthscope.remedies.remedy import Site, register_remedy
from depthscope.remedies.trunk import OnTrunk


def deescalate(
    tokens: Tensor,
    tau: float | Tensor = 1.0,
    mask: Tensor | None = None,
    *,
    mixing: str | TokenMean = "full",
    skip_in_mean: Sequence[int] = (),
    leave_alone: Sequence[int] = (),
) -> Tensor:
    """Y = X − τ·mean(X), the mean over the real tokens of each sequence.

    tokens (…, n, d), mask (…, n) true for real tokens, tau a number or (d) → (…, n, d). With the full mean it
    multiplies the odds t_sim/t_div by (1 − τ)². Padding is returned unchanged, and so is a sequence without
    real tokens; a single token becomes (1 − τ) times itself (with a causal mean it is left alone). The mean is
    accumulated in float32 or better. Tokens in `skip_in_mean` (numbers among the real ones, from 0) do not count
    in it, those in `leave_alone` keep their values. `mixing="full"`, the paper's, lets a position see later
    tokens; "prefix" and "ema", or `Prefix(…)` and `Ema(…)`, do not.
    """
    real = None if mask is None else mask.bool()
    position = None if real is None else real.long().cumsum(dim=-1) - 1
    counted, touched = (_without(chosen, tokens, real, position) for chosen in (skip_in_mean, leave_alone))
    return tokens - _shift(tokens, tau, token_mean(mixing).mean(tokens, counted), touched)


def token_mean(mixing: str | TokenMean) -> TokenMean:
    """The mean that a name stands for."""
    if isinstance(mixing, Full | Prefix | Ema):
        return mixing
    if mixing not in NAMED:
        raise ValueError(f"expected mixing='auto', 'full', 'prefix', 'ema', Prefix(…) or Ema(…), got {mixing!r}")
    return NAMED[mixing]


def _without(chosen: Sequence[int], tokens: Tensor, real: Tensor | None, position: Tensor | None) -> Tensor | None:
    """(…, n) true for real tokens that are not among the chosen; None if that is all."""
    if not chosen:
        return real
    if position is None:
        position = torch.arange(tokens.shape[-2], device=tokens.device).expand(tokens.shape[:-1])
    kept = torch.ones_like(position, dtype=torch.bool) if real is None else real
    for number in chosen:
        kept = kept & (position != number)
    return kept


def _shift(tokens: Tensor, tau: float | Tensor, mean: Tensor, touched: Tensor | None) -> Tensor:
    """τ·mean where it is subtracted, 0 elsewhere."""
    shift = (tau * mean).to(tokens.dtype)
    return shift if touched is None else torch.where(touched.unsqueeze(-1), shift, 0.0)


@dataclass(frozen=True)
class LearnableTau:
    """A τ that is trained: one per block, or one per block and feature, kept in (0, 1) by a sigmoid."""

    start: float = 0.5
    per_feature: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.start < 1:
            raise ValueError(f"expected a learnable τ to start between 0 and 1, both excluded, got {self.start}")


@register_remedy
@dataclass(frozen=True)
class DeEscalate(OnTrunk):
    """Subtracts τ·mean of the tokens at a station of the trunk, in all blocks or some.

    `tau`: a number in [0, 1], or `LearnableTau(…)`; `recommend` measures one.
    τ = 1 is the paper's value and not safe at any depth: beyond about 100 blocks it needs a `ResidualWeight`.
    `at`: "input", "after_attention", "ffn_input" or "output"; always the trunk, since a change of the branch alone
    does nothing. `mixing`: "auto" is the paper's full mean in bidirectional models and the prefix mean in causal
    ones, where the full mean would let a token see later ones; `allow_leak=True` permits it there all the same.
    `blocks` (numbers from 1) or `every` k-th choose blocks. For `skip_in_mean` and `leave_alone` see `deescalate`.
    """

    tau: float | LearnableTau = 1.0
    at: str = "output"
    mixing: str | TokenMean = "auto"
    skip_in_mean: tuple[int, ...] = ()
    leave_alone: tuple[int, ...] = ()

    name: ClassVar[str] = "de-escalation"
    option_types: ClassVar[tuple[type, ...]] = (LearnableTau, Full, Prefix, Ema)
    always_shown: ClassVar[tuple[str, ...]] = ("tau", "at")
    causal_mean: ClassVar[Prefix] = Prefix()
    without_leak: ClassVar[str] = "use mixing='auto', 'prefix' or 'ema'"

    def __post_init__(self) -> None:
        if not isinstance(self.tau, LearnableTau):
            if isinstance(self.tau, str):
                raise ValueError(f"expected tau in [0, 1] or LearnableTau(…), got {self.tau!r}")
            if isinstance(self.tau, bool) or not 0 <= self.tau <= 1:
                raise ValueError(f"expected tau in [0, 1], got {float(self.tau)}")
            object.__setattr__(self, "tau", float(self.tau))  # of numpy or torch too, so that JSON can keep it
        for name in ("skip_in_mean", "leave_alone"):
            chosen = tuple(getattr(self, name))
            if any(not isinstance(number, int) or number < 0 for number in chosen):
                raise ValueError(f"expected {name} to hold numbers of tokens from 0, got {chosen}")
            object.__setattr__(self, name, chosen)
        super().__post_init__()

    def check_mixing(self) -> None:
        if self.mixing != "auto":
            token_mean(self.mixing)

    def mean_in(self, site: Site) -> TokenMean | None:
        return super().mean_in(site) if self.mixing == "auto" else token_mean(self.mixing)

    @property
    def learns(self) -> bool:
        return isinstance(self.tau, LearnableTau)

    def hook(self, site: Site, station: str) -> Change:
        """What changes the tokens at this station of this block; refuses what would leave nothing to pool."""
        complete = self.tau == 1 and isinstance(self.mean_in(site), Full | None)
        is_last = site.block is site.anatomy.of_part(site.block.part)[-1]
        last = self.at == "output" and is_last and not (self.skip_in_mean or self.leave_alone)
        if complete and last and (pooling := _mean_pooling(site.model)):
            raise ValueError(
                f"τ = 1 at the last output makes the mean of the tokens zero for every input, and {pooling} reads "
                "just that mean: use tau below 1, blocks without the last, at='input', or a class token"
            )
        return SubtractMean(self, site, station)


def _mean_pooling(model: nn.Module) -> str | None:
    """What averages the tokens of the last block, where it can be seen."""
    from depthscope.models import VisionTransformer

    for name, module in model.named_modules():
        if isinstance(module, VisionTransformer) and module.class_token is None:
            return "its mean pooling"
        modes = getattr(module, "pooling_mode", ())  # of sentence-transformers: a name, or several; older: a flag each
        modes = (modes,) if isinstance(modes, str) else modes if isinstance(modes, tuple | list) else ()
        if getattr(module, "pooling_mode_mean_tokens", False) is True or "mean" in modes:
            return f"{name or type(module).__name__}, a mean pooling,"
    return None


class SubtractMean(Change):
    """De-escalation at one station of one block; of a τ that is learned, the block has the logit."""

    def __init__(self, remedy: DeEscalate, site: Site, station: str):
        tau: Any = remedy.tau
        start = math.log(tau.start / (1 - tau.start)) if isinstance(tau, LearnableTau) else tau
        super().__init__(remedy, site, MeanAt(remedy, site, station), tau=start)
        self.names = {"tau": f"deescalation_{station}_logit"}

    def shape(self, block: BlockAnatomy) -> tuple[int, ...]:
        return super().shape(block) if self.remedy.tau.per_feature else ()

    def in_force(self, option: str) -> Tensor | float:
        found = super().in_force(option)
        return torch.sigmoid(found) if isinstance(found, Tensor) else found

    def change(self, tokens: Tensor) -> Tensor:
        x, shift = self._mean_of(tokens)
        return self.running.as_given(x - shift, tokens)

    def changed_and_difference(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, shift = self._mean_of(tokens)
        return self.running.as_given(x - shift, tokens), self.running.as_given((-shift).expand_as(x), tokens)

    def _mean_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens (batch, n, d), and τ times their mean, 0 where it is not subtracted."""
        x, now, remedy = self.running.batch_first(tokens), self.running.now, self.remedy
        counted = _without(remedy.skip_in_mean, x, now.real, now.position)
        touched = _without(remedy.leave_alone, x, now.real, now.position)
        return x, _shift(x, self.in_force("tau"), self.mean.of_those(x, counted), touched)
