"""Which τ, and which weight of the branches? Measured on the model, for random weights.

One block maps the odds s = t_sim/t_div to ρs + c (see `theory.odds`); ρ and c are measured by sending, through
every block, its tokens without their mean and its tokens with a dominating mean. The τ that holds a wanted
level follows. More diversity means more chaos: with τ the gradient grows from block to block, and over many blocks
that must be paid for with a smaller weight α of the branches. τ itself is not lowered for a small α, although
the odds would allow it: training makes the collapse that such a model does not have when it is new.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, anatomy_of
from depthscope.measures import TokenMatrix, token_similarity
from depthscope.models.token_means import TokenMean
from depthscope.probing import Profile, probe
from depthscope.probing.inputs import Batch, Tokenizer, batches
from depthscope.probing.quiet import uncompiled, undisturbed
from depthscope.probing.taps import Taps, Visit, batch_first, first_tokens
from depthscope.remedies.application import temporarily
from depthscope.remedies.deescalation import DeEscalate
from depthscope.remedies.hooks import edit_tokens
from depthscope.remedies.residual_weight import ResidualWeight
from depthscope.theory import OddsMap, level_to_hold, measure_map, odds_of, similarity_of

GROWTH = 10.0  # by how much the gradient may grow over the whole depth
TRIALS = 4  # of α; each costs a forward and a backward pass


@dataclass(frozen=True)
class Recommendation:
    """A τ with its reason, and the weight of the branches that goes with it."""

    remedy: DeEscalate
    alpha: float | None  # None: α = 1 will do, or was not asked for
    level: float  # the similarity that was wanted
    odds: OddsMap  # measured: ρ and c, geometric means over blocks and sequences
    blocks: int
    growth: dict[float, float]  # α that was tried → growth of the gradient per block, towards the input

    @property
    def tau(self) -> float:
        assert isinstance(self.remedy.tau, float)
        return self.remedy.tau

    @property
    def predicted(self) -> float:
        """The similarity at which the odds settle, just after the operation; 1 if they do not."""
        return similarity_of(self.odds.fixed_point(self.tau))

    @property
    def remedies(self) -> tuple[DeEscalate | ResidualWeight, ...]:
        """For `apply(model, *recommendation.remedies)`; none if nothing needs to be done."""
        if self.tau == 0:
            return ()
        return (self.remedy,) if self.alpha is None else (self.remedy, ResidualWeight(self.alpha))

    @property
    def reason(self) -> str:
        """One sentence with the numbers."""
        odds = (
            f"one block multiplies the odds of similarity by ρ = {self.odds.rho:.3g} and adds c = {self.odds.feed:.2g}"
        )
        if self.tau == 0:
            return f"{odds}: they stay below the wanted level {self.level:g} by themselves"
        text = (
            f"{odds}, so it stays bounded above τ_c = {self.odds.critical_tau:.3g}, "
            f"and τ = {self.tau:g} holds it at {self.predicted:.2f}"
        )
        if self.alpha is not None:
            grown = self.growth[1.0] ** self.blocks
            text += (
                f"; with it the gradient grows by {self.growth[1.0]:.3f} per block, {grown:.1e} over {self.blocks}, "
                f"and a branch weight α = {self.alpha:g} brings that to {self.growth[self.alpha]:.3f} "
                "(and the similarity further down)"
            )
        return text


def recommend(
    model: nn.Module,
    inputs: Any,
    *,
    level: float | None = None,
    at: str = "output",
    mixing: str | TokenMean = "auto",
    weigh_branches: bool = True,
    tokenizer: Tokenizer | None = None,
    blocks: str | None = None,
    progress: Callable[[], object] | None = None,
) -> Recommendation:
    """The τ that holds the similarity of this model's tokens at `level`, from its first batch of `inputs`.

    The level is by default that of the tokens at the entrance, but at least 0.1 and at most 0.5.

    Costs three forward passes, and with `weigh_branches` up to four passes forward and back to find α. A statement
    about random weights: in trained ones W aligns with the mean, and ρ and c say what these blocks do, not what
    training with the remedy will lead to. With a causal mean the threshold lies a little higher (.30–.35 where the
    full mean has .29).
    """
    if level is not None and not 0 < level < 1:
        raise ValueError(f"expected a level of similarity between 0 and 1, got {level}")
    model, _ = uncompiled(model)
    anatomy = anatomy_of(model, blocks)
    batch = next(batches(model, inputs, tokenizer), None)
    if batch is None:
        raise ValueError("expected at least one batch, got none")
    with undisturbed(model):
        maps, entrance = _maps(model, anatomy, batch, progress)
    odds = OddsMap(_geometric_mean([m.rho for m in maps]), _geometric_mean([m.feed for m in maps]))
    level = level_to_hold(entrance) if level is None else level
    remedy = DeEscalate(tau=float(f"{odds.tau_for(odds_of(level)):.3g}"), at=at, mixing=mixing)
    if not weigh_branches or remedy.tau == 0:
        return Recommendation(remedy, None, level, odds, len(maps), {})

    few = _first_sequences(batch) if anatomy.token_axis == 1 else batch.kwargs or batch.args[0]

    def growth(alpha: float) -> float:
        weights = () if alpha == 1 else (ResidualWeight(alpha),)
        with temporarily(model, remedy, *weights, inputs=few, blocks=blocks):
            profile = probe(model, few, measures=["token_similarity"], blocks=blocks, gradients=True)
        if progress is not None:
            progress()
        return gradient_growth(profile)

    tried = _weigh(growth, len(maps))
    best = min(tried, key=lambda alpha: (abs(math.log(tried[alpha])) * len(maps) > math.log(GROWTH), -alpha))
    return Recommendation(remedy, None if best == 1 else best, level, odds, len(maps), tried)


def _first_sequences(batch: Batch, most: int = 2) -> Any:
    """A piece of the batch: the gradient's growth over many blocks is nearly the same for every sequence."""
    if batch.kwargs:
        size = next(v.shape[0] for v in batch.kwargs.values() if isinstance(v, Tensor) and v.ndim)
        return {
            name: value[:most] if isinstance(value, Tensor) and value.ndim and value.shape[0] == size else value
            for name, value in batch.kwargs.items()
        }
    return batch.args[0][:most]


def gradient_growth(profile: Profile) -> float:
    """By what factor the gradient grows per block on its way to the input: (g₁/g_L)^(1/(L−1))."""
    norms = [norm for norm in profile.curve("output_gradient") if not math.isnan(norm)]
    return (norms[0] / norms[-1]) ** (1 / (len(norms) - 1)) if len(norms) > 1 else 1.0


def _weigh(growth: Callable[[float], float], depth: int) -> dict[float, float]:
    """α → growth, until the growth over the whole depth is allowed. Its logarithm falls about like α²."""
    tried = {1.0: growth(1.0)}
    alpha = 1.0
    while math.log(tried[alpha]) * depth > math.log(GROWTH) and len(tried) < TRIALS:
        aim = math.log(GROWTH) / 2 / depth  # well inside what is allowed
        alpha = float(f"{alpha * math.sqrt(aim / math.log(tried[alpha])):.2g}")
        tried[alpha] = growth(alpha)
    return tried


def _maps(
    model: nn.Module, anatomy: Anatomy, batch: Any, progress: Callable[[], object] | None
) -> tuple[list[OddsMap], float]:
    """ρ and c of every block, each run twice more with other tokens; and t_sim of what enters the first."""
    found: list[OddsMap] = []
    entrance = math.nan
    repeating = False

    def _batch_first(tokens: Tensor, visit: Visit) -> Tensor:
        view = batch_first(tokens, anatomy.token_axis, visit.shape)
        if view is None:
            raise ValueError(f"expected tokens (batch, n, d) in {visit.block.name!r}, got shape {tuple(tokens.shape)}")
        return view

    def again(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        nonlocal repeating, entrance
        if repeating:
            return
        visit = taps.visit
        given = first_tokens((*args, *kwargs.values()))
        assert visit is not None
        assert given is not None
        tokens = _batch_first(given, visit)
        norm = TokenMatrix.of(tokens, visit.mask).norm
        if not found:
            entrance = token_similarity(tokens, visit.mask).mean().item()

        def block(changed: Tensor) -> Tensor:
            size = TokenMatrix.of(changed, visit.mask).norm
            scaled = (changed * (norm / size)[:, None, None].to(changed.dtype)).to(tokens.dtype)
            back = (scaled if anatomy.token_axis == 1 else scaled.transpose(0, 1)).reshape(given.shape)
            new_args, new_kwargs = edit_tokens((args, kwargs), lambda _tokens: back)
            output = first_tokens(module(*new_args, **new_kwargs))
            assert output is not None
            return _batch_first(output, visit)

        repeating = True
        try:
            large = 1e6 if tokens.dtype in (torch.float32, torch.float64) else 1e2  # half precision sees no more
            found.append(measure_map(block, tokens, visit.mask, large=large))
        finally:
            repeating = False
        if progress is not None:
            progress()

    handles = []
    taps = Taps(model, anatomy, set(), _ignore)
    try:
        # Ours first: when they run, the block has not ended for the taps.
        handles += [b.module.register_forward_hook(again, with_kwargs=True) for b in anatomy.blocks]
        with taps:
            model(*batch.args, **batch.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found, entrance


def _ignore(_visit: Visit, _station: str, _tokens: Tensor, _source: Tensor) -> None: ...


def _geometric_mean(numbers: list[float]) -> float:
    usable = [number for number in numbers if math.isfinite(number) and number > 0]
    if not usable:
        raise ValueError("ρ and c cannot be measured: the tokens are equal, single, or not finite in every block")
    return math.exp(sum(map(math.log, usable)) / len(usable))
