"""What is said besides the verdict: where tokens become alike, by what, what hides it. A function each, which returns a
finding with its numbers, or None; `FINDINGS` has them by name, the most important first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.rules import HALF, MINE, RISE, SHARED, end, rises
from depthscope.diagnosis.steps import has_steps
from depthscope.measures import ALIKE, EQUAL
from depthscope.naming import blocks_of, runs_of
from depthscope.probing.roles import CAN_LEARN, MEASURES, learning_ratios
from depthscope.usage import Finding

DOUBLE = math.log(2)  # growth of the log-odds that has shares worth naming
SEEN = 0.1  # of similarity: a rise that a reader sees in the curve
NET = 0.25  # of all that the steps do: below it they cancel, and shares of what is left would mislead
_NAMED = 0.005  # shares that round to 0 % are not named
_LONGEST = 20  # characters of a token's text that are shown

Find = Callable[[Facts], Finding | None]


def finding(rule: str, sentence: str, **numbers: float) -> Finding:
    """With all numbers as floats."""
    return Finding(rule, sentence, {name: float(value) for name, value in numbers.items()})


def attention_learns(f: Facts) -> Finding | None:
    """How many blocks' attention has a gradient to learn from, and where it has none."""
    curves = (f.curve(MEASURES[role]).tolist() for role in ("queries_keys", "values_output"))
    ratios = {block: ratio for block, ratio in enumerate(learning_ratios(*curves)) if not math.isnan(ratio)}
    ratios = {block: ratio for block, ratio in ratios.items() if f.first < block <= f.last}
    if not ratios:
        return None
    unable = [block for block, ratio in ratios.items() if ratio < CAN_LEARN]
    able = len(ratios) - len(unable)
    said = f"Attention can learn in {able} of {len(ratios)} blocks: there the gradient of its queries and keys is at "
    said += f"least {100 * CAN_LEARN:g} % of that of values and output"
    said += f"; not in {blocks_of(unable)}" if unable else ""
    return finding("attention learns", said + ".", able=able, blocks=len(ratios), least=min(ratios.values()))


def sink(f: Facts) -> Finding | None:
    """A token far larger than the others, and what that does to the verdict."""
    found = f.sink
    if found is None:
        return None
    texts = [repr(text if len(text) <= _LONGEST else text[:_LONGEST] + "…") for text in found.texts[:3]]
    named = f" ({', '.join(texts)})" if texts else ""
    of = f.about.get("samples", found.samples)
    born = next(first for first, last in runs_of(found.blocks) if first <= found.largest <= last)
    raw, robust = f.end("token_similarity"), f.end("direction_similarity")
    said = (
        f"Token {found.token}{named} is an outlier in {found.samples} of {of} sequences: up to {found.peak:.0f} × the "
        f"median norm after block {found.largest}. It {f'becomes large in block {born}' if born else 'enters as one'}. "
        f"The verdict leaves it out: similarity of directions is {robust:.3f} after block {f.last} (with it {raw:.3f})."
    )
    return finding("sink", said, token=found.token, born=born, samples=found.samples, peak=found.peak, raw=raw,
                    robust=robust, last=f.last)  # fmt: skip


def crossing(f: Facts) -> Finding | None:
    """Where similarity passes 0.9 and 0.99. A curve that comes back says where it ends."""
    highest, blocks = np.nanmax(f.similarity[f.first : f.last + 1]), range(f.first, f.last + 1)
    passed = {
        level: next(b for b in blocks if f.similarity[b] >= level) for level in (ALIKE, EQUAL) if highest >= level
    }
    if not passed:
        return None
    said = f"{f.what[0].upper()}{f.what[1:]} passes "
    said += " and ".join(f"{level:g} after block {block}" for level, block in passed.items())
    below = [b for b in blocks if b > passed[ALIKE] and f.similarity[b] < ALIKE]
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


def steps(f: Facts) -> Finding | None:
    """Which kind of step makes the tokens alike; nothing where they cancel, or the tokens are not alike in the end.

    The numbers are shares of the net rise; the sentence gives shares of what makes tokens alike, none above 100 %.
    """
    total = sum(f.step_growth.values())
    if end(f) < HALF or total <= max(DOUBLE, NET * sum(map(abs, f.step_growth.values()))):
        return None
    growth = dict(sorted(f.step_growth.items(), key=lambda item: -item[1]))
    upwards = sum(one for one in growth.values() if one > 0)
    named = {{"FFN": "the FFN", "norm": "the norm"}.get(step, step): one / upwards for step, one in growth.items()}
    makes = [f"{step} for {share:.0%}" for step, share in named.items() if share >= _NAMED]
    takes = [f"{step} takes {-share:.0%} of it back" for step, share in named.items() if share <= -_NAMED]
    first = f"{makes[0][0].upper()}{makes[0][1:]}".replace(" for", " is responsible for")
    shares = {step: one / total for step, one in growth.items()}
    return finding("steps", ", ".join([f"{first} of the rise", *makes[1:], *takes]) + ".", **shares)


def not_measured(f: Facts) -> Finding | None:
    """What to ask for where tokens grow alike, and by what was not measured."""
    if not (rises(f) and end(f) >= HALF and has_steps(f.about.get("placement")) and not f.step_growth):
        return None
    return finding("not measured", 'Which step makes tokens alike was not measured: take stations="trunk".', end=end(f))


def rise(f: Facts) -> Finding | None:
    """Where similarity rises most: the shortest way over which it gains half of its rise, of several the steepest.

    Nothing of tokens that are not alike in the end: where a small rise lies is nothing to act on.
    """
    curve = np.nan_to_num(f.similarity[f.first : f.last + 1])
    if end(f) < HALF or end(f) - f.similarity[f.first] < SEEN:
        return None
    gains = (curve[None, :] - curve[:, None]) / (curve[-1] - curve[0])  # (from, to)
    length = next(n for n in range(1, len(curve)) if np.diagonal(gains, n).max() >= 0.5)
    start = int(np.diagonal(gains, length).argmax())
    share, first, stop = float(gains[start, start + length]), f.first + start, f.first + start + length
    which = f"Block {stop} makes" if length == 1 else f"Blocks {first + 1}–{stop} make"
    part = f"{share:.0%} of the rise" if share <= 1 else "more than the whole rise"
    before, after = f.similarity[first], f.similarity[stop]
    said = f"{which} {part}: from {before:.3f} to {after:.3f}."
    return finding("rise", said, before=before, after=after, share=share, blocks=length)


def trend(f: Facts) -> Finding | None:
    """Where further blocks like these would lead."""
    if f.arrival is None or end(f) >= EQUAL or not rises(f):
        return None
    best, low, high = f.arrival
    between = "" if low == high else f" ({low or best} to {high})" if high else f" ({low or best} or later)"
    said = f"With more blocks like these, {f.what} passes {EQUAL:g} at about block {best}{between}."
    return finding("trend arrives", said, arrival=best)


def normal(f: Facts) -> Finding | None:
    """Beside models of its kind."""
    if f.reference is None or "token_similarity" not in f.profile.names():
        return None
    lows, highs = (getattr(f.reference, side)["token_similarity"] for side in ("low", "high"))
    block = min(f.last, len(lows) - 1)  # the last that has a band
    value, low, high = float(f.curve("token_similarity")[block]), lows[block], highs[block]
    side = "within" if low <= value <= high else "above" if value > high else "below"
    said = f"Token similarity after block {block} is {value:.3f}, {side} the usual {low:.3f} to {high:.3f} of "
    return finding("normal", f"{said}{f.reference.label}.", block=block, value=value, low=low, high=high)


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


def sequences_alike(f: Facts) -> Finding | None:
    before, after = f.start("energy_position"), f.end("energy_position")
    if not after >= max(SHARED, RISE * before):
        return None
    said = (
        f"Different sequences become equal, position by position ({after:.0%} of the energy, {before:.0%} at first); "
        "the tokens within a sequence do not."
    )
    return finding("sequences alike", said, position=after, position_start=before)


# What an option asked for comes before what every probe says.
FINDINGS: Mapping[str, Find] = {
    "attention learns": attention_learns,
    "sink": sink,
    "crossing": crossing,
    "steps": steps,
    "rise": rise,
    "trend arrives": trend,
    "normal": normal,
    "loss of context": loss_of_context,
    "sequences alike": sequences_alike,
    "not measured": not_measured,
}
# What rests on laws for blocks with all their parts, or on other models: not said of a model without some.
OF_WHOLE_MODELS = frozenset({"trend arrives", "normal"})
