"""What to do about a collapse: de-escalation with a strength from the odds map, or nothing, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.trained_remedies import trained_at
from depthscope.diagnosis.verdict import COLLAPSES, Verdict
from depthscope.remedies import DeEscalate, Recommendation
from depthscope.remedies.remedy import RIGHT_TO_LEFT
from depthscope.theory import level_to_hold, odds_of, similarity_of
from depthscope.theory.causal_means import own_token_share

CAUTION = 0.9  # τ holds for nine of ten fits that the data allow
STRONGEST_CAUSAL = 0.95  # with τ = 1 and a prefix mean little is left of the second token: half a difference
WORN = 0.5  # of a token's energy: if a causal mean leaves less of it, that is said
LONGEST = 512  # tokens up to which a causal mean's effect is computed; beyond, it would take hundreds of blocks
STRENGTH_UNKNOWN = 1.0  # Yu & Zhang's full de-escalation, where too few blocks say what would do

_NOTHING = {
    "no collapse": "nothing at this depth.",
    "anisotropic": "nothing; the shared direction is not a loss of context.",
    "converges by training": "nothing; training made the tokens come together.",
    "broken": "mend the numbers first.",
    "cannot tell": "measure again with what the verdict misses: the default measures, on a model of at least two "
    "blocks and sequences of at least two tokens that differ, and trained weights on inputs of their own.",
    "rank collapse": "no de-escalation: it takes out the mean, and the mean is not what these tokens share.",
}


def advise(f: Facts, verdict: Verdict, measure: Callable[[], Recommendation] | None = None) -> Recommendation:
    """A remedy for collapses onto the mean; never one that mixes later tokens into earlier ones of a causal model.

    With `measure` the remedy is what was measured on the model, else an estimate from the profile's trend.
    """
    if f.without:
        return Recommendation(
            f"nothing follows for the model as it is: it has its {f.without}. Probe it whole before you change it."
        )
    if verdict not in COLLAPSES:
        return Recommendation(_NOTHING[verdict])
    if f.about.get("right_to_left"):
        return Recommendation(f"no de-escalation: {RIGHT_TO_LEFT}.")
    if f.sink is not None and f.sink.is_there(f.last) and (measure is None or not f.about.get("causal")):
        return Recommendation(
            f"no de-escalation as it stands: token {f.sink.token}, up to {f.sink.largest.peak:.0f} times as large as "
            "the median, is part of the mean, and taking that out would spread it over the others. Find out where it "
            "comes from."
        )
    if measure is not None:
        found = measure()
        return replace(found, reason=_measured(f, found)) if found.measured and found.remedies else found
    tau, critical, expected = _strength(f)
    # `apply` cannot tell by itself what the probe has tried, or was told.
    tried = f.about.get("family") == "unknown" or f.about.get("causal_by")
    hints = {"causal": False} if tried and not f.may_leak else {}
    return Recommendation(
        reason=_estimated(f, tau, critical, expected),
        remedies=(DeEscalate(tau, mixing="prefix" if f.may_leak else "auto", blocks=f.remedied),),
        odds=None if f.trend is None else f.trend.map,
        critical_tau=critical,
        expected_similarity=expected,
        blocks=f.blocks,
        apply_options=hints,
    )


def _strength(f: Facts) -> tuple[float, float | None, float | None]:
    """τ, τ_c, and t_sim at the last block with it.

    Without a trend: full strength and no promise. Blocks that share weights push the mean along one direction
    again and again, so the level is not that of the map, and none is promised. Pre-norm has no single τ_c, and
    that of a prefix mean is not 1 − ρ^(−1/2).
    """
    strongest = STRONGEST_CAUSAL if f.may_leak else 1.0
    if f.trend is None:
        return min(STRENGTH_UNKNOWN, strongest), None, None
    aim = odds_of(level_to_hold(float(f.similarity[f.first])))
    needed = [step.tau_for(aim) for step in (f.trend.map, *f.trend.alternatives)]
    tau = min(math.ceil(100 * float(np.quantile(needed, CAUTION))) / 100, strongest)
    start = f.log_odds[f.first]
    odds = f.trend.map.after(math.exp(start) if np.isfinite(start) else 0.0, f.last - f.first, tau)
    critical = None if f.pre_norm or f.may_leak else f.trend.map.critical_tau
    return tau, critical, None if _no_promise(f) else similarity_of(odds)


def _no_promise(f: Facts) -> str | None:
    """Why the map does not say where similarity ends up; None if it does."""
    if f.about.get("shared_weights"):
        return "the blocks share their weights"
    return "the weights are trained" if f.look == "trained" else None


def _estimated(f: Facts, tau: float, critical: float | None, expected: float | None) -> str:
    words = [f"de-escalate the output of every block with τ of about {tau:g}, an estimate from this profile"]
    if f.trend is None:
        unknown = "so few blocks do not say" if f.law_known else "where the norms stand is not known, and so not"
        words.append(f", nearly or fully: {unknown} how much is enough")
    if critical is not None:
        words.append(f"; below τ_c, about {critical:.3f}, the collapse goes on")
    if expected is not None:
        now = f"{f.similarity[f.last]:.3f}"
        about = "at most about " if f.pre_norm else "roughly " if f.may_leak else "about "
        words.append(f". By the odds map t_sim at block {f.last} is then {about}{expected:.2f} instead of {now}")
    elif f.trend is not None:
        words.append(f". No level is promised: {_no_promise(f)}")
    words.append(_caveats(f, tau))
    words.append(
        ". `depthscope.fix(model, inputs)` measures τ on the model itself, and what weight the branches need with it"
    )
    return "".join(words) + "."


def _measured(f: Facts, found: Recommendation) -> str:
    return f"de-escalate, as measured on this model: {found.reason}{_caveats(f, found.tau)}."


def _caveats(f: Facts, tau: float | None) -> str:
    words = []
    if f.may_leak:
        known = "the model is causal" if f.about.get("causal") else "the model may be causal"
        words.append(f". The mean is that of the tokens up to each one, as {known}{_worn_down(f, tau)}")
    if f.look == "trained":
        words.append(". Train with it from the start or on: put into trained weights it raises the loss")
    elif f.look == "initialised" and not f.may_leak:
        words.append(f". {trained_at(f.blocks)}: which one suits your task, `depthscope compare` measures")
    return "".join(words)


def _worn_down(f: Facts, tau: float | None) -> str:
    """What a causal mean in every block leaves of a token, where that is less than half."""
    tokens = int(f.about.get("tokens") or 0)
    if tau is None or not 1 < tokens <= LONGEST:
        return ""
    every, tenth = (float(own_token_share(tokens, tau, blocks).mean()) for blocks in (f.blocks, f.blocks // 10))
    if every >= WORN:
        return ""
    return (
        f"; over {f.blocks} blocks it leaves {every:.0%} of a token's energy its own, and with every=10 {tenth:.0%}, "
        "which trained better at 100 blocks (docs/studies/depth-language.md)"
    )
