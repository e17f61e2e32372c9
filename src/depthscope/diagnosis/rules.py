"""The rules: a name, when it applies, what it says. A sentence is filled with the numbers it rests on.

`VERDICTS` is asked from the top, and the first rule that applies gives the verdict and the headline. Of `FINDINGS`
every rule that applies speaks, in this order. The thresholds and their reasons stand first; what the words in
braces are is read in `wording.py`, and what the facts are in `facts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from depthscope.diagnosis import convergence, outlier_wording, value_weights
from depthscope.diagnosis import wording as say
from depthscope.diagnosis.convergence import LINE
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.verdict import Verdict
from depthscope.measures import ALIKE, EQUAL
from depthscope.probing.roles import CAN_LEARN
from depthscope.stations import IN_WORDS

# ALIKE and EQUAL are those of `measures.similarity`, CAN_LEARN is that of `probing.roles`.
SAME = 0.999  # beyond it not even a trained model has use for the rest: √(1/999) is 3 %, near what bfloat16 keeps
HALF = 0.5  # mean and differences weigh the same; below it nothing is called a collapse, whatever the trend
RISE = 1.5  # the odds must grow by this factor, or the tokens came in as alike as they leave
SOON = 2  # a trend that passes EQUAL before this many times the depth: the next doubling would be spent on it
LATE = 0.25  # a trained encoder that pools its tokens brings them together in its last quarter of blocks
MINE = 0.1  # of the energy: a sequence's own part that is more than the noise of a mean of some ten tokens
SHARED = 0.9  # of what tokens have in common: held by all sequences alike
UNEVEN = 0.05  # two similarities differ in the second digit: of tokens and directions, of the trunk and what is read
TURN = 0.02  # of a half turn, 3.6°: a block's output agrees with its input to cos 0.998
SPARE = 0.01  # of the loss
DOUBLE = math.log(2)  # growth of the log-odds that has shares worth naming
FITS = 0.25  # of the odds: a law that half of the blocks miss by more does not hold
AGREE = 2.0  # forecasts of the fits that the blocks allow: further apart than this factor they forecast nothing
ROGUE = 0.25  # of the energy, in one of hundreds of features
SEEN = 0.1  # of similarity: a rise that a reader sees in the table
NET = 0.25  # of all that the steps do: below it they cancel, and shares of what is left would mislead


@dataclass(frozen=True)
class Rule:
    """`sentence` is a format string over `values(facts)`, whose numbers become the finding's."""

    name: str
    applies: Callable[[Facts], bool]
    sentence: str
    values: Callable[[Facts], Mapping[str, float | str]]


@dataclass(frozen=True)
class VerdictRule(Rule):
    verdict: Verdict = "no collapse"


def end(f: Facts) -> float:
    return float(f.similarity[f.last])


def rises(f: Facts) -> bool:
    """Whether tokens leave more alike than they came; a start that cannot be read is low."""
    start, finish = f.log_odds[f.first], f.log_odds[f.last]
    if math.isnan(finish):  # equal beyond the format's precision
        return end(f) > f.similarity[f.first]
    return math.isnan(start) or finish - start > math.log(RISE)


def late(f: Facts) -> bool:
    """Whether tokens are alike in the last quarter of the blocks only: not before, be it for one block."""
    early = f.similarity[f.first : math.floor(f.last - max(1, LATE * f.blocks)) + 1]
    return not (early >= ALIKE).any()


def no_forecast(f: Facts) -> str | None:
    """Why nothing is said about blocks that are not there; None if something can be said, or needs no reason."""
    if f.look != "initialised":
        trained = "the weights are trained" if f.look == "trained" else "the weights may be trained (norms cannot tell)"
        return f"{trained}, and further blocks would be trained too"
    if not f.law_known:
        where = f.about.get("placement")
        seen = f"the blocks have {IN_WORDS[where]}" if where else "where the norms of the blocks stand was not seen"
        return f"{seen}, and the law that the odds follow is known for post-norm and pre-norm only"
    if f.trend is None:
        return None
    if f.trend.error > FITS:
        return f"the odds follow no known law (half of the blocks miss it by {f.trend.error:.0%} or more)"
    _, low, high = f.reach
    if low is not None and (high or f.horizon) > AGREE * low:
        other = f"at block {high}" if high else f"not within {f.horizon} blocks"
        return f"the blocks allow fits that pass 0.99 at block {low}, and fits that pass it {other}"
    return None


def arrives(f: Facts) -> bool:
    return f.reach[0] is not None and no_forecast(f) is None


def arrives_soon(f: Facts) -> bool:
    best = f.reach[0]
    return best is not None and arrives(f) and best - f.first <= SOON * (f.last - f.first)


def gross(f: Facts) -> float:
    """All that the steps do to the log-odds, in whichever direction."""
    return sum(map(abs, f.step_growth.values()))


def looks_alike(f: Facts) -> bool:
    """Whether tokens are alike after some block, and in the end for the greater part."""
    return HALF <= end(f) < SAME and float(np.nanmax(f.similarity[f.first + 1 : f.last + 1])) >= ALIKE


def anisotropic(f: Facts) -> bool:
    """Whether nearly all of what the unit tokens of a sequence share is shared by all sequences."""
    shared, own = f.energy("shared"), f.energy("sequence")
    return shared >= SHARED * (shared + own) and own < MINE


def reads(f: Facts) -> bool:
    """Whether something that is read behind norms is another than the trunk, in the second digit."""
    if not f.has("token_similarity"):
        return False
    return any(abs(read - trunk) > UNEVEN for read, trunk in say.readers(f).values())


# fmt: off
VERDICTS: tuple[VerdictRule, ...] = (
    VerdictRule("not finite", lambda f: f.broken is not None,
        "From block {block:.0f} on there are numbers that are not finite, or tokens that are all zero; at the end in "
        "{share:.0%} of the sequences ({named}). Look for weights that are NaN, and for overflow in half precision.",
        say.broken, "broken"),
    VerdictRule("weights not finite", lambda f: bool(f.profile.metadata.get("weights_not_finite")),
        "There are weights that are not finite ({named}): what was measured is what a kernel makes of NaN.",
        say.weights_not_finite, "broken"),
    VerdictRule("nothing finite enters", lambda f: f.samples == 0,
        "No sequence is finite (NaN or infinity) when it enters the blocks: mend the inputs, or what stands before the "
        "blocks.", lambda f: {"count": float(len(f.entered_broken))}, "cannot tell"),
    VerdictRule("no similarity", lambda f: not f.has(f.judged),
        "No similarity was measured{others}: take the default measures.", say.other_measures, "cannot tell"),
    VerdictRule("one token", lambda f: f.single_token,
        "{tokens:.0f} token per sequence has nothing to be compared with: give longer inputs.",
        lambda f: {"tokens": 1.0}, "cannot tell"),
    VerdictRule("one block", lambda f: f.blocks < 2,
        "{blocks:.0f} block is no depth: what happens over blocks cannot be seen.",
        lambda f: {"blocks": float(f.blocks)}, "cannot tell"),
    VerdictRule("alike at the entrance", lambda f: f.similarity[f.first] >= EQUAL,
        "The tokens are equal before block 1 ({what} {start:.4f}): give inputs that differ.",
        say.similarity, "cannot tell"),
    VerdictRule("stand-in inputs", lambda f: f.look == "trained" and bool(f.about.get("stand_in")),
        "The weights are trained, but what they were given is not what they were trained on: {stand_in}. {what} is "
        "{start:.3f} {where} and {end:.3f} at block {last:.0f} on that, and may be quite another on the model's own "
        "inputs.", say.stand_in, "cannot tell"),
    VerdictRule("anisotropic", lambda f: f.look == "trained" and looks_alike(f) and anisotropic(f),
        "The tokens look alike ({what} {end:.3f}), but by one direction that all sequences share ({shared:.0%} of the "
        "unit tokens' energy); a sequence's own part is {sequence:.1%}. Usual in trained models, no loss of context.",
        say.energy, "anisotropic"),
    VerdictRule("shared by whom",
        lambda f: f.look == "trained" and looks_alike(f) and math.isnan(f.energy("sequence"))
        and f.about["samples"] > 1,
        "The tokens look alike ({what} {start:.3f} {where}, {end:.3f} at block {last:.0f}), as in many trained models; "
        "whether by one direction that all sequences share or sequence by sequence was not measured: take the "
        "measures of the verdict.", say.similarity, "cannot tell"),
    VerdictRule("converges", lambda f: f.look == "trained" and rises(f) and ALIKE <= end(f) < SAME and late(f),
        "The tokens of a sequence come together in the last {late:.0f} of {blocks:.0f} blocks: {what} {before:.3f} "
        "before them, {end:.3f} after. In trained weights that is what training made{pool}, not a loss of depth.",
        say.convergence, "converges by training"),
    VerdictRule("collapsed", lambda f: end(f) >= EQUAL and rises(f),
        "The tokens of a sequence become equal: {what} {start:.3f} {where}, {end:.4f} at block {last:.0f}.",
        say.similarity, "collapsed"),
    VerdictRule("collapsing", lambda f: rises(f) and (end(f) >= ALIKE or (end(f) >= HALF and arrives_soon(f))),
        "The tokens of a sequence grow alike: {what} {start:.3f} {where}, {end:.3f} at block {last:.0f}.",
        say.similarity, "collapsing"),
    VerdictRule("rank collapse",
        lambda f: not f.rank_is_spoilt and f.end(f.rank) < LINE <= f.start(f.rank),
        "The tokens fall onto a line, not onto their mean: effective rank {rank_start:.1f} {where}, "
        "{rank_end:.2f} at block {last:.0f}, while {what} is {end:.3f} (as with two opposite clusters).",
        say.rank, "rank collapse"),
    VerdictRule("rising", lambda f: rises(f) and end(f) >= HALF,
        "In {blocks:.0f} blocks the tokens of a sequence grow more alike, but not equal: {what} {start:.3f} {where}, "
        "{end:.3f} at block {last:.0f}.",
        say.similarity, "no collapse"),
    VerdictRule("as they came", lambda f: end(f) >= HALF,
        "The tokens of a sequence leave about as alike as they came, or less: {what} {start:.3f} {where}, {end:.3f} at "
        "block {last:.0f}.", say.similarity, "no collapse"),
    VerdictRule("different", lambda f: True,
        "The tokens of a sequence stay different: {what} {start:.3f} {where}, {end:.3f} at block {last:.0f}.",
        say.similarity, "no collapse"),
)

FINDINGS: tuple[Rule, ...] = (
    Rule("crossing", lambda f: float(np.nanmax(f.similarity[f.first : f.last + 1])) >= ALIKE,
        "{crossing}", say.crossings),
    Rule("rise", lambda f: end(f) - f.similarity[f.first] >= SEEN,
        "{which} {part}: from {before:.3f} to {after:.3f}.", say.rise),
    Rule("sink", lambda f: f.sink is not None,
        "Token {token:.0f}{texts} is an outlier in {samples:.0f} of {of:.0f} sequences: {runs}{others}. {birth}{drawn}"
        " At block {last:.0f} raw t_sim is {raw:.3f}, that of directions without outliers {robust:.3f}; the second is "
        "judged.", outlier_wording.sink),
    Rule("few outliers", lambda f: f.outliers is not None and f.sink is None,
        "Outlier tokens are in {carriers:.0f} of {of:.0f} sequences (up to {peak:.0f} × the median norm): too few "
        "for leaving outliers out of what is judged.", outlier_wording.few_outliers),
    Rule("rogue feature", lambda f: f.rogue_feature(ROGUE) is not None,
        "One of {width:.0f} features, number {feature:.0f}, carries {share:.0%} of the energy{without} after block "
        "{block:.0f} (in {samples:.0f} of {of:.0f} sequences): a rogue dimension.",
        lambda f: outlier_wording.rogue_feature(f, ROGUE)),
    Rule("read", reads, "{text}.", say.read),
    Rule("uneven", lambda f: f.sink is None and abs(f.end("token_similarity") - f.end("direction_similarity")) > UNEVEN,
        "Tokens are of unequal size: raw t_sim {raw:.3f}, that of their directions {robust:.3f} at block {last:.0f}.",
        say.raw_and_robust),
    Rule("idle depth", lambda f: say.blocks_after(f, EQUAL) > 0,
        "{idle:.0f} of {blocks:.0f} blocks work on tokens that are already equal to within 1 % of their energy"
        "{scaled} ({short} ≥ {level:g}).", lambda f: say.idle(f, EQUAL)),
    Rule("rank", lambda f: f.has(f.rank) and not f.rank_is_spoilt,
        "Directions left: effective rank{without} {rank_start:.1f} {where}, {rank_end:.1f} at block {last:.0f}.",
        say.rank),
    Rule("rank beside a sink", lambda f: f.has(f.rank) and f.rank_is_spoilt,
        "Effective rank {rank_start:.1f} → {rank_end:.1f} is the outlier's doing as well and is not judged.", say.rank),
    Rule("three definitions", convergence.measured,
        "Input convergence is {input_said} (‖HFC‖/‖LFC‖ {input_start:.3g} → {input_end:.3g}), angle convergence "
        "{angle_said} (mean cosine {angle_start:.3f} → {angle_end:.3f}), rank convergence {rank_said} (effective rank"
        "{without} {rank_start:.1f} → {rank_end:.1f}).", convergence.definitions),
    Rule("shared by all",
        lambda f: f.has("energy_shared") and end(f) >= HALF and anisotropic(f)
        and not (f.look == "trained" and looks_alike(f)),
        "What the tokens share is mostly common to all sequences: {shared:.0%} of the unit tokens' energy at block "
        "{last:.0f} ({shared_start:.0%} {where}); {sequence:.1%} is a sequence's own.", say.energy),
    Rule("loss of context", lambda f: f.end("energy_sequence") >= max(MINE, RISE * f.start("energy_sequence")),
        "Each sequence's tokens come to share a vector of their own: {sequence:.0%} of the unit tokens' energy at "
        "block {last:.0f}, {sequence_start:.0%} {where}{why}.", say.context),
    Rule("sequences alike", lambda f: f.end("energy_position") >= max(SHARED, RISE * f.start("energy_position")),
        "Different sequences become equal, position by position ({position:.0%} of the unit tokens' energy, "
        "{position_start:.0%} {where}); the tokens within a sequence do not.", say.positions),
    Rule("steps", lambda f: sum(f.step_growth.values()) > max(DOUBLE, NET * gross(f)),
        "The {odds} grow by a factor of {factor:.3g}{until}. Of that, in logarithms, {shares}.", say.steps),
    Rule("steps cancel", lambda f: sum(f.step_growth.values()) <= NET * gross(f) > NET * DOUBLE,
        "The steps work against each other: {changes}.", say.opposed_steps),
    Rule("trend arrives", lambda f: arrives(f) and end(f) < EQUAL and rises(f),
        "{law}; at this rate {short} passes 0.99 at about block {arrival:.0f}{range}.", say.arrival),
    Rule("trend settles",
        lambda f: f.trend is not None and no_forecast(f) is None and f.reach[0] is None and end(f) < EQUAL,
        "{law}: no sign of passing 0.99 within {horizon:.0f} blocks.", say.law),
    Rule("trend passed",
        lambda f: f.trend is not None and no_forecast(f) is None and end(f) >= EQUAL and f.trend.map.rho > 1,
        "{law}{halving}.", say.halving),
    Rule("no forecast", lambda f: rises(f) and end(f) < EQUAL and f.blocks >= 4 and no_forecast(f) is not None,
        "No forecast for more than {blocks:.0f} blocks: {why}.",
        lambda f: {"blocks": float(f.blocks), "why": str(no_forecast(f))}),
    Rule("too few blocks", lambda f: f.trend is None and f.blocks < 4,
        "{blocks:.0f} blocks do not make a trend.", lambda f: {"blocks": float(f.blocks)}),
    Rule("theory", lambda f: f.attention is not None and f.attention.omega_delta < 1,
        "Attention's step escalates by r = {rate:.3f} per block; theory at this branch size: at least {bound:.3f} "
        "(Thm 2.6), about {estimate:.3f} (Cor. 2.7){caveat}.", say.theory),
    Rule("theory says nothing", lambda f: f.attention is not None and f.attention.omega_delta >= 1,
        "Attention's step escalates by r = {rate:.3f} per block. Thm 2.6 does not apply (ω + δ = {omega_delta:.2f}, "
        "less than 1 is needed); the estimate of Cor. 2.7 is {estimate:.3f}{caveat}.", say.theory),
    Rule("spectra", lambda f: not math.isnan(f.mean_gap),
        "Attention's spectral gap 1 − |λ₂| is {gap:.3f} on average; near 1 a head passes on little but a mean{caveat}.",
        say.spectra),
    Rule("value weights", lambda f: value_weights.leaning(f) is not None,
        "The value weights of {where} mostly {does} ({share:.0%} of the eigenvalues μ of W_V W_O are negative). The "
        "largest |1 + μ| decides in the end, and is above 1 in {growing:.0%} of the heads: for one attention matrix, "
        "applied again and again, theory says {theory}. Measured over {where}: {before:.3f} to {after:.3f}, {rest}.",
        value_weights.values),
    Rule("attention learns", lambda f: bool(f.learning),
        "The attention of {able:.0f} of {blocks:.0f} blocks can learn what to attend to: the gradient of queries and "
        "keys is at least {percent:g} % of that of values and output. It is {start:.2g} of it in block {first:.0f} and "
        "{end:.2g} in block {last:.0f}{unable}.", lambda f: say.learning(f, CAN_LEARN)),
    Rule("quiet blocks", lambda f: bool(f.quiet_blocks(TURN)),
        "{count:.0f} of {blocks:.0f} blocks turn their tokens by less than {degrees:.1f}° (blocks {where}).",
        lambda f: say.quiet(f, TURN)),
    Rule("spare blocks", lambda f: f.look != "initialised" and bool(f.spare_blocks(SPARE)),
        "{count:.0f} of {blocks:.0f} blocks can be skipped, one at a time, for less than {percent:.0f} % of the loss: "
        "{changes}.",
        lambda f: say.spare(f, SPARE)),
    Rule("initialised", lambda f: f.look == "initialised",
        "The {norms:.0f} norms in the blocks are as an initialiser leaves them: the weights are taken for "
        "random.", say.weights),
    Rule("trained", lambda f: f.look == "trained",
        "The weights look trained: {moved:.0f} of the {norms:.0f} norms in the blocks have moved. The theory is for "
        "random weights.", say.weights),
    Rule("normal", lambda f: f.reference is not None and f.has("token_similarity"),
        "At block {block:.0f} t_sim is {value:.3f}, {side} the {low:.3f} to {high:.3f} of {label}.", say.normal),
    Rule("not measured", lambda f: bool(say.missing(f)),
        "Not measured ({count:.0f} of 4): {missing}.", say.not_measured),
)
# fmt: on

# What is said of the weights and of what was not measured: after all that was found.
CLOSING = frozenset({"initialised", "trained", "normal", "not measured"})

# What rests on theorems and laws for blocks with all their parts, or on other models: not said of a model without some.
OF_WHOLE_MODELS = frozenset(
    {"theory", "theory says nothing", "trend arrives", "trend settles", "trend passed", "no forecast", "normal"}
)
