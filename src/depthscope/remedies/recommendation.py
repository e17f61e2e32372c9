"""Which remedies, with which numbers? Measured on the model.

One block maps the odds s = t_sim/t_div to ρs + c (see `theory.odds`); ρ and c are measured by sending, through
every block, its tokens without their mean and its tokens with a dominating mean. The τ that holds a wanted
level follows, is tried on the model, and is raised if it does not hold the level: the map takes the blocks' weights to
be independent, and blocks that are copies of one another (`nn.TransformerEncoder` when it is new) all feed the same
mean. More diversity means more chaos: with τ the gradient grows from block to block, and over many blocks
that must be paid for with a smaller weight α of the branches. τ itself is not lowered for a small α, although
the odds would allow it: training makes the collapse that such a model does not have when it is new. In a post-norm
model the first α to be tried is that of `theory.prescribe` for blocks of these ρ and c; the gradient mends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.discovery import Hints, refuse_tensor
from depthscope.hooks import Listen, Machine, Visit, refuse_ablated
from depthscope.inputs import Batch, Tokenizer, call
from depthscope.measures import TokenMatrix
from depthscope.models.token_means import TokenMean
from depthscope.probing import Profile, probe
from depthscope.probing.parts import most_alike
from depthscope.progress import Tick
from depthscope.remedies import expression
from depthscope.remedies.application import temporarily
from depthscope.remedies.branch_weight import first_sequences, gradient_growth, growth_by_weight, prescribed_weight
from depthscope.remedies.deescalation import DeEscalate
from depthscope.remedies.record import to_dict
from depthscope.remedies.remedy import RIGHT_TO_LEFT, Remedy
from depthscope.remedies.residual_weight import ResidualWeight
from depthscope.scope import Scope, scope_of
from depthscope.theory import GROWTH, OddsMap, level_to_hold, measure_map, odds_of

TRIALS = 4  # of τ, each a forward pass
HELD = 1.05  # times the wanted level: what is still called held
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
    expected_similarity: float | None = None  # t_sim at the last block with the remedies: measured, or by the odds map
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
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    level: float | None = None,
    tau: float | None = None,
    alpha: float | None = None,
    at: str = "output",
    mixing: str | TokenMean = "auto",
    weigh_branches: bool = True,
    tokenizer: Tokenizer | None = None,
    progress: Tick | None = None,
    **hints: Unpack[Hints],
) -> Recommendation:
    """The de-escalation that holds the similarity of this model's tokens at a level, and what must go with it.

    Measured on the first batch. Costs eight to fourteen forward passes, and up to four forward and back to find α. A
    statement about random weights: in trained ones W aligns with the mean, and ρ and c say what these blocks do, not
    what training with the remedy will lead to. With a causal mean the threshold lies a little higher (.30–.35 where the
    full mean has .29). In a causal model, positions whose token is an outlier in most sequences (attention sinks) are
    left alone. Whether the model is causal is tried, and what is found stands in the recommended line.

    Args:
        model: any model that holds Transformer blocks, or a `Scope` of it.
        inputs: as for `probe`.
        level: the similarity that is held; by default that of the tokens at the entrance, but at least 0.1 and at most
            0.5.
        tau: is taken as it is, if given.
        alpha: is taken as it is, if given.
        at: the station of the de-escalation.
        mixing: which mean is taken: "auto" (as the model's causality allows), or one by name.
        weigh_branches: looks for a weight of the branches, if the model shows its branches and its weights do not look
            trained.
        tokenizer: makes ids of strings.
        progress: is called after every pass.
        hints: what you say of the model: `blocks`, `part`, `token_axis`, `mask`, `causal`, as for `Scope`.

    Returns:
        A `Recommendation`: remedies, their reason, and the line of Python that puts them in.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> found = depthscope.recommend(model, torch.randn(2, 5, 16), tau=0.3)
        >>> found.tau
        0.3
    """
    if level is not None and not 0 < level < 1:
        raise ValueError(f"expected a level of similarity between 0 and 1, got {level}")
    scope = scope_of(model, inputs, tokenizer, **hints)
    refuse_tensor(scope.hints)
    refuse_ablated(scope.model)
    model, batch = scope.model, scope.one_to_a_row(scope.first_batch)
    anatomy = scope.seen_anatomy(again=True)
    if anatomy.right_to_left:
        raise ValueError(f"no de-escalation for {type(model).__name__}: {RIGHT_TO_LEFT}")
    options = scope.apply_hints
    first = scope.first_only()
    profile = probe(first, measures=["token_similarity", "outliers"])
    if len(profile.metadata["not_finite"]) == profile.metadata["samples"]:
        raise ValueError(f"expected sequences that stay finite, got {profile.metadata['notes'][0]}")
    part = most_alike(profile)
    chosen = _numbers(anatomy, part)
    spared = _spared(profile, batch, part)

    def remedy(strength: float) -> DeEscalate:
        return DeEscalate(strength, at=at, mixing=mixing, skip_in_mean=spared, leave_alone=spared, blocks=chosen)

    if tau is not None:
        asked = (remedy(tau), *(() if alpha is None else (ResidualWeight(alpha, blocks=chosen),)))
        depth = profile.depth if chosen is None else len(chosen)
        return Recommendation(f"τ = {tau:g} as asked for", asked, blocks=depth, apply_options=options)
    with scope.undisturbed():
        maps = _maps(model, anatomy, batch, part, progress)
    odds = OddsMap(_geometric_mean([m.rho for m in maps]), _geometric_mean([m.feed for m in maps]))
    level = level_to_hold(profile.curve("token_similarity", part=part)[0]) if level is None else level
    found = float(f"{odds.tau_for(odds_of(level)):.3g}")
    if found == 0:
        reason = f"{_sentence(odds, part)}: they stay below the wanted level {level:g} by themselves"
        return Recommendation(reason, (), True, level, odds, odds.critical_tau, blocks=len(maps), apply_options=options)

    def similarity_with(*remedies: Remedy) -> float:
        with temporarily(first, *remedies):
            with_them = probe(first, measures=["token_similarity"])
        return with_them.curve("token_similarity", part=part)[-1]

    found, held = _hold(lambda strength: similarity_with(remedy(strength)), odds, found, level)
    weighed = alpha
    tried: dict[float, float] = {}
    if alpha is None and weigh_branches and _can_be_weighed(anatomy) and not _is_trained(profile):
        few = first.on(first_sequences(first.inputs)) if anatomy.token_axis == 1 else first
        tried = growth_by_weight(
            lambda a: _growth_with(few, progress, remedy(found), a, part),
            len(maps),
            prescribed_weight(profile.metadata | profile.metadata["towers"].get(part, {}), odds, level, len(maps)),
        )
        best = min(tried, key=lambda a: (abs(math.log(tried[a])) * len(maps) > math.log(GROWTH), -a))
        weighed = None if best == 1 else best
    remedies = (remedy(found), *(() if weighed is None else (ResidualWeight(weighed, blocks=chosen),)))
    return Recommendation(
        _reason(_sentence(odds, part), odds, (found, held), weighed, tried, len(maps)),
        remedies,
        measured=True,
        level=level,
        odds=odds,
        critical_tau=odds.critical_tau,
        expected_similarity=held if weighed is None else similarity_with(*remedies),
        blocks=len(maps),
        growth=tried,
        apply_options=options,
    )


def _numbers(anatomy: Anatomy, part: str) -> tuple[int, ...] | None:
    """The blocks of one part of several; None: all that there are, also where parts run in turns."""
    if len(anatomy.parts) == 1:
        return None
    return tuple(number for number, block in enumerate(anatomy.blocks, start=1) if block.part == part) or None


def _hold(similarity: Callable[[float], float], odds: OddsMap, tau: float, level: float) -> tuple[float, float]:
    """The τ that holds the level on the model, and the similarity that it leads to.

    What is measured with a τ is read as the fixed point of a map with the same ρ and a larger c, whose τ is tried next.
    If no trial holds the level (the remedy leaves alone what carries it), the first τ stays.
    """
    trials = {tau: similarity(tau)}
    while not trials[tau] <= HELD * level and len(trials) < TRIALS and trials[tau] < 1:
        keep = (1 - tau) ** 2
        feed = odds_of(trials[tau]) * (1 / keep - odds.rho)
        tau = float(f"{OddsMap(odds.rho, feed).tau_for(odds_of(level)):.3g}")
        if tau in trials or tau >= 1:
            break
        trials[tau] = similarity(tau)
    first = next(iter(trials))
    chosen = next((tried for tried, reached in trials.items() if reached <= HELD * level), first)
    return chosen, trials[chosen]


def _sentence(odds: OddsMap, part: str) -> str:
    where = f" of the part {part!r}" if part else ""
    return f"one block{where} multiplies the odds of similarity by ρ = {odds.rho:.3g} and adds c = {odds.feed:.2g}"


def _reason(
    sentence: str,
    odds: OddsMap,
    held: tuple[float, float],
    alpha: float | None,
    growth: Mapping[float, float],
    blocks: int,
) -> str:
    tau, similarity = held
    text = (
        f"{sentence}, so similarity stays bounded above τ_c = {odds.critical_tau:.3g}, "
        f"and with τ = {tau:g} it is {similarity:.2f} after block {blocks}"
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


def _can_be_weighed(anatomy: Anatomy) -> bool:
    """Whether the branches are seen, and for certain: what a structure shows must be tried on inputs each time."""
    shown = all(block.spots.keys() >= set(block.branches) for block in anatomy.blocks)
    return shown and anatomy.family != "unknown"


def _is_trained(profile: Profile) -> bool:
    return profile.metadata["weights"]["look"] == "trained"


def _spared(profile: Profile, batch: Batch, part: str) -> tuple[int, ...]:
    """The sinks of a causal model. Positions are numbers of real tokens only without padding on the left."""
    inputs = _inputs_of(batch)
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    padded = isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask[:, 0] == 0).any())
    causal = (profile.metadata | profile.metadata["towers"].get(part, {})).get("causal")
    return sink_positions(profile, part) if causal and not padded else ()


def sink_positions(profile: Profile, part: str = "") -> tuple[int, ...]:
    """Positions whose token is an outlier in at least half of the samples of a part, at most `SINKS`."""
    sinks = profile.sinks
    if part:
        sinks = sinks[sinks["block"].between(*profile.parts[part])]
    if len(sinks) == 0:
        return ()
    counts = sinks.groupby("token")["sample"].nunique()
    samples = (profile.metadata | profile.metadata.get("towers", {}).get(part, {}))["samples"]
    common = counts[counts * 2 >= samples].sort_values(ascending=False)
    return tuple(sorted(int(token) for token in common.index[:SINKS]))


def _growth_with(few: Scope, progress: Tick | None, remedy: Remedy, alpha: float, part: str) -> float:
    weights = () if alpha == 1 else (ResidualWeight(alpha, blocks=remedy.blocks),)
    with temporarily(few, remedy, *weights):
        profile = probe(few, measures=["token_similarity"], gradients="outputs")
    if progress is not None:
        progress()
    return gradient_growth(profile, part)


def _maps(model: nn.Module, anatomy: Anatomy, batch: Batch, part: str, progress: Tick | None) -> list[OddsMap]:
    """ρ and c of every block of a part, each run twice more with other tokens."""
    found: list[OddsMap] = []

    def measure(visit: Visit, _station: str, _tokens: Tensor, _source: Tensor) -> None:
        if visit.part != part and part:
            return
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
