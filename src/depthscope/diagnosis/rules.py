"""The verdict: `VERDICTS` is asked from the top, and the first rule that applies gives the verdict and its sentence.

The thresholds and their reasons stand first; what the facts are is read in `facts.py`, what is said besides the
verdict in `findings.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.verdict import Verdict
from depthscope.measures import ALIKE, EQUAL
from depthscope.naming import sequences_of

# ALIKE and EQUAL are those of `measures.similarity`.
SAME = 0.999  # beyond it not even a trained model has use for the rest: √(1/999) is 3 %, near what bfloat16 keeps
HALF = 0.5  # mean and differences weigh the same; below it nothing is called a collapse, whatever the trend
RISE = 1.5  # the odds must grow by this factor, or the tokens came in as alike as they leave
SOON = 2  # a trend that passes EQUAL before this many times the depth: the next doubling would be spent on it
LATE = 0.25  # a trained encoder that pools its tokens brings them together in its last quarter of blocks
MINE = 0.1  # of the energy: a sequence's own part that is more than the noise of a mean of some ten tokens
SHARED = 0.9  # of what tokens have in common: held by all sequences alike
LINE = 2.0  # effective rank: two directions carry all tokens
UNKNOWN = 0.05  # of the tokens: of a text that a tokenizer knows, fewer are [UNK]
FOREIGN = 0.5  # of the ids: more than half are none that the tokenizer gives
REPEATED = 0.05  # of all runs of eight tokens are different ones: the text repeats itself twenty times

Said = tuple[str, Mapping[str, float]]  # a sentence, and the numbers it rests on


@dataclass(frozen=True)
class VerdictRule:
    name: str
    verdict: Verdict
    applies: Callable[[Facts], bool]
    say: Callable[[Facts], Said]


def end(f: Facts) -> float:
    return float(f.similarity[f.last])


def rises(f: Facts) -> bool:
    """Whether tokens leave more alike than they came; a start that cannot be read is low."""
    start, finish = f.log_odds[f.first], f.log_odds[f.last]
    if math.isnan(finish):  # equal beyond the format's precision
        return end(f) > float(f.similarity[f.first])
    return bool(math.isnan(start) or finish - start > math.log(RISE))


def looks_alike(f: Facts) -> bool:
    """Whether tokens of trained weights are alike after some block, and in the end for the greater part."""
    alike = float(np.nanmax(f.similarity[f.first + 1 : f.last + 1])) >= ALIKE
    return f.look == "trained" and HALF <= end(f) < SAME and alike


def anisotropic(f: Facts) -> bool:
    """Whether nearly all of what the unit tokens of a sequence share is shared by all sequences."""
    shared, own = f.energy("shared"), f.energy("sequence")
    return shared >= SHARED * (shared + own) and own < MINE


def converges(f: Facts) -> bool:
    """Whether tokens are alike in the last quarter of the blocks only: not before, be it for one block."""
    early = f.similarity[f.first : math.floor(f.last - max(1, LATE * f.blocks)) + 1]
    return f.look == "trained" and rises(f) and ALIKE <= end(f) < SAME and not bool((early >= ALIKE).any())


def collapsing(f: Facts) -> bool:
    """Whether tokens grow alike, and are so, or would soon be in further blocks."""
    soon = f.arrival is not None and f.arrival[0] - f.first <= SOON * f.blocks
    return rises(f) and (end(f) >= ALIKE or (end(f) >= HALF and soon))


def ends(f: Facts) -> str:
    """Token similarity is 0.008 before block 1 and 0.587 after block 12."""
    return f"{f.what} is {f.similarity[f.first]:.3f} before block {f.first + 1} and {end(f):.3f} after block {f.last}"


def numbers(f: Facts, **more: float) -> dict[str, float]:
    found = {"start": f.similarity[f.first], "end": f.similarity[f.last], "last": f.last, "blocks": f.blocks, **more}
    return {name: float(value) for name, value in found.items()}


def _with(sentence: str) -> Callable[[Facts], Said]:
    """The sentence, then how alike the tokens are at both ends."""
    return lambda f: (f"{sentence}: {ends(f)}.", numbers(f))


def _not_finite(f: Facts) -> Said:
    assert f.broken is not None
    block, share, samples = f.broken
    return (
        f"From block {block} on there are numbers that are not finite, or tokens that are all zero; at the end in "
        f"{share:.0%} of the sequences ({sequences_of(samples)}). Look for weights that are NaN, and for overflow in "
        "half precision.",
        {"block": float(block), "share": share},
    )


def _weights_not_finite(f: Facts) -> Said:
    names = f.profile.metadata["weights_not_finite"]
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    said = f"Some weights are not finite ({named}), so no number of this model means anything."
    return said, {"count": float(len(names))}


def _poor_inputs(f: Facts) -> Said | None:
    """Why these inputs carry no verdict: the tokenizer does not know them, or they say one thing again and again."""
    ids: Mapping[str, float] = f.about.get("ids") or {}
    found = {name: float(ids.get(name, math.nan)) for name in ("unknown", "foreign", "different")}
    if found["unknown"] > UNKNOWN:
        why = f"the tokenizer does not know {found['unknown']:.0%} of the tokens. Give text of the model's own kind."
    elif found["foreign"] > FOREIGN:
        why = f"{found['foreign']:.0%} of the ids are none of the tokenizer's. Is it the model's own tokenizer?"
    elif ids.get("equal"):
        why = "all sequences are the same. Give different ones."
    elif found["different"] <= REPEATED:
        why = "the text repeats itself again and again. Give text that does not."
    else:
        return None
    return f"These inputs cannot carry a verdict: {why}", found


def _converges(f: Facts) -> Said:
    since = f.passes(ALIKE)
    assert since is not None
    count, before = f.last - since + 1, float(f.similarity[since - 1])
    pool = " (sentence encoders pool their tokens)" if f.about.get("causal") is False else ""
    return (
        f"The tokens of a sequence come together in the last {count} of {f.blocks} blocks: {f.what} is {before:.3f} "
        f"before them, {end(f):.3f} after. In trained weights that is what training made{pool}, not a loss of depth.",
        numbers(f, late=count, before=before),
    )


def _anisotropic(f: Facts) -> Said:
    shared, own = f.energy("shared"), f.energy("sequence")
    return (
        f"The tokens look alike ({f.what} {end(f):.3f}) because every token of every text has the same large component "
        f"({shared:.0%} of their energy); what a sequence has in common is {own:.1%}. Usual in trained models, no loss "
        "of context.",
        numbers(f, shared=shared, shared_start=f.start("energy_shared"), sequence=own),
    )


def _rank_collapse(f: Facts) -> Said:
    before, after = f.start(f.rank), f.end(f.rank)
    return (
        f"The tokens fall onto a line, not onto their mean, as with two opposite clusters: the effective rank goes "
        f"from {before:.1f} to {after:.2f}, while {f.what} is {end(f):.3f}.",
        numbers(f, rank_start=before, rank_end=after),
    )


# fmt: off
VERDICTS: tuple[VerdictRule, ...] = (
    VerdictRule("zeros enter", "cannot tell", lambda f: f.entered_zero, lambda f: (
        f"All tokens are zero before block {f.first + 1}: give inputs that differ.", {"block": float(f.first)})),
    VerdictRule("not finite", "broken", lambda f: f.broken is not None, _not_finite),
    VerdictRule("weights not finite", "broken",
        lambda f: bool(f.profile.metadata.get("weights_not_finite")), _weights_not_finite),
    VerdictRule("nothing finite enters", "cannot tell", lambda f: f.samples == 0, lambda f: (
        "No sequence is finite (NaN or infinity) when it enters the blocks: mend the inputs, or what stands before the "
        "blocks.", {"count": float(len(f.entered_broken))})),
    VerdictRule("no similarity", "cannot tell", lambda f: f.judged not in f.profile.names(), lambda f: (
        "No similarity was measured: take the default measures.", {"measured": float(len(f.profile.names()))})),
    VerdictRule("one token", "cannot tell", lambda f: f.single_token, lambda f: (
        "1 token per sequence has nothing to be compared with: give longer inputs.", {"tokens": 1.0})),
    VerdictRule("one block", "cannot tell", lambda f: f.blocks < 2, lambda f: (
        f"{f.blocks} block is no depth: give a model of at least two.", {"blocks": float(f.blocks)})),
    VerdictRule("poor inputs", "cannot tell",
        lambda f: _poor_inputs(f) is not None, lambda f: _poor_inputs(f) or ("", {})),
    VerdictRule("alike at the entrance", "cannot tell", lambda f: f.similarity[f.first] >= EQUAL, lambda f: (
        f"The tokens are equal before block {f.first + 1} ({f.what} {f.similarity[f.first]:.4f}): give inputs that "
        "differ.", numbers(f))),
    VerdictRule("stand-in inputs", "cannot tell",
        lambda f: f.look == "trained" and bool(f.about.get("stand_in")), lambda f: (
        f"The weights are trained, but these inputs are not what they were trained on: {f.about['stand_in']}. "
        f"{f.what[0].upper()}{ends(f)[1:]}, and may be quite different on the model's own inputs.", numbers(f))),
    VerdictRule("anisotropic", "anisotropic", lambda f: looks_alike(f) and anisotropic(f), _anisotropic),
    VerdictRule("shared by whom", "cannot tell",
        lambda f: looks_alike(f) and math.isnan(f.energy("sequence")) and f.about["samples"] > 1, lambda f: (
        f"The tokens look alike, as in many trained models: {ends(f)}. Whether all texts share what makes them alike, "
        'or each text its own, was not measured: take measures="verdict".', numbers(f))),
    VerdictRule("converges", "converges by training", converges, _converges),
    VerdictRule("collapsed", "collapsed", lambda f: end(f) >= EQUAL and rises(f),
        _with("The tokens of a sequence become equal")),
    VerdictRule("collapsing", "collapsing", collapsing, _with("The tokens of a sequence grow alike")),
    VerdictRule("rank collapse", "rank collapse",
        lambda f: not f.rank_is_spoilt and f.end(f.rank) < LINE <= f.start(f.rank), _rank_collapse),
    VerdictRule("rising", "no collapse", lambda f: rises(f) and end(f) >= HALF,
        _with("The tokens of a sequence grow more alike, but not equal")),
    VerdictRule("as they came", "no collapse", lambda f: end(f) >= HALF,
        _with("The tokens of a sequence leave about as alike as they came, or less")),
    VerdictRule("different", "no collapse", lambda f: True, _with("The tokens of a sequence do not become equal")),
)
# fmt: on
