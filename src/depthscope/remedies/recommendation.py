"""Which remedies, with which numbers? Measured on the model.

One block maps the odds s = t_sim/t_div to ρs + c (see `theory.odds`); ρ and c are measured by sending, through
every block, its tokens without their mean and its tokens with a dominating mean. The τ that holds a wanted
level follows. More diversity means more chaos: with τ the gradient grows from block to block, and over many blocks
that must be paid for with a smaller weight α of the branches. τ itself is not lowered for a small α, although
the odds would allow it: training makes the collapse that such a model does not have when it is new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, anatomy_of
from depthscope.measures import TokenMatrix
from depthscope.models.token_means import TokenMean
from depthscope.passes import Batch, Listen, Machine, Tokenizer, Visit, batches, call, uncompiled, undisturbed
from depthscope.probing import Profile, probe
from depthscope.progress import Tick
from depthscope.remedies import expression
from depthscope.remedies.application import temporarily
from depthscope.remedies.deescalation import DeEscalate
from depthscope.remedies.record import to_dict
from depthscope.remedies.remedy import Remedy
from depthscope.remedies.residual_weight import ResidualWeight
from depthscope.theory import OddsMap, level_to_hold, measure_map, odds_of, similarity_of

GROWTH = 10.0  # by how much the gradient may grow over the whole depth
TRIALS = 4  # of α; each costs a forward and a backward pass
SINKS = 4  # positions that are spared at most


@dataclass(frozen=True)
class Recommendation:
    """Remedies with their reason. `measured`: on the model itself; else it is an estimate from a profile."""

    reason: str  # one sentence with the numbers
    remedies: tuple[Remedy, ...] = ()  # for `apply(model, *recommendation.remedies)`; none: nothing is to be put in
    measured: bool = False
    level: float | None = None  # the similarity that was wanted
    odds: OddsMap | None = None  # ρ and c
    critical_tau: float | None = None  # τ_c: below it the collapse goes on
    expected_similarity: float | None = None  # t_sim at the last block with the remedies, by the odds map
    blocks: int = 0
    growth: Mapping[float, float] = field(default_factory=dict)  # α → growth of the gradient per block, backwards
    apply_options: Mapping[str, Any] = field(default_factory=dict)  # what `apply` must be told of an unknown model

    @property
    def tau(self) -> float | None:
        """The τ among the remedies; None if there is none."""
        return next((remedy.tau for remedy in self.remedies if isinstance(remedy, DeEscalate)), None)  # type: ignore[return-value]

    @property
    def alpha(self) -> float | None:
        """The weight of the branches among the remedies; None: 1 will do, or was not asked for."""
        return next((remedy.alpha for remedy in self.remedies if isinstance(remedy, ResidualWeight)), None)

    @property
    def line(self) -> str | None:
        """The line of Python that puts the remedies in."""
        return expression.call(self.remedies, self.apply_options) if self.remedies else None

    @property
    def python(self) -> str | None:
        """The same with its import."""
        return expression.lines(self.remedies, self.apply_options) if self.remedies else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "reason": self.reason,
            "measured": self.measured,
            "remedies": [to_dict(remedy) for remedy in self.remedies],
            "tau": self.tau,
            "alpha": self.alpha,
            "level": self.level,
            "critical_tau": self.critical_tau,
            "expected_similarity": self.expected_similarity,
            "line": self.line,
        }


def recommend(
    model: nn.Module,
    inputs: Any,
    *,
    level: float | None = None,
    tau: float | None = None,
    alpha: float | None = None,
    at: str = "output",
    mixing: str | TokenMean = "auto",
    weigh_branches: bool = True,
    tokenizer: Tokenizer | None = None,
    blocks: str | None = None,
    progress: Tick | None = None,
) -> Recommendation:
    """The de-escalation that holds the similarity of this model's tokens at `level`, and what must go with it.

    Measured on the first batch of `inputs`. The level is by default that of the tokens at the entrance, but at least
    0.1 and at most 0.5. A `tau` or an `alpha` that is given is taken as it is. In a causal model, positions whose token
    is an outlier in most sequences (attention sinks) are left alone. A weight of the branches is looked for if
    `weigh_branches`, if the model shows its branches, and if its weights do not look trained.

    Costs four forward passes, and up to four passes forward and back to find α. A statement about random weights: in
    trained ones W aligns with the mean, and ρ and c say what these blocks do, not what training with the remedy will
    lead to. With a causal mean the threshold lies a little higher (.30–.35 where the full mean has .29).
    """
    if level is not None and not 0 < level < 1:
        raise ValueError(f"expected a level of similarity between 0 and 1, got {level}")
    model, _ = uncompiled(model)
    anatomy = anatomy_of(model, blocks)
    batch = next(batches(model, inputs, tokenizer), None)
    if batch is None:
        raise ValueError("expected at least one batch, got none")
    profile = probe(model, _inputs_of(batch), measures=["token_similarity", "outliers"], blocks=blocks)
    anatomy = replace(anatomy, token_axis=profile.metadata["token_axis"])
    options = _apply_options(profile, blocks)
    spared = _spared(profile, batch)

    def remedy(strength: float) -> DeEscalate:
        return DeEscalate(strength, at=at, mixing=mixing, skip_in_mean=spared, leave_alone=spared)

    if tau is not None:
        asked = (remedy(tau), *(() if alpha is None else (ResidualWeight(alpha),)))
        return Recommendation(f"τ = {tau:g} as asked for", asked, blocks=profile.depth, apply_options=options)
    with undisturbed(model):
        maps = _maps(model, anatomy, batch, progress)
    odds = OddsMap(_geometric_mean([m.rho for m in maps]), _geometric_mean([m.feed for m in maps]))
    level = level_to_hold(profile.curve("token_similarity")[0]) if level is None else level
    found = float(f"{odds.tau_for(odds_of(level)):.3g}")
    if found == 0:
        reason = f"{_sentence(odds)}: they stay below the wanted level {level:g} by themselves"
        return Recommendation(reason, (), True, level, odds, odds.critical_tau, blocks=len(maps), apply_options=options)
    weighed = alpha
    tried: dict[float, float] = {}
    if alpha is None and weigh_branches and _can_be_weighed(anatomy) and not _is_trained(profile):
        few = _first_sequences(batch) if anatomy.token_axis == 1 else _inputs_of(batch)
        tried = _weigh(lambda a: _growth_with(model, few, blocks, progress, remedy(found), a), len(maps))
        best = min(tried, key=lambda a: (abs(math.log(tried[a])) * len(maps) > math.log(GROWTH), -a))
        weighed = None if best == 1 else best
    return Recommendation(
        _reason(odds, found, weighed, tried, len(maps)),
        (remedy(found), *(() if weighed is None else (ResidualWeight(weighed),))),
        measured=True,
        level=level,
        odds=odds,
        critical_tau=odds.critical_tau,
        expected_similarity=similarity_of(odds.fixed_point(found)),
        blocks=len(maps),
        growth=tried,
        apply_options=options,
    )


def _sentence(odds: OddsMap) -> str:
    return f"one block multiplies the odds of similarity by ρ = {odds.rho:.3g} and adds c = {odds.feed:.2g}"


def _reason(odds: OddsMap, tau: float, alpha: float | None, growth: Mapping[float, float], blocks: int) -> str:
    text = (
        f"{_sentence(odds)}, so similarity stays bounded above τ_c = {odds.critical_tau:.3g}, "
        f"and τ = {tau:g} holds it at {similarity_of(odds.fixed_point(tau)):.2f}"
    )
    if alpha is None or alpha not in growth:
        return text
    grown = growth[1.0] ** blocks
    return text + (
        f"; with it the gradient grows by {growth[1.0]:.3f} per block, {grown:.1e} over {blocks}, "
        f"and a branch weight α = {alpha:g} brings that to {growth[alpha]:.3f} (and the similarity further down)"
    )


def _inputs_of(batch: Batch) -> Any:
    return batch.kwargs or batch.args[0]


def _apply_options(profile: Profile, blocks: str | None) -> dict[str, Any]:
    """What `apply` must be told of a model of no known family, as it was found here."""
    options: dict[str, Any] = {} if blocks is None else {"blocks": blocks}
    if profile.metadata.get("family") == "unknown" and profile.metadata["token_axis"] == 0:
        options["token_axis"] = 0
    causal = profile.metadata.get("causal")
    return options | ({"causal": causal} if profile.metadata.get("family") == "unknown" and causal is not None else {})


def _can_be_weighed(anatomy: Anatomy) -> bool:
    return all(block.spots.keys() >= set(block.branches) for block in anatomy.blocks)


def _is_trained(profile: Profile) -> bool:
    return profile.metadata["weights"]["look"] == "trained"


def _spared(profile: Profile, batch: Batch) -> tuple[int, ...]:
    """The sinks of a causal model. Positions are numbers of real tokens only without padding on the left."""
    mask = batch.kwargs.get("attention_mask")
    padded = isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask[:, 0] == 0).any())
    return sink_positions(profile) if profile.metadata.get("causal") and not padded else ()


def sink_positions(profile: Profile) -> tuple[int, ...]:
    """Positions whose token is an outlier in at least half of the samples, at most `SINKS`."""
    if len(profile.sinks) == 0:
        return ()
    counts = profile.sinks.groupby("token")["sample"].nunique()
    common = counts[counts * 2 >= profile.metadata["samples"]].sort_values(ascending=False)
    return tuple(sorted(int(token) for token in common.index[:SINKS]))


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


def _growth_with(
    model: nn.Module, few: Any, blocks: str | None, progress: Tick | None, remedy: Remedy, alpha: float
) -> float:
    weights = () if alpha == 1 else (ResidualWeight(alpha),)
    with temporarily(model, remedy, *weights, inputs=few, blocks=blocks):
        profile = probe(model, few, measures=["token_similarity"], blocks=blocks, gradients="outputs")
    if progress is not None:
        progress()
    return gradient_growth(profile)


def _weigh(growth: Callable[[float], float], depth: int) -> dict[float, float]:
    """α → growth, until the growth over the whole depth is allowed. Its logarithm falls about like α²."""
    tried = {1.0: growth(1.0)}
    alpha = 1.0
    while math.log(tried[alpha]) * depth > math.log(GROWTH) and len(tried) < TRIALS:
        aim = math.log(GROWTH) / 2 / depth  # well inside what is allowed
        alpha = float(f"{alpha * math.sqrt(aim / math.log(tried[alpha])):.2g}")
        tried[alpha] = growth(alpha)
    return tried


def _maps(model: nn.Module, anatomy: Anatomy, batch: Batch, progress: Tick | None) -> list[OddsMap]:
    """ρ and c of every block, each run twice more with other tokens."""
    found: list[OddsMap] = []

    def measure(visit: Visit, _station: str, _tokens: Tensor, _source: Tensor) -> None:
        tokens = machine.running.batch_first(visit.entered)
        norm = TokenMatrix.of(tokens, visit.real).norm

        def block(changed: Tensor) -> Tensor:
            size = TokenMatrix.of(changed, visit.real).norm
            return visit.again((changed * (norm / size)[:, None, None].to(changed.dtype)).to(tokens.dtype))

        large = 1e6 if tokens.dtype in (torch.float32, torch.float64) else 1e2  # half precision sees no more
        found.append(measure_map(block, tokens, visit.real, large=large))
        if progress is not None:
            progress()

    with Machine(model, anatomy, Listen({"output"}, measure)) as machine:
        call(model, batch)
    return found


def _geometric_mean(numbers: list[float]) -> float:
    usable = [number for number in numbers if math.isfinite(number) and number > 0]
    if not usable:
        raise ValueError("ρ and c cannot be measured: the tokens are equal, single, or not finite in every block")
    return math.exp(sum(map(math.log, usable)) / len(usable))
