"""What to do about a collapse: what was measured on the model, else what trained best at this depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from depthscope.diagnosis.choices import DEESCALATION, Choice, Kind, for_new_model, in_order, reason_for
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.verdict import COLLAPSES, Verdict
from depthscope.remedies import Recommendation
from depthscope.remedies.remedy import RIGHT_TO_LEFT

_NO_REMEDY = {
    "anisotropic": "no remedy: the shared component is not a loss of context.",
    "converges by training": "no remedy: training made the tokens come together.",
    "broken": "mend the numbers first.",
    "cannot tell": "measure again as the sentence above says: trained weights on inputs of their own, at least two "
    "blocks, at least two tokens that differ, the default measures.",
    "rank collapse": "no de-escalation: it takes out the mean, and the mean is not what these tokens share.",
}
_OF_NEW_WEIGHTS = "leave it as it is at this depth, and probe it again after training."
_OF_OTHERS = "leave it as it is. `depthscope depth` shows which blocks matter."


def advise(f: Facts, verdict: Verdict, measure: Callable[[], Recommendation] | None = None) -> Recommendation:
    """A remedy for collapses onto the mean; never one that mixes later tokens into earlier ones of a causal model.

    With `measure` the remedy is what was measured on the model, else what trained best in models like it.
    """
    if f.without:
        return Recommendation(
            f"nothing follows for the model as it is: it has its {f.without}. Probe it whole before you change it."
        )
    if verdict not in COLLAPSES:
        return Recommendation(_NO_REMEDY.get(verdict, _OF_NEW_WEIGHTS if f.look == "initialised" else _OF_OTHERS))
    if f.about.get("right_to_left"):
        return Recommendation(f"no de-escalation: {RIGHT_TO_LEFT}.")
    if f.sink is not None and f.last in f.sink.blocks and (measure is None or not f.about.get("causal")):
        return Recommendation(
            f"no de-escalation as it stands: token {f.sink.token}, up to {f.sink.peak:.0f} times as large as "
            "the median, is part of the mean, and taking that out would spread it over the others. Find out where it "
            "comes from."
        )
    if measure is not None:
        found = measure()
        if not (found.measured and found.odds is not None and found.remedies):
            return found
        words = f"de-escalate, as measured on this model: {found.reason}"
        if f.may_leak:
            known = "the model is causal" if f.about.get("causal") else "the model may be causal"
            words += f". The mean is that of the tokens up to each one, as {known}"
        if f.look == "trained":
            words += ". Train with it from the start or on: put into trained weights it raises the loss"
        return replace(found, reason=f"{words}.")
    if is_ranked(f):
        kind = kind_of(f)
        first = in_order([*for_new_model(kind, f.remedied), Choice(DEESCALATION, ())], kind)[0]
        if first.remedies:
            return Recommendation(reason_for(first, kind), first.remedies, blocks=f.blocks)
    known = "no training has compared remedies for this kind of model"
    return Recommendation(f"{known}: `depthscope.fix(model, inputs)` measures what de-escalation does to it.")


def is_ranked(f: Facts) -> bool:
    """Whether trainings say what is best: of a new model whose tokens see later ones, and whose blocks are known."""
    return f.look == "initialised" and f.about.get("family") != "unknown" and not f.may_leak


def kind_of(f: Facts) -> Kind:
    """Which trainings this model is compared with."""
    return Kind(f.blocks, f.pre_norm)
