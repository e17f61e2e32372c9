"""What is said besides the verdict: a function each, which returns a finding with its numbers, or None.

`FINDINGS` has them in the order of this file; which are shown first stands in `verdict.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from depthscope.diagnosis import forecast, value_weights
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.outliers import Run
from depthscope.diagnosis.rules import HALF, MINE, RISE, SHARED, anisotropic, end, finding, looks_alike
from depthscope.diagnosis.steps import has_steps
from depthscope.measures import ALIKE, EQUAL
from depthscope.naming import blocks_of, ranges
from depthscope.probing.roles import CAN_LEARN
from depthscope.stations import FINAL
from depthscope.usage import Finding

UNEVEN = 0.05  # two similarities differ in the second digit: of tokens and directions, of the trunk and what is read
TURN = 0.02  # of a half turn, 3.6°: a block's output agrees with its input to cos 0.998
SPARE = 0.01  # of the loss
DOUBLE = math.log(2)  # growth of the log-odds that has shares worth naming
ROGUE = 0.25  # of the energy, in one of hundreds of features
SEEN = 0.1  # of similarity: a rise that a reader sees in the table
NET = 0.25  # of all that the steps do: below it they cancel, and shares of what is left would mislead
_FALLS = 0.1  # of what it is in the first block: less is a fall with depth
_NAMED = 0.005  # shares that round to 0 % are not named
_LETTERS = 20  # of a token's text that are shown
_STEP = {"FFN": "the FFN", "norm": "the norm"}
_READERS = {"attention_input": "what attention reads", "ffn_input": "what the FFN reads"}

# Said after all that was found.
CLOSING = frozenset({"initialised", "trained", "normal", "not measured"})

# What rests on theorems and laws for blocks with all their parts, or on other models: not said of a model without some.
OF_WHOLE_MODELS = frozenset({"theory", "trend arrives", "trend settles", "trend passed", "no forecast", "normal"})

Find = Callable[[Facts], Finding | None]


@dataclass(frozen=True)
class Rule:
    names: tuple[str, ...]  # of the findings that it may return
    find: Find


FINDINGS: list[Rule] = []


def says(*names: str) -> Callable[[Find], Find]:
    """Adds the function to the table."""

    def add(find: Find) -> Find:
        FINDINGS.append(Rule(names, find))
        return find

    return add


# --- how alike the tokens are, and where they become so -----------------------------------------------


@says("crossing")
def crossing(f: Facts) -> Finding | None:
    """Where similarity passes 0.9 and 0.99. A curve that comes back says where it ends."""
    curve = f.similarity[f.first : f.last + 1]
    if not np.nanmax(curve) >= ALIKE:
        return None
    blocks = range(f.first, f.last + 1)
    passed = [(level, next(b for b in blocks if f.similarity[b] >= level)) for level in (ALIKE, EQUAL) if
              np.nanmax(curve) >= level]  # fmt: skip
    said = f"{f.what[0].upper()}{f.what[1:]} passes " + " and ".join(
        f"{level:g} after block {b}" for level, b in passed
    )
    below = [b for b in blocks if b > passed[0][1] and f.similarity[b] < ALIKE]
    if end(f) < ALIKE:
        said += f", and comes back to {end(f):.3f} after block {f.last}"
    elif below:
        said += f", and is below {ALIKE:g} again after {blocks_of(below)}"
    since = f.passes(EQUAL)
    idle = 0 if since is None else f.last - max(since, f.first)
    if idle:
        said += f": {idle} of {f.blocks} blocks work on tokens that are equal to within 1 %"
    stays = {f"passes_{level:g}": float(b) for level in (ALIKE, EQUAL) if (b := f.passes(level)) is not None}
    return finding("crossing", said + ".", end=end(f), idle=idle, **stays)


@says("rise")
def rise(f: Facts) -> Finding | None:
    """Where similarity rises most."""
    if end(f) - f.similarity[f.first] < SEEN:
        return None
    start, stop, share = f.rise
    before, after = f.similarity[start], f.similarity[stop]
    which = f"Block {stop} makes" if stop == start + 1 else f"Blocks {start + 1}–{stop} make"
    part = f"{share:.0%} of the rise" if share <= 1 else "more than the whole rise"
    said = f"{which} {part}: from {before:.3f} to {after:.3f}."
    return finding("rise", said, before=before, after=after, share=share, blocks=stop - start)


@says("steps")
def steps(f: Facts) -> Finding | None:
    """Which kind of step makes the tokens alike; nothing where they cancel."""
    total = sum(f.step_growth.values())
    if total <= max(DOUBLE, NET * sum(map(abs, f.step_growth.values()))):
        return None
    shares = dict(sorted(((step, growth / total) for step, growth in f.step_growth.items()), key=lambda item: -item[1]))
    shares = {_STEP.get(step, step): share for step, share in shares.items()}
    makes = [f"{step} for {share:.0%}" for step, share in shares.items() if share >= _NAMED]
    takes = [f"{step} takes {-share:.0%} back" for step, share in shares.items() if share <= -_NAMED]
    first = makes[0][0].upper() + makes[0][1:]
    said = f"{first.replace(' for', ' is responsible for')} of the rise"
    said += "".join(f", {other}" for other in (*makes[1:], *takes)) + "."
    return finding("steps", said, **{step: growth / total for step, growth in f.step_growth.items()})


@says("sink", "few outliers")
def outlier_tokens(f: Facts) -> Finding | None:
    """A token far larger than the others, and what that does to the verdict."""
    found = f.outliers
    if found is None:
        return None
    of = f.about.get("samples", found.carriers)
    if found.sink is None:
        said = f"{found.carriers} of {of} sequences have an outlier token (up to {found.peak:.0f} × the median norm)."
        return finding("few outliers", said, carriers=found.carriers, peak=found.peak, of=of)
    sink, born = found.sink, found.sink.largest.first
    raw, robust, drawn = f.end("token_similarity"), f.end("direction_similarity"), f.sink_attention
    said = f"Token {sink.token}{_texts(sink.texts)} is an outlier in {sink.samples} of {of} sequences: "
    said += ", ".join(_run(run, first=run is sink.runs[0]) for run in sink.runs)
    said += f"; {sink.others} more positions" if sink.others else ""
    said += f". It becomes large in block {born}." if born else ". It enters as one."
    said += "" if math.isnan(drawn) else f" Blocks after it give it {drawn:.0%} of their attention."
    said += (
        f" The verdict leaves it out: similarity of directions is {robust:.3f} after block {f.last} (with it "
        f"{raw:.3f})."
    )
    return finding("sink", said, token=sink.token, born=born, samples=sink.samples, peak=sink.largest.peak, raw=raw,
                    robust=robust, last=f.last)  # fmt: skip


def _run(run: Run, *, first: bool) -> str:
    size = f"up to {run.peak:.0f} ×{' the median norm' if first else ''}"
    if run.first:
        return f"{size} after {blocks_of(range(run.first, run.last + 1))}"
    return f"{size} before block 1" + (f" and up to block {run.last}" if run.last else "")


def _texts(texts: tuple[str, ...]) -> str:
    """Up to three texts in quotes, on one line."""
    shown = [repr(text if len(text) <= _LETTERS else text[:_LETTERS] + "…") for text in texts[:3]]
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return f" ({', '.join(shown)}{more})" if shown else ""


@says("rogue feature")
def rogue_feature(f: Facts) -> Finding | None:
    found = f.rogue_feature(ROGUE)
    if found is None:
        return None
    without = " (outlier tokens left out)" if f.sink is not None and f.sink.is_there(found.block) else ""
    width, of = f.about.get("width", math.nan), f.about.get("samples", found.samples)
    said = (
        f"One of {width} features, number {found.feature}, carries {found.share:.0%} of the energy{without} after "
        "block "
        f"{found.block} in {found.samples} of {of} sequences: a rogue dimension."
    )
    return finding("rogue feature", said, feature=found.feature, share=found.share, block=found.block,
                    samples=found.samples, width=width, of=of)  # fmt: skip


@says("read")
def read_after_norms(f: Facts) -> Finding | None:
    """What is read after norms, where it is as alike as the trunk is not."""
    if not f.has("token_similarity"):
        return None
    trunk, words, found = f.curve("token_similarity"), [], {}
    for station, who in _READERS.items() if f.about.get("placement") not in (None, "post") else ():
        value, beside = float(f.read(station)[f.first + 1 : f.last + 1].mean()), float(trunk[f.first : f.last].mean())
        if not math.isnan(value):
            found[station] = value, beside
            words.append(f"{value:.3f} in {who} (mean over the blocks; {beside:.3f} on the residual stream)")
    after, before = float(f.read(FINAL)[f.last]), float(trunk[f.last])
    if not math.isnan(after):
        found[FINAL] = after, before
        words.append(f"{after:.3f} after the final norm ({before:.3f} before it)")
    if not any(abs(value - beside) > UNEVEN for value, beside in found.values()):
        return None
    return finding(
        "read", f"Token similarity is {', '.join(words)}.", **{name: pair[0] for name, pair in found.items()}
    )


@says("uneven")
def uneven(f: Facts) -> Finding | None:
    raw, robust = f.end("token_similarity"), f.end("direction_similarity")
    if f.sink is not None or not abs(raw - robust) > UNEVEN:
        return None
    said = f"Tokens are of unequal size: similarity is {raw:.3f}, that of their directions {robust:.3f}."
    return finding("uneven", said, raw=raw, robust=robust, last=f.last)


@says("rank")
def rank(f: Facts) -> Finding | None:
    if not f.has(f.rank) or f.rank_is_spoilt:
        return None
    before, after = f.start(f.rank), f.end(f.rank)
    without = ", outliers left out" if f.rank == "ordinary_rank" and f.sink is not None else ""
    said = f"The tokens fill {after:.1f} directions after block {f.last}, {before:.1f} before block {f.first + 1}"
    return finding("rank", f"{said} (effective rank{without}).", rank_start=before, rank_end=after)


# --- what is common to whom -----------------------------------------------------------------------------


@says("shared by all")
def shared_by_all(f: Facts) -> Finding | None:
    headline = f.look == "trained" and looks_alike(f)  # "anisotropic", which says it
    if not f.has("energy_shared") or end(f) < HALF or not anisotropic(f) or headline:
        return None
    shared, start, own = f.energy("shared"), f.start("energy_shared"), f.energy("sequence")
    said = (
        f"What tokens share is the same in all sequences: {shared:.0%} of their energy, {own:.1%} is a sequence's own."
    )
    return finding("shared by all", said, shared=shared, shared_start=start, sequence=own)


@says("loss of context")
def loss_of_context(f: Facts) -> Finding | None:
    before, after = f.start("energy_sequence"), f.end("energy_sequence")
    if not after >= max(MINE, RISE * before):
        return None
    pools = f.look == "trained" and f.about.get("causal") is False
    why = ". Encoders that are trained to pool their tokens do that" if pools else ""
    said = (
        f"The tokens of a sequence come to share a part of their own: {before:.0%} of their energy at first, "
        f"{after:.0%} in the end{why}."
    )
    return finding("loss of context", said, sequence=after, sequence_start=before)


@says("sequences alike")
def sequences_alike(f: Facts) -> Finding | None:
    before, after = f.start("energy_position"), f.end("energy_position")
    if not after >= max(SHARED, RISE * before):
        return None
    said = (
        f"Different sequences become equal, position by position ({after:.0%} of the energy, {before:.0%} at first); "
        "the tokens within a sequence do not."
    )
    return finding("sequences alike", said, position=after, position_start=before)


# --- where it is going, and why --------------------------------------------------------------------------


FINDINGS.append(Rule(("trend arrives", "trend settles", "trend passed", "no forecast"), forecast.trend))
FINDINGS.append(Rule(("theory",), forecast.theory))
FINDINGS.append(Rule(("spectra",), forecast.gap))


@says("value weights")
def leaning_weights(f: Facts) -> Finding | None:
    return value_weights.finding(f)


@says("attention learns")
def attention_learns(f: Facts) -> Finding | None:
    """How many blocks' attention has a gradient to learn from, and where it has none."""
    ratios = f.learning
    if not ratios:
        return None
    (first, start), (last, final) = next(iter(ratios.items())), next(reversed(ratios.items()))
    unable = [block for block, ratio in ratios.items() if ratio < CAN_LEARN]
    said = (
        f"Attention can learn in {len(ratios) - len(unable)} of {len(ratios)} blocks: the gradient of its queries and "
        f"keys is at least {100 * CAN_LEARN:g} % of that of values and output. It is {start:.2g} of it in block "
        f"{first} "
        f"and {final:.2g} in block {last}"
    )
    said += f"; less than {CAN_LEARN:g} in blocks {ranges(unable)}" if unable else ""
    if start < CAN_LEARN and min(ratios.values()) > _FALLS * start:
        said += ". It does not fall with depth: that is the size of attention's weights, not of its tokens' differences"
    return finding("attention learns", said + ".", able=len(ratios) - len(unable), blocks=len(ratios), first=first,
                    start=start, last=last, end=final, least=min(ratios.values()))  # fmt: skip


# --- blocks that do little --------------------------------------------------------------------------------


@says("quiet blocks")
def quiet_blocks(f: Facts) -> Finding | None:
    found = f.quiet_blocks(TURN)
    if not found:
        return None
    said = (
        f"{len(found)} of {f.blocks} blocks turn their tokens by less than {180 * TURN:.1f}° (blocks {ranges(found)})."
    )
    return finding("quiet blocks", said, count=len(found), blocks=f.blocks)


@says("spare blocks")
def spare_blocks(f: Facts) -> Finding | None:
    found = sorted(f.spare_blocks(SPARE), key=lambda item: item[1])
    if f.look == "initialised" or not found:
        return None
    changes = ", ".join(f"block {block} {change:+.4f}" for block, change in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    said = (
        f"{len(found)} of {f.blocks} blocks can be skipped, one at a time, for less than {100 * SPARE:.0f} % of the "
        f"loss: {changes}{more}."
    )
    return finding("spare blocks", said, count=len(found), blocks=f.blocks,
                    **{f"change_{block}": change for block, change in found})  # fmt: skip


# --- what the verdict rests on ----------------------------------------------------------------------------


@says("initialised", "trained")
def weights(f: Facts) -> Finding | None:
    if f.look not in ("initialised", "trained"):
        return None
    norms, moved = float(f.about["weights"]["norms"]), float(f.about["weights"]["moved"])
    said = f"The weights are taken for random: all {norms:.0f} norms in the blocks are as an initialiser leaves them."
    if f.look == "trained":
        said = f"The weights look trained: {moved:.0f} of the {norms:.0f} norms in the blocks have moved."
    return finding(f.look, said, norms=norms, moved=moved)


@says("normal")
def normal(f: Facts) -> Finding | None:
    if f.reference is None or not f.has("token_similarity"):
        return None
    block, low, high = f.reference_point
    value = f.at("token_similarity", block)
    side = "within" if low <= value <= high else "above" if value > high else "below"
    said = (
        f"Token similarity after block {block} is {value:.3f}, {side} the usual {low:.3f} to {high:.3f} of "
        f"{f.reference.label}."
    )
    return finding("normal", said, block=block, value=value, low=low, high=high)


@says("not measured")
def not_measured(f: Facts) -> Finding | None:
    """What would have been said had it been measured."""
    found = []
    if not f.step_growth and has_steps(f.about.get("placement")):
        found.append('which step is to blame (stations="trunk")')
    if not f.has("effective_rank"):
        found.append('how many directions are left (measures="effective_rank")')
    if not f.has("energy_sequence") and math.isnan(f.energy("sequence")):
        found.append('what sequences share (measures="verdict")')
    elif f.about.get("samples") == 1:
        found.append("what sequences share (there is one)")
    if math.isnan(f.mean_gap) and f.about.get("placement") != "mixer":
        found.append('attention\'s spectrum (measures="spectral")')
    return (
        finding("not measured", f"Not measured ({len(found)} of 4): {'; '.join(found)}.", count=len(found))
        if found
        else None
    )
