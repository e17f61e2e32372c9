"""De-escalation (Yu & Zhang 2024, eq. 21): take the mean out of the tokens, Y = (I − τ 11ᵀ/n) X."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy
from depthscope.hooks.caches import recall, remember
from depthscope.hooks.staying import TokenHook
from depthscope.models.mean_subtraction import without_mean
from depthscope.models.token_means import NAMED, Ema, Full, Prefix, TokenMean
from depthscope.remedies.remedy import Mixing, Remedy, Site, leak, register_remedy, warn_of_the_prefix_mean
from depthscope.remedies.trunk import check_station, shown_station, station_for

if TYPE_CHECKING:
    from depthscope.remedies.recommendation import Recommendation


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
    return _changed(tokens, tau, token_mean(mixing), counted, touched)


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


def _changed(
    tokens: Tensor, tau: float | Tensor, mean: TokenMean, counted: Tensor | None, touched: Tensor | None
) -> Tensor:
    """tokens − τ·mean where it is subtracted."""
    if counted is None and touched is None and not isinstance(tau, Tensor):
        return without_mean(tokens, tau, mean)
    return tokens - _shift(tokens, tau, mean.mean(tokens, counted), touched)


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

    def parameter(self, like: Tensor) -> nn.Parameter:
        """The logit of τ. In float32 or better: a step of training is small."""
        logit = math.log(self.start / (1 - self.start))
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        shape = (like.shape[-1],) if self.per_feature else ()
        return nn.Parameter(torch.full(shape, logit, dtype=dtype, device=like.device))


@register_remedy
@dataclass(frozen=True)
class DeEscalate(Remedy):
    """Subtracts τ·mean of the tokens at a station of the trunk, in all blocks or some.

    `tau`: a number in [0, 1], `LearnableTau(…)`, or "recommended" (measured on the inputs given to `apply`).
    τ = 1 is the paper's value and not safe at any depth: beyond about 100 blocks it needs a `ResidualWeight`.
    `at`: "input", "after_attention", "ffn_input" or "output"; always the trunk, since a change of the branch alone
    does nothing. `mixing`: "auto" is the paper's full mean in bidirectional models and the prefix mean in causal
    ones, where the full mean would let a token see later ones; `allow_leak=True` permits it there all the same.
    `blocks` (numbers from 1) or `every` k-th choose blocks. For `skip_in_mean` and `leave_alone` see `deescalate`.
    """

    tau: float | LearnableTau | Literal["recommended"] = 1.0
    at: str = "output"
    mixing: str | TokenMean = "auto"
    skip_in_mean: tuple[int, ...] = ()
    leave_alone: tuple[int, ...] = ()

    name: ClassVar[str] = "de-escalation"
    option_types: ClassVar[tuple[type, ...]] = (LearnableTau, Full, Prefix, Ema)
    always_shown: ClassVar[tuple[str, ...]] = ("tau", "at")
    without_leak: ClassVar[str] = "use mixing='auto', 'prefix' or 'ema'"

    def __post_init__(self) -> None:
        if isinstance(self.tau, str) and self.tau != "recommended":
            raise ValueError(f"expected tau in [0, 1], LearnableTau(…) or 'recommended', got {self.tau!r}")
        if isinstance(self.tau, bool):
            raise ValueError(f"expected tau in [0, 1], got {self.tau}")
        if not isinstance(self.tau, str | LearnableTau):
            object.__setattr__(self, "tau", float(self.tau))  # of numpy or torch too, so that JSON can keep it
            if not 0 <= self.tau <= 1:  # type: ignore[operator]
                raise ValueError(f"expected tau in [0, 1], got {self.tau}")
        check_station(self.at)
        if self.mixing != "auto":
            token_mean(self.mixing)
        for name in ("skip_in_mean", "leave_alone"):
            chosen = tuple(getattr(self, name))
            if any(not isinstance(number, int) or number < 0 for number in chosen):
                raise ValueError(f"expected {name} to hold numbers of tokens from 0, got {chosen}")
            object.__setattr__(self, name, chosen)
        super().__post_init__()

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """The stations that it changes."""
        return (self.station_in(block),)

    def install(self, site: Site) -> None:
        """Puts its hooks into one block, or refuses."""
        station = shown_station(site, self.at)
        mean = self._mean(site)
        if self.mixing == "auto" and mean is not None and site.causal is None and site.is_first:
            warn_of_the_prefix_mean(stacklevel=4)
        self._refuse_mean_pooling(site, mean)
        hook = SubtractMean(self, site, station, mean)
        site.put(self, hook, station)  # first: taking it down takes the parameter out
        if isinstance(self.tau, LearnableTau):
            site.block.module.register_parameter(hook.parameter_name, self.tau.parameter(gain_of(site.block)))

    def station_in(self, block: BlockAnatomy) -> str:
        """Where it acts in a block."""
        return station_for(block, self.at)

    def mixing_in(self, site: Site) -> Mixing:
        """That of its mean. Where a call decides (PyTorch's encoder layers), a full mean is judged call by call."""
        mean = self._mean(site)
        if mean is None or (mean.kind == "full" and site.call_decides):
            return "by call"
        return mean.kind

    @property
    def learns(self) -> bool:
        return isinstance(self.tau, LearnableTau)

    def settled(self, measure: Callable[..., Recommendation], beside: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
        """With the recommended τ, and with the weight of the branches that goes with it unless one is given."""
        if self.tau != "recommended":
            return (self,)
        found = measure(
            at=self.at, mixing=self.mixing, weigh_branches=all(other.name != "residual-weight" for other in beside)
        )
        others = tuple(remedy for remedy in found.remedies if not isinstance(remedy, DeEscalate))
        spared = next((remedy.leave_alone for remedy in found.remedies if isinstance(remedy, DeEscalate)), ())
        settled = replace(
            self,
            tau=found.tau or 0.0,
            blocks=next((remedy.blocks for remedy in found.remedies), None)
            if self.every == 1 and self.blocks is None
            else self.blocks,
            skip_in_mean=self.skip_in_mean or spared,
            leave_alone=self.leave_alone or spared,
        )
        return (settled, *others)

    def _mean(self, site: Site) -> TokenMean | None:
        """The mean to use; None: each call of the block tells."""
        if self.mixing != "auto":
            return token_mean(self.mixing)
        if site.call_decides:
            return None
        return NAMED["full" if site.causal is False else "prefix"]

    def _refuse_mean_pooling(self, site: Site, mean: TokenMean | None) -> None:
        complete = self.tau == 1 and isinstance(mean, Full | None) and not (self.skip_in_mean or self.leave_alone)
        if complete and self.at == "output" and site.is_last and (pooling := _mean_pooling(site.model)):
            raise ValueError(
                f"τ = 1 at the last output makes the mean of the tokens zero for every input, and {pooling} reads "
                "just that mean: use tau below 1, blocks without the last, at='input', or a class token"
            )


def _mean_pooling(model: nn.Module) -> str | None:
    """What averages the tokens of the last block, where it can be seen."""
    from depthscope.models import VisionTransformer

    for name, module in model.named_modules():
        if isinstance(module, VisionTransformer) and module.class_token is None:
            return "its mean pooling"
        if getattr(module, "pooling_mode_mean_tokens", False) is True or "mean" in _modes(module):
            return f"{name or type(module).__name__}, a mean pooling,"
    return None


def _modes(module: nn.Module) -> tuple[str, ...]:
    """How a pooling of sentence-transformers pools: one name, or several; older ones have a flag for each."""
    modes = getattr(module, "pooling_mode", ())
    return (modes,) if isinstance(modes, str) else tuple(modes) if isinstance(modes, tuple | list) else ()


def gain_of(block: BlockAnatomy) -> Tensor:
    """The gain of a norm: as wide as a token, on the block's device."""
    inside = [module for module in block.module.modules() if "norm" in type(module).__name__.lower()]
    known, others = (
        [weight for norm in norms if isinstance(weight := getattr(norm, "weight", None), Tensor) and weight.ndim == 1]
        for norms in (block.norms, inside)
    )
    gains = known or others  # an FFN may have a norm of its own, which is wider
    if not gains and block.projections is not None:
        return block.projections().value.detach()[0, :, 0]  # no norms, as in ReZero: as wide as what W_V reads
    if not gains:
        raise ValueError(f"what is learned needs the width of a token, and {block.name!r} has no norm that shows it")
    return max(gains, key=Tensor.numel)  # norms of queries and keys are as narrow as a head


class SubtractMean(TokenHook):
    """De-escalation at one station of one block."""

    def __init__(self, remedy: DeEscalate, site: Site, station: str, mean: TokenMean | None):
        self.remedy = remedy
        self.station = station
        self.mean = mean
        self.running = site.running
        self.owner = site.block.module

    def taken_down(self, module: nn.Module) -> None:
        self.owner._parameters.pop(self.parameter_name, None)

    @property
    def parameter_name(self) -> str:
        return f"deescalation_{self.station}_logit"

    def parameters(self) -> dict[str, nn.Parameter]:
        return {self.parameter_name: getattr(self.owner, self.parameter_name)} if self.remedy.learns else {}

    def values_in_force(self) -> dict[str, float | list[float]]:
        tau = self.tau()
        return {"tau": tau.tolist() if isinstance(tau, Tensor) else tau}

    def tau(self) -> float | Tensor:
        """The τ in force."""
        if isinstance(self.remedy.tau, LearnableTau):
            return torch.sigmoid(getattr(self.owner, self.parameter_name))
        return self.remedy.tau

    def change(self, tokens: Tensor) -> Tensor:
        x = self.running.batch_first(tokens)
        return self.running.as_given(self._changed(x), tokens)

    def changed_and_difference(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.running.batch_first(tokens)
        shift = self._shift(x)
        return self.running.as_given(x - shift, tokens), self.running.as_given((-shift).expand_as(x), tokens)

    def _changed(self, x: Tensor) -> Tensor:
        mean = self._mean_of_this_call()
        if isinstance(mean, Full) or self.running.now.cache is None:
            return _changed(x, self.tau(), mean, *self._chosen(x))
        return x - self._shift(x)

    def _chosen(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The tokens that count in the mean, and those that it is subtracted from; None: all."""
        now, remedy = self.running.now, self.remedy
        counted, touched = (
            _without(chosen, x, now.real, now.position) for chosen in (remedy.skip_in_mean, remedy.leave_alone)
        )
        return counted, touched

    def _shift(self, x: Tensor) -> Tensor:
        now, mean = self.running.now, self._mean_of_this_call()
        counted, touched = self._chosen(x)
        if isinstance(mean, Full) or now.cache is None:
            return _shift(x, self.tau(), mean.mean(x, counted), touched)
        site = (self.block, self.station)
        before = recall(now.cache, site, now.past)
        found, after = mean.running_mean(x, counted, before)
        remember(now.cache, site, now.past + x.shape[1], after)
        return _shift(x, self.tau(), found, touched)

    def _mean_of_this_call(self) -> TokenMean:
        mean = self.mean or NAMED["full" if self.running.now.bidirectional else "prefix"]
        if mean.kind == "causal":
            self.running.refuse_unknown_past(self.remedy.name)
        elif self.mean is not None and self.running.now.bidirectional is False and not self.remedy.allow_leak:
            raise ValueError(f"mixing='full' with a src_mask or tgt_mask, which may be causal: {leak(self.remedy)}")
        return mean
