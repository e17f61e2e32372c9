"""What to do about a collapse: what trained best at this depth, or de-escalation with a strength from the odds map."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from depthscope.diagnosis.choices import DEESCALATION, Choice, Kind, for_new_model, in_order, reason_for
from depthscope.diagnosis.facts import Facts
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

_NO_REMEDY = {
    "anisotropic": "no remedy: the shared component is not a loss of context.",
    "converges by training": "no remedy: training made the tokens come together.",
    "broken": "mend the numbers first.",
    "cannot tell": "measure again as the sentence above says: trained weights on inputs of their own, at least two "
    "blocks, at least two tokens that differ, the default measures.",
    "rank collapse": "no de-escalation: it takes out the mean, and the mean is not what these tokens share.",
}
_AS_IT_IS = {
    "initialised": "leave it as it is at this depth, and probe it again after training.",
    "trained": "leave it as it is. `depthscope depth` shows which blocks matter.",
}


def advise(f: Facts, verdict: Verdict, measure: Callable[[], Recommendation] | None = None) -> Recommendation:
    """A remedy for collapses onto the mean; never one that mixes later tokens into earlier ones of a causal model.

    With `measure` the remedy is what was measured on the model, else an estimate from the profile.
    """
    if f.without:
        return Recommendation(
            f"nothing follows for the model as it is: it has its {f.without}. Probe it whole before you change it."
        )
    if verdict not in COLLAPSES:
        return Recommendation(_NO_REMEDY.get(verdict) or _AS_IT_IS.get(f.look, _AS_IT_IS["trained"]))
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
        if found.measured and found.odds is not None and found.remedies:
            return replace(
                found, reason=f"de-escalate, as measured on this model: {found.reason}{_caveats(f, found.tau)}."
            )
        return found
    if is_ranked(f):
        kind = kind_of(f)
        first = in_order([*for_new_model(kind, f.remedied), Choice(DEESCALATION, ())], kind)[0]
        if first.remedies:
            return Recommendation(reason_for(first, kind), first.remedies, blocks=f.blocks)
    return deescalation(f)


def is_ranked(f: Facts) -> bool:
    """Whether trainings say what is best: of a new model whose blocks are known, and so can be changed inside."""
    return f.look == "initialised" and f.about.get("family") != "unknown"


def kind_of(f: Facts) -> Kind:
    """Which trainings this model is compared with."""
    return Kind(f.blocks, f.may_leak, f.pre_norm)


def deescalation(f: Facts) -> Recommendation:
    """De-escalation with a strength estimated from the profile's trend."""
    tau, critical, expected = _strength(f)
    # `apply` cannot tell by itself what the probe has tried, or what the user said.
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
    words = f"de-escalate the output of every block with τ of about {tau:g}, an estimate from this profile"
    if critical is not None:
        words += f" (below {critical:.3f} the collapse goes on)"
    if expected is not None:
        about = "at most about " if f.pre_norm else "roughly " if f.may_leak else "about "
        words += (
            f". Similarity after block {f.last} is then {about}{expected:.2f} instead of {f.similarity[f.last]:.3f}"
        )
    elif f.trend is not None:
        words += f". No level is promised: {_no_promise(f)}"
    return f"{words}{_caveats(f, tau)}. `depthscope.fix(model, inputs)` measures it on the model."


def _caveats(f: Facts, tau: float | None) -> str:
    words = ""
    if f.may_leak:
        known = "the model is causal" if f.about.get("causal") else "the model may be causal"
        words += f". The mean is that of the tokens up to each one, as {known}{_worn_down(f, tau)}"
    if f.look == "trained":
        words += ". Train with it from the start or on: put into trained weights it raises the loss"
    return words


def _worn_down(f: Facts, tau: float | None) -> str:
    """What a causal mean in every block leaves of a token, where that is less than half."""
    tokens = int(f.about.get("tokens") or 0)
    if tau is None or not 1 < tokens <= LONGEST:
        return ""
    every, tenth = (float(own_token_share(tokens, tau, blocks).mean()) for blocks in (f.blocks, f.blocks // 10))
    if every >= WORN:
        return ""
    return f"; over {f.blocks} blocks it leaves {every:.0%} of a token's energy its own, with every=10 {tenth:.0%}"
