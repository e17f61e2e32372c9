"""The numbers and phrases that the rules' sentences are filled with. No rule is decided here."""

from __future__ import annotations

import math

from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.steps import has_steps
from depthscope.measures import ALIKE, EQUAL
from depthscope.naming import blocks_of, ranges, sequences_of
from depthscope.stations import FINAL

Values = dict[str, float | str]
LEVELS = (ALIKE, EQUAL)
_FALLS = 0.1  # of what it is in the first block: less is a fall with depth
_NAMED = 0.005  # shares that round to 0 % are not named
_NAMES = {
    "token_similarity": "token similarity",
    "direction_similarity": "similarity of directions without outliers",
    "cosine_similarity": "mean cosine",
}
_SHORT = {
    "token_similarity": "t_sim",
    "direction_similarity": "the similarity of directions",
    "cosine_similarity": "the mean cosine",
}
_ODDS = {
    "token_similarity": "odds t_sim/t_div",
    "direction_similarity": "odds of the directions' similarity",
    "cosine_similarity": "odds of the mean cosine",
}
_READERS = {"attention_input": "attention", "ffn_input": "the FFN"}


def broken(f: Facts) -> Values:
    assert f.broken is not None
    block, share, samples = f.broken
    return {"block": float(block), "share": share, "named": sequences_of(samples)}


def weights_not_finite(f: Facts) -> Values:
    names = f.profile.metadata["weights_not_finite"]
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return {"count": float(len(names)), "named": named}


def other_measures(f: Facts) -> Values:
    """How many measures were taken at the blocks' outputs, of which none is a similarity."""
    count = len(f.profile.names())
    others = {0: "", 1: " (1 other measure was)"}.get(count, f" ({count} other measures were)")
    return {"measured": float(count), "others": others}


def similarity(f: Facts) -> Values:
    what = _NAMES[f.judged] + (f" in {_part(f.span[0])}" if f.span[0] else "")
    numbers = {"start": f.similarity[f.first], "end": f.similarity[f.last], "last": f.last, "blocks": f.blocks}
    return {"what": what, "where": _entrance(f)} | {name: float(value) for name, value in numbers.items()}


def convergence(f: Facts) -> Values:
    since = f.passes(LEVELS[0])
    assert since is not None
    pool = " (sentence encoders pool their tokens)" if f.about.get("causal") is False else ""
    numbers = {"late": f.last - since + 1, "blocks": f.blocks, "before": float(f.similarity[since - 1])}
    return similarity(f) | {"pool": pool} | {name: float(value) for name, value in numbers.items()}


def stand_in(f: Facts) -> Values:
    values = similarity(f)
    return values | {"what": _capital(str(values["what"])), "stand_in": str(f.about["stand_in"])}


def rise(f: Facts) -> Values:
    """Where similarity rises most."""
    start, stop, share = f.rise
    which = f"Block {stop} makes" if stop == start + 1 else f"Blocks {start + 1}–{stop} make"
    part = f"{share:.0%} of the rise" if share <= 1 else "more than the whole rise"
    ends = {"before": f.similarity[start], "after": f.similarity[stop], "share": share, "blocks": stop - start}
    return {"which": which, "part": part, **{name: float(value) for name, value in ends.items()}}


def energy(f: Facts) -> Values:
    return similarity(f) | {
        "shared": f.energy("shared"),
        "shared_start": f.start("energy_shared"),
        "sequence": f.energy("sequence"),
    }


def context(f: Facts) -> Values:
    pools = f.look == "trained" and f.about.get("causal") is False
    why = ". Encoders that are trained to pool their tokens do that" if pools else ""
    ends = {"sequence": f.end("energy_sequence"), "sequence_start": f.start("energy_sequence")}
    return {**ends, "last": float(f.last), "why": why, "where": _entrance(f)}


def positions(f: Facts) -> Values:
    ends = {"position": f.end("energy_position"), "position_start": f.start("energy_position")}
    return {**ends, "where": _entrance(f)}


def rank(f: Facts) -> Values:
    without = " without outliers" if f.rank == "ordinary_rank" and f.sink is not None else ""
    return similarity(f) | {"rank_start": f.start(f.rank), "rank_end": f.end(f.rank), "without": without}


def crossings(f: Facts) -> Values:
    """Where similarity passes 0.9 and 0.99, and the blocks as numbers."""
    curve = f.similarity[f.first : f.last + 1].tolist()
    passed = {f"passes_{level:g}": float(b) for level in LEVELS if (b := f.passes(level)) is not None}
    return {"crossing": crossing(_NAMES[f.judged], curve, f.first), "end": curve[-1], **passed}


def crossing(name: str, curve: list[float], first: int = 0) -> str:
    """Where a similarity passes 0.9 and 0.99. A curve that comes back says where it ends."""
    start = _capital(name)
    defined = [(value, block) for block, value in enumerate(curve, start=first) if not math.isnan(value)]
    if not defined:
        return f"{start} is undefined in every block."
    largest, where = max(defined, key=lambda pair: pair[0])
    if largest < LEVELS[0]:
        return f"{start} stays below {LEVELS[0]:g}: {largest:.3f} at most, at block {where}."
    passed = [
        f"{level:g} at block {next(block for value, block in defined if value >= level)}"
        for level in LEVELS
        if largest >= level
    ]
    last, end = defined[-1]
    since = next(block for value, block in defined if value >= LEVELS[0])
    below = [block for value, block in defined if block > since and value < LEVELS[0]]
    back = ""
    if last < LEVELS[0]:
        back = f", and comes back to {last:.3f} at block {end}"
    elif below:
        back = f", and is below {LEVELS[0]:g} again at {blocks_of(below)}"
    return f"{start} passes {' and '.join(passed)}{back}."


def raw_and_robust(f: Facts) -> Values:
    return {"raw": f.end("token_similarity"), "robust": f.end("direction_similarity"), "last": float(f.last)}


def readers(f: Facts) -> dict[str, tuple[float, float]]:
    """t_sim of what is read where norms make a copy for it, and of the trunk there, by station.

    Of the branches both are means over the blocks; at the final norm they are those of the last block.
    """
    trunk = f.curve("token_similarity")
    found = {FINAL: (float(f.read(FINAL)[f.last]), float(trunk[f.last]))}
    copies = f.about.get("placement") not in (None, "post")
    for station in _READERS if copies else ():
        read = f.read(station)[f.first + 1 : f.last + 1]
        found[station] = float(read.mean()), float(trunk[f.first : f.last].mean())  # what enters the blocks
    return {station: pair for station, pair in found.items() if not math.isnan(pair[0])}


def read(f: Facts) -> Values:
    found = readers(f)
    words = []
    branches = [f"{found[station][0]:.3f} in what {who} reads" for station, who in _READERS.items() if station in found]
    if branches:
        trunk = next(found[station][1] for station in _READERS if station in found)
        words.append(f"on average over the blocks t_sim is {trunk:.3f} on the trunk, {' and '.join(branches)}")
    if FINAL in found:
        after, before = found[FINAL]
        words.append(f"after the final norm, where the head reads, t_sim is {after:.3f}, before it {before:.3f}")
    return {"text": _capital("; ".join(words)), **{station: pair[0] for station, pair in found.items()}}


def idle(f: Facts, level: float) -> Values:
    scaled = " at unit length" if f.judged == "direction_similarity" else ""
    numbers = {"idle": float(blocks_after(f, level)), "blocks": float(f.blocks), "level": level}
    return {"short": _SHORT[f.judged].removeprefix("the "), "scaled": scaled, **numbers}


def blocks_after(f: Facts, level: float) -> int:
    """Blocks whose input is already at or above a level."""
    since = f.passes(level)
    return 0 if since is None else f.last - max(since, f.first)


def steps(f: Facts) -> Values:
    total = sum(f.step_growth.values())
    shares = {step: growth / total for step, growth in f.step_growth.items()}
    makes = [f"{step} makes {share:.0%}" for step, share in _descending(shares) if share >= _NAMED]
    takes = [f"{step} takes {-share:.0%} back" for step, share in _descending(shares) if share <= -_NAMED]
    text = ", ".join(makes + takes)
    passed = f.passes(LEVELS[1])
    until = "" if passed is None else f" until {_SHORT[f.judged]} passes 0.99 at block {passed}"
    return {"odds": _ODDS[f.judged], "factor": math.exp(total), "shares": text, "until": until, **shares}


def opposed_steps(f: Facts) -> Values:
    parts = _descending(f.step_growth)
    text = ", ".join(f"{step} × {math.exp(growth):.3g}" for step, growth in parts)
    return {"changes": f"{text} in the {_ODDS[f.judged]}", **f.step_growth}


def _descending(parts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda item: -item[1])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _part(name: str) -> str:
    """The encoder, the text tower, stage 2."""
    if " " in name:
        return name
    return f"the {name}" if name in ("encoder", "decoder") else f"the {name} tower"


def _entrance(f: Facts) -> str:
    """Where the part that is judged begins."""
    return "at its entrance" if f.first else "at the entrance"


def law(f: Facts) -> Values:
    """How the odds grow, by the fitted map or, in pre-norm, by a power of depth."""
    trend = f.trend
    assert trend is not None
    common: Values = {"horizon": float(f.horizon), "short": _SHORT[f.judged]}
    if trend.exponent is not None:
        way = "grow" if trend.exponent > 0 else "fall"
        text = f"The {_ODDS[f.judged]} {way} like block^{trend.exponent:.2f} over the last half of the blocks"
        return {"law": text, "exponent": trend.exponent, "error": trend.error, **common}
    rho, feed = trend.map.rho, trend.map.feed
    s = "odds s = t_sim/t_div" if f.judged == "token_similarity" else _ODDS[f.judged].replace("odds", "odds s")
    text = f"From block to block the {s} go s → {rho:.3f} s + {feed:.2g} (± {trend.error:.1%})"
    return {"law": text, "rho": rho, "feed": feed, "error": trend.error, **common}


def arrival(f: Facts) -> Values:
    best, low, high = f.reach
    assert best is not None
    text = "" if low == high else f" ({low or best} to {high})" if high else f" ({low or best} or later)"
    return law(f) | {"arrival": float(best), "range": text}


def halving(f: Facts) -> Values:
    """How fast the differences vanish; a power of depth has no such time."""
    assert f.trend is not None
    if f.trend.exponent is not None:
        return law(f) | {"halving": ""}
    half = math.log(2) / math.log(f.trend.map.rho)
    text = f": in the end the differences' share of the energy halves every {half:.1f} blocks"
    return law(f) | {"half": half, "halving": text}


def theory(f: Facts) -> Values:
    found = f.attention
    assert found is not None
    numbers = {name: getattr(found, name) for name in ("rate", "bound", "estimate", "omega_delta", "branch_energy")}
    return {**numbers, "caveat": _for_random_weights(f)}


def spectra(f: Facts) -> Values:
    caveat = "; heads that look at an outlier have a large gap and carry little" if f.sink is not None else ""
    return {"gap": f.mean_gap, "caveat": caveat}


def _for_random_weights(f: Facts) -> str:
    return ", a reference only: the weights are trained" if f.look == "trained" else ""


def learning(f: Facts, least: float) -> Values:
    """How many blocks' attention has a gradient to learn from, and where it has none."""
    ratios = f.learning
    (first, start), (last, end) = next(iter(ratios.items())), next(reversed(ratios.items()))
    unable = [block for block, ratio in ratios.items() if ratio < least]
    able = {"able": float(len(ratios) - len(unable)), "blocks": float(len(ratios)), "percent": 100 * least}
    ends = {"first": float(first), "start": start, "last": float(last), "end": end, "least": min(ratios.values())}
    said = f"; less than that in blocks {ranges(unable)}" if unable else ""
    if start < least and min(ratios.values()) > _FALLS * start:
        said += ". It does not fall with depth: that is the size of attention's weights, not of its tokens' differences"
    return {"unable": said, **able, **ends}


def quiet(f: Facts, angle: float) -> Values:
    found = f.quiet_blocks(angle)
    return {"count": float(len(found)), "blocks": float(f.blocks), "degrees": 180 * angle, "where": ranges(found)}


def spare(f: Facts, share: float) -> Values:
    found = sorted(f.spare_blocks(share), key=lambda item: item[1])
    changes = ", ".join(f"block {block} {change:+.4f}" for block, change in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    numbers = {f"change_{block}": change for block, change in found}
    counts = {"count": float(len(found)), "blocks": float(f.blocks), "percent": 100 * share}
    return {"changes": changes + more, **counts, **numbers}


def weights(f: Facts) -> Values:
    found = f.about["weights"]
    return {"norms": float(found["norms"]), "moved": float(found["moved"])}


def normal(f: Facts) -> Values:
    assert f.reference is not None
    block, low, high = f.reference_point
    value = f.at("token_similarity", block)
    side = "within" if low <= value <= high else "above" if value > high else "below"
    numbers = {"block": float(block), "value": value, "low": low, "high": high}
    return {**numbers, "side": side, "label": f.reference.label}


def missing(f: Facts) -> list[str]:
    """What would have been said had it been measured."""
    found = []
    if not f.step_growth and has_steps(f.about.get("placement")):
        found.append("which step is to blame (stations trunk)")
    if not f.has("effective_rank"):
        found.append("directions left (measure effective_rank), so a fall onto opposite clusters would not be seen")
    if not f.has("energy_sequence") and math.isnan(f.energy("sequence")):
        found.append("what sequences share (measures all)")
    elif f.about.get("samples") == 1:
        found.append("what sequences share (there is one)")
    if math.isnan(f.mean_gap) and f.about.get("placement") != "mixer":
        found.append("attention's spectrum (measures spectral)")
    return found


def not_measured(f: Facts) -> Values:
    found = missing(f)
    return {"missing": "; ".join(found), "count": float(len(found))}
