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
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from depthscope.discovery import Hints, refuse_tensor
from depthscope.hooks import Listen, Machine, Visit, refuse_ablated
from depthscope.inputs import Tokenizer, call
from depthscope.measures import TokenMatrix
from depthscope.probing import Profile, probe
from depthscope.probing.profile import most_alike
from depthscope.progress import Tick
from depthscope.remedies import record
from depthscope.remedies.application import temporarily
from depthscope.remedies.branches import ResidualWeight
from depthscope.remedies.deescalation import DeEscalate
from depthscope.remedies.remedy import RIGHT_TO_LEFT, Remedy
from depthscope.scope import Scope, scope_of
from depthscope.theory import GROWTH, Gains, OddsMap, level_to_hold, measure_map, odds_of, prescribe

SINKS = 4  # positions that are left alone at most
TRIALS = 4  # of τ, each a forward pass; of α, each a forward and a backward pass
HELD = 1.05  # times the wanted level: what is still called held


class Unmeasurable(ValueError):
    """The odds of similarity cannot be measured on these inputs."""


@dataclass(frozen=True)
class Recommendation:
    """Remedies with their reason. `measured`: on the model itself; else it is an estimate from a profile."""

    reason: str  # one sentence with the numbers
    remedies: tuple[Remedy, ...] = ()  # for `apply(model, *recommendation.remedies)`; none: nothing is to be put in
    measured: bool = False
    level: float | None = None  # the similarity that was wanted
    odds: OddsMap | None = None  # ρ and c
    expected_similarity: float | None = None  # t_sim at the last block with the remedies: measured, or by the odds map
    blocks: int = 0
    growth: Mapping[float, float] = field(default_factory=dict)  # α → growth of the gradient per block, backwards
    apply_options: Mapping[str, Any] = field(default_factory=dict)  # what `apply` must be told of an unknown model

    @property
    def critical_tau(self) -> float | None:
        """τ_c: below it the collapse goes on."""
        return None if self.odds is None else self.odds.critical_tau

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
        return record.call(self.remedies, self.apply_options) if self.remedies else None

    @property
    def code(self) -> str | None:
        """The same below the import of the remedies: what is shown."""
        return "\n".join([*record.imports(self.remedies), self.line]) if self.line is not None else None

    @property
    def python(self) -> str | None:
        """The same below all imports: it runs as it stands."""
        lines = ["import depthscope", *record.imports(self.remedies), "", str(self.line)]
        return "\n".join(lines) if self.remedies else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "reason": self.reason,
            "measured": self.measured,
            "remedies": [record.to_dict(remedy) for remedy in self.remedies],
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
    first, anatomy = scope.first_only(), scope.seen_anatomy(again=True)
    if anatomy.right_to_left:
        raise ValueError(f"no de-escalation for {type(scope.model).__name__}: {RIGHT_TO_LEFT}")
    options = scope.apply_hints
    profile = probe(first, measures=["token_similarity", "outliers"], stations="output")
    if len(profile.metadata["not_finite"]) == profile.metadata["samples"]:
        raise ValueError(f"expected sequences that stay finite, got {profile.metadata['notes'][0]}")
    part = most_alike(profile)
    about = profile.metadata | profile.metadata["towers"].get(part, {})
    chosen = None  # all blocks that there are, also where parts run in turns
    if len(anatomy.parts) > 1:
        chosen = tuple(i for i, block in enumerate(anatomy.blocks, start=1) if block.part == part) or None
    mask = first.first_batch.kwargs.get("attention_mask")
    # Padding on the left: then positions are not the numbers of real tokens.
    is_padded_left = isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask[:, 0] == 0).any())
    sinks = sink_positions(profile, part) if about.get("causal") and not is_padded_left else ()

    def remedies(tau: float, alpha: float | None) -> tuple[Remedy, ...]:
        mean = DeEscalate(tau, skip_in_mean=sinks, leave_alone=sinks, blocks=chosen)
        return (mean,) if alpha is None else (mean, ResidualWeight(alpha, blocks=chosen))

    if tau is not None:
        depth = profile.depth if chosen is None else len(chosen)
        asked = remedies(tau, alpha)
        return Recommendation(f"τ = {tau:g} as asked for", asked, blocks=depth, apply_options=options)
    odds, depth = odds_map(scope, part, progress)
    level = level_to_hold(profile.curve("token_similarity", part=part)[0]) if level is None else level
    found = float(f"{odds.tau_for(odds_of(level)):.3g}")
    where = f" of the part {part!r}" if part else ""
    measured = f"one block{where} multiplies the odds of similarity by ρ = {odds.rho:.3g} and adds c = {odds.feed:.2g}"
    if found == 0:
        reason = f"{measured}: they stay below the wanted level {level:g} by themselves"
        return Recommendation(reason, (), True, level, odds, blocks=depth, apply_options=options)

    def similarity(tau: float, alpha: float | None = None) -> float:
        with temporarily(first, *remedies(tau, alpha)):
            profile = probe(first, measures="token_similarity", stations="output")
            return profile.curve("token_similarity", part=part)[-1]

    found, held = held_by(similarity, odds, found, level)
    growth: dict[float, float] = {}
    shown = all(block.spots.keys() >= set(block.branches) for block in anatomy.blocks)
    certain = shown and anatomy.family != "unknown"  # what a structure shows must be tried on inputs each time
    if alpha is None and weigh_branches and certain and profile.metadata["weights"]["look"] != "trained":
        few = first.on(_two_of(first.inputs)) if anatomy.token_axis == 1 else first

        def growth_with(weight: float) -> float:
            with temporarily(few, *remedies(found, None if weight == 1 else weight)):
                profile = probe(few, measures="token_similarity", stations="output", gradients="outputs")
            if progress is not None:
                progress()
            return gradient_growth(profile, part)

        prescribed = 1.0
        if about["placement"] == "post":
            with suppress(ValueError):  # no FFN of ReLU brings about such a c, or no α is small enough
                prescribed = prescribe(depth, Gains.of_odds(odds, about["tokens"] or 0), level=level).alpha
        growth = growth_by_weight(growth_with, depth, prescribed)
        best = min(growth, key=lambda a: (abs(math.log(growth[a])) * depth > math.log(GROWTH), -a))
        alpha = None if best == 1 else best
    reason = (
        f"{measured}, so similarity stays bounded above τ_c = {odds.critical_tau:.3g}, "
        f"and with τ = {found:g} it is {held:.2f} after block {depth}"
    )
    if alpha is not None and alpha in growth:
        reason += (
            f"; with it the gradient grows by {growth[1.0]:.3f} per block, {growth[1.0] ** depth:.1e} over {depth}, "
            f"and a branch weight α = {alpha:g} brings that to {growth[alpha]:.3f} (and the similarity further down)"
        )
    return Recommendation(
        reason,
        remedies(found, alpha),
        measured=True,
        level=level,
        odds=odds,
        expected_similarity=held if alpha is None else similarity(found, alpha),
        blocks=depth,
        growth=growth,
        apply_options=options,
    )


def _two_of(inputs: Any) -> Any:
    """Two sequences of a batch: the gradient's growth over many blocks is nearly the same for every sequence."""
    if not isinstance(inputs, Mapping):
        return inputs[:2]
    size = next(v.shape[0] for v in inputs.values() if isinstance(v, Tensor) and v.ndim)
    return {
        name: value[:2] if isinstance(value, Tensor) and value.ndim and value.shape[0] == size else value
        for name, value in inputs.items()
    }


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


# --- the numbers -----------------------------------------------------------------------------------


def odds_map(scope: Scope, part: str, progress: Tick | None) -> tuple[OddsMap, int]:
    """The geometric means of ρ and c over the blocks of a part, each run twice more with other tokens; and how many
    blocks there are."""
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

    batch, anatomy = scope.one_to_a_row(scope.first_batch), scope.seen_anatomy(again=True)
    with scope.undisturbed(), Machine(scope.model, anatomy, Listen({"output"}, measure)) as machine:
        call(scope.model, batch)
    means = []
    for numbers in ([m.rho for m in found], [m.feed for m in found]):
        logarithms = [math.log(number) for number in numbers if math.isfinite(number) and number > 0]
        if not logarithms:
            raise Unmeasurable("ρ and c cannot be measured: the tokens are equal, single, or not finite in every block")
        means.append(math.exp(sum(logarithms) / len(logarithms)))
    return OddsMap(*means), len(found)


def held_by(similarity: Callable[[float], float], odds: OddsMap, tau: float, level: float) -> tuple[float, float]:
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


def gradient_growth(profile: Profile, part: str = "") -> float:
    """By what factor the gradient grows per block of a part on its way to the input: (g₁/g_L)^(1/(L−1))."""
    norms = [norm for norm in profile.curve("output_gradient", part=part) if not math.isnan(norm)]
    return (norms[0] / norms[-1]) ** (1 / (len(norms) - 1)) if len(norms) > 1 else 1.0


def growth_by_weight(growth: Callable[[float], float], depth: int, prescribed: float) -> dict[float, float]:
    """α → growth, until the growth over the whole depth is allowed: 1, what is prescribed, then as the growth says.

    The logarithm of the growth falls about like α².
    """
    tried = {1.0: growth(1.0)}
    alpha = 1.0
    while math.log(tried[alpha]) * depth > math.log(GROWTH) and len(tried) < TRIALS:
        aim = math.log(GROWTH) / 2 / depth  # well inside what is allowed
        guess = alpha * math.sqrt(aim / math.log(tried[alpha]))
        alpha = float(f"{prescribed if len(tried) == 1 and prescribed < 1 else guess:.2g}")
        if alpha in tried:
            break
        tried[alpha] = growth(alpha)
    return tried
