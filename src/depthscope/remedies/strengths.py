"""The numbers of a recommendation, measured on a model: ρ and c of its blocks, the τ that holds a level, and the α that
keeps the gradient from growing over the depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from depthscope.hooks import Listen, Machine, Visit
from depthscope.inputs import call
from depthscope.measures import TokenMatrix
from depthscope.probing import Profile
from depthscope.progress import Tick
from depthscope.scope import Scope
from depthscope.theory import GROWTH, Gains, OddsMap, measure_map, odds_of, prescribe

TRIALS = 4  # of τ, each a forward pass; of α, each a forward and a backward pass
HELD = 1.05  # times the wanted level: what is still called held


class Unmeasurable(ValueError):
    """The odds of similarity cannot be measured on these inputs."""


def odds_maps(scope: Scope, part: str, progress: Tick | None) -> tuple[OddsMap, int]:
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
    return OddsMap(_geometric_mean([m.rho for m in found]), _geometric_mean([m.feed for m in found])), len(found)


def _geometric_mean(numbers: list[float]) -> float:
    usable = [number for number in numbers if math.isfinite(number) and number > 0]
    if not usable:
        raise Unmeasurable("ρ and c cannot be measured: the tokens are equal, single, or not finite in every block")
    return math.exp(sum(map(math.log, usable)) / len(usable))


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


def prescribed_weight(about: Mapping[str, Any], odds: OddsMap, level: float, depth: int) -> float:
    """What theory prescribes for post-norm blocks of this ρ and c; 1 where it has nothing to say of them.

    `about`: `placement` and `tokens`, from a profile's metadata.
    """
    if about["placement"] != "post":
        return 1.0
    try:
        return prescribe(depth, Gains.of_odds(odds, about["tokens"] or 0), level=level).alpha
    except ValueError:  # no FFN of ReLU brings about such a c, or no α is small enough
        return 1.0


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
