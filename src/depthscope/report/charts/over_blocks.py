"""Charts of lines over blocks: similarity, what is left, ranks, energy, steps, gradients, weights, single features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from depthscope.diagnosis import reference_for
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.steps import attention_rates, growth_by_block
from depthscope.drawing.palette import GREY
from depthscope.measures import MEASURES
from depthscope.report.drawings import Chart, Drawing, Material, Section
from depthscope.report.marks import COLOURS, NOTHING, along_depth, at_pointer, block_axis, choice, colour, lines
from depthscope.report.subjects import Subject
from depthscope.report.tables import NUMBERS, RANGES, Where, chosen
from depthscope.stations import WHOLE_TRUNK

_CHANGE = 0.05  # of a share, or of the largest of other numbers: what changes less is flat
_FACTOR = 1.5  # on a logarithmic scale
_SIMILARITIES = {
    "output token_similarity": "as they are (t_sim)",
    "output direction_similarity": "directions, without outliers",
    "output cosine_similarity": "mean cosine of two tokens",
    "attention_input token_similarity": "as attention reads them",
    "ffn_input token_similarity": "as the FFN reads them",
    "final_norm token_similarity": "as the head reads them, after the last norm",
}
_RULES_OF_SIMILARITY = (
    *("verdict", "crossing", "rise", "read", "uneven", "trend arrives", "trend settles"),
    *("trend passed", "no forecast", "normal", "few outliers"),
)


def similarity(material: Material) -> Drawing | None:
    """How alike tokens are after each block: raw, robust, and as what follows reads them."""
    labels = _there(material, _SIMILARITIES)
    if not labels:
        return None
    tables, bands, uses = {}, [], {NUMBERS: _rows(labels)}
    if "output token_similarity" in labels and len(material.ranges) and len(material.runs) == 1:
        bands.append(_band(RANGES, material.depth, COLOURS[0], 0.15))
        uses[RANGES] = {"measure": ("token_similarity",)}
    reference = _reference(material)
    if reference is not None:
        label, tables["reference"] = reference
        said = alt.Chart(NOTHING).mark_text(align="right", baseline="top", fontSize=12, color=GREY, dx=-4)
        words = said.encode(x=alt.value("width"), y=alt.value(2), text=alt.value(f"grey: usual for {label}"))
        bands = [_band("reference", material.depth, GREY, 0.25), words, *bands]
        uses["reference"] = {}
    return Drawing(
        "Similarity of tokens",
        "How alike the tokens of a sequence are after each block; 0 is what enters block 1, and 1 means that all are "
        "equal. The higher a line ends, the less depth is left to work with.",
        lines(NUMBERS, list(labels.values()), material, title="similarity", labels=labels, share=True, behind=bands),
        uses,
        tables=tables,
        rules=_RULES_OF_SIMILARITY,
    )


def stations(material: Material) -> Drawing | None:
    """Raw similarity at every station of the trunk."""
    there = [name for name in WHOLE_TRUNK if material.has("token_similarity", name)]
    labels = {f"{name} token_similarity": name.replace("_", " ") for name in there}
    if len(there) < 3:
        return None
    return Drawing(
        "Similarity by station",
        "The same similarity at every point inside the blocks: between two lines stands one step. A step whose line "
        "lies above the one before it makes the tokens more alike.",
        lines(NUMBERS, list(labels.values()), material, title="t_sim", labels=labels, share=True),
        {NUMBERS: _rows(labels)},
        flat=_is_flat(material, _rows(labels), share=True),
    )


def measured(
    name: str,
    heading: str,
    caption: str,
    labels: Mapping[str, str],
    *,
    y: str,
    section: Section = "What happens",
    rules: tuple[str, ...] = (),
    log: bool = False,
    share: bool = False,
    fewest: int = 1,
) -> Chart:
    """A chart of measures of the profile, `labels` from "station measure" to the name of a line; None with fewer than
    `fewest` of them."""

    def chart(material: Material) -> Drawing | None:
        there = _there(material, labels)
        if len(there) < fewest:
            return None
        where = _rows(there)
        spec = lines(NUMBERS, list(there.values()), material, title=y, labels=there, log=log, share=share)
        flat = _is_flat(material, where, log=log, share=share)
        return Drawing(heading, caption, spec, {NUMBERS: where}, section, rules=rules, flat=flat)

    chart.__name__ = name
    return chart


DIVERSITY = measured(
    "diversity",
    "What is left of the differences",
    "The share of the tokens' energy in which they differ, on a logarithmic scale. A straight line downwards is a "
    "collapse at a constant rate: every block takes the same share of what is left.",
    {"output token_diversity": "t_div, of the tokens' energy"},
    y="t_div = 1 − t_sim",
    log=True,
)
RANKS = measured(
    "ranks",
    "Directions left",
    "How many directions the tokens of a sequence spread over, by three definitions. A line that falls towards 1 "
    "says that the tokens come to lie on one line.",
    {
        "output effective_rank": "effective rank",
        "output ordinary_rank": "without outlier tokens",
        "output stable_rank": "stable rank",
    },
    y="rank",
    rules=("rank", "rank collapse"),
)
ENERGY = measured(
    "energy",
    "Who shares what",
    "The energy of the unit tokens, split by who has it in common. Much that all sequences share is usual in "
    "trained models and harmless; a growing part of a sequence's own means that its tokens become one vector.",
    {
        "output energy_shared": "shared by all sequences",
        "output energy_sequence": "a sequence's own",
        "output energy_position": "of a position, in all sequences",
        "output energy_token": "a token's own",
    },
    y="share",
    share=True,
    fewest=4,
    rules=("anisotropic", "shared by whom", "shared by all", "loss of context", "sequences alike", "converges"),
)
GRADIENTS = measured(
    "gradients",
    "Gradients",
    "The size of the gradient at each block, on a logarithmic scale. Blocks where it is many times smaller than "
    "elsewhere learn next to nothing.",
    {"output output_gradient": "of a block's output", "output weight_gradient": "of a block's weights"},
    y="norm of the gradient",
    section="Why",
    log=True,
    rules=("gradients",),
)
GRADIENT_ROLES = measured(
    "gradient_roles",
    "Gradients by role",
    "The gradient of each block's weights, split by what they are for, on a logarithmic scale. Where tokens are "
    "alike, that of queries and keys vanishes while the others stay: attention cannot learn what to attend to.",
    {
        "output queries_keys_gradient": "queries and keys",
        "output values_output_gradient": "values and output",
        "output ffn_gradient": "FFN",
        "output norms_gradient": "norms",
        "output other_gradient": "other weights",
    },
    y="norm of the gradient",
    section="Why",
    log=True,
    fewest=2,
    rules=("attention learns",),
)
ROGUE_FEATURES = measured(
    "rogue_features",
    "Rogue dimensions",
    "How much of the tokens' energy one single feature carries after each block (outlier tokens left out). Above "
    "a quarter, similarity tells of this feature more than of the tokens.",
    {"output largest_feature_share": "the largest feature's share of the energy"},
    y="share of energy",
    section="Tokens and weights",
    share=True,
    rules=("rogue feature",),
)


def steps(material: Material) -> Drawing | None:
    """What each kind of step has added to the log-odds by each block."""

    def of(subject: Subject) -> pd.DataFrame | None:
        if subject.profile is None or not (facts := Facts(subject.profile)).has(facts.judged):
            return None
        found = growth_by_block(subject.profile, facts.judged, facts.span)
        if found is None:
            return None
        found = found.groupby(["block", "step"], sort=False)["growth"].sum().reset_index()
        return found.assign(total=found.groupby("step")["growth"].cumsum())

    table = material.table(of)
    if table is None:
        return None
    return Drawing(
        "Which step is to blame",
        "What each kind of step has added, from block 1 on, to the logarithm of the odds t_sim/t_div. A line that "
        "climbs is a step that makes tokens alike; one that falls drives them apart.",
        lines("steps", list(dict.fromkeys(table["step"])), material, y="total", title="added to log odds", by="step"),
        {"steps": {}},
        "Why",
        tables={"steps": table},
        rules=("steps",),
    )


_RATES = {
    "rate": "measured",
    "bound": "at least (Thm 2.6 of Yu & Zhang 2024)",
    "estimate": "estimate (Cor. 2.7)",
}


def rates(material: Material) -> Drawing | None:
    """The rate of attention's step beside its bound and its estimate."""

    def of(subject: Subject) -> pd.DataFrame | None:
        if subject.profile is None:
            return None
        facts = Facts(subject.profile)
        placement, similar = facts.about.get("placement"), facts.curve("token_similarity")
        found = attention_rates(subject.profile, placement, similar, facts.span[1:])
        if found is None:
            return None
        return found.melt("block", list(_RATES), "series", "value").assign(series=lambda t: t["series"].map(_RATES))

    table = material.table(of)
    if table is None:
        return None
    return Drawing(
        "Attention's rate against theory",
        "By what factor attention's step multiplies the odds t_sim/t_div in each block, and what theory says at the "
        "measured size of the branch. Theory is for random weights: of trained ones it is a reference only.",
        lines("rates", list(_RATES.values()), material, title="r per block"),
        {"rates": {}},
        "Why",
        tables={"rates": table},
        rules=("theory",),
    )


def negative_share(material: Material) -> Drawing | None:
    """How many eigenvalues of each block are negative."""
    name = "negative share"

    def of(subject: Subject) -> pd.DataFrame | None:
        if subject.spectra is None:
            return None
        return subject.spectra.by_block["negative_share"].rename("value").reset_index().assign(series=name)

    table = material.table(of)
    if table is None:
        return None
    return Drawing(
        "Negative eigenvalues by block",
        "The share of a block's eigenvalues whose real part is negative, mean over its heads; random weights have one "
        "half. At three of four or more the value weights push tokens apart, at one of four or fewer they pull them "
        "together.",
        lines("negative_share", [name], material, title=name, share=True),
        {"negative_share": {}},
        "Tokens and weights",
        tables={"negative_share": table},
        flat=not any(_changes(rows["value"], share=True) for _, rows in table.groupby("run")),
    )


def difference(material: Material) -> Drawing | None:
    """A measure at the blocks' outputs, minus that of the baseline which is chosen at the top of the page."""
    runs = material.runs
    there = set(material.numbers.loc[material.numbers["station"] == "output", "measure"])
    measures = [name for name in MEASURES if name in there and not MEASURES[name].is_name]
    measures += sorted(there - set(MEASURES))
    if len(runs) < 2 or not measures:
        return None
    baseline, same = alt.param(name="baseline", value=runs[0]), ["block", "station", "head", "measure"]
    chart: Any = (
        alt.Chart(alt.NamedData(NUMBERS))
        .transform_filter("datum.measure == measure")
        .transform_calculate(at_baseline="datum.run == baseline ? datum.value : null")
        .transform_joinaggregate(base="max(at_baseline)", groupby=same)  # type: ignore[arg-type]
        .transform_filter("isValid(datum.base) && isValid(datum.value) && datum.run != baseline")
        .transform_calculate(difference="datum.value - datum.base")
    )
    y = alt.Y("difference:Q", title="difference to the baseline", axis=alt.Axis(format="~r"))
    chart = along_depth(chart, material).encode(y=y, color=colour(runs, "run"))
    zero = alt.Chart(NOTHING).mark_rule(opacity=0.4).encode(y=alt.YDatum(0, type="quantitative"))
    numbers = [alt.Tooltip(f"{name}:Q", format=".4g") for name in ("value", "base", "difference")]
    point = chart.mark_point(filled=True, size=70).encode(
        opacity=alt.condition("datum.block == hovered", alt.value(1), alt.value(0)),
        tooltip=["run:N", "block:Q", *numbers],
    )
    return Drawing(
        "Difference to the baseline",
        "The measure chosen above the chart, at the blocks' outputs, minus that of the baseline chosen at the top of "
        "the page. Above 0 a run has more of it than the baseline; only blocks that both have are drawn.",
        at_pointer(
            [zero, chart.mark_line(), point],
            rule=len(set(material.depths.values())) < 2,
            params=[baseline, choice("measure", measures, "measure")],
        ),
        {NUMBERS: {"station": ("output",), "head": (-1,)}},
    )


def skipped_blocks(material: Material) -> Drawing | None:
    """What the loss becomes without each block."""
    table = material.table(lambda item: None if item.skipped is None else item.skipped[item.skipped["first_block"] > 0])
    if table is None:
        return None
    table = table.rename(columns={"first_block": "block"})
    runs = list(dict.fromkeys(table["run"]))
    numbers = [alt.Tooltip("loss:Q", format=".4g"), alt.Tooltip("change:Q", format=".3g")]
    bars = alt.Chart(alt.NamedData("skipped")).mark_bar(size=max(2, 400 // max(material.depth, 1) // len(runs)))
    bars = bars.encode(
        x=block_axis(material.depth, 0.5),
        y=alt.Y("change:Q", title="change of the loss"),
        color=colour(runs, "run"),
        tooltip=["run:N", "block:Q", "last_block:Q", *numbers],
    )
    return Drawing(
        "The loss without a block",
        "How the loss changes if one block (or the run of blocks that begins there) is skipped. A block whose bar is "
        "next to nothing does next to nothing.",
        at_pointer([bars]),
        {"skipped": {}},
        tables={"skipped": table},
        rules=("spare blocks", "quiet blocks"),
    )


def _there(material: Material, labels: Mapping[str, str]) -> dict[str, str]:
    """Of "station measure" → name, what was measured."""
    return {key: name for key, name in labels.items() if material.has(*reversed(key.split()))}


def _rows(labels: Mapping[str, str]) -> Where:
    stations, measures = zip(*(key.split() for key in labels), strict=True)
    return {"station": tuple(dict.fromkeys(stations)), "measure": tuple(dict.fromkeys(measures)), "head": (-1,)}


def _is_flat(material: Material, where: Where, **scale: bool) -> bool:
    curves = chosen(material.numbers, where).groupby(["run", "station", "measure"])["value"]
    return not any(_changes(values, **scale) for _, values in curves)


def _changes(values: Sequence[float] | pd.Series[float], *, log: bool = False, share: bool = False) -> bool:
    """Whether a line says more than one number; what is too short for a line is not judged."""
    known = pd.Series(values, dtype=float).replace([float("inf"), float("-inf")], float("nan")).dropna()
    if len(known) < 2:
        return True
    low, high = known.min(), known.max()
    if log and low > 0:
        return bool(high > _FACTOR * low)
    return bool(high - low > _CHANGE * (1.0 if share else known.abs().max()))


def _band(table: str, depth: int, colour: str, opacity: float) -> alt.Chart:
    band = alt.Chart(alt.NamedData(table)).mark_area(color=colour, opacity=opacity)
    return band.encode(x=block_axis(depth), y=alt.Y("low:Q", title="similarity"), y2="high:Q")


def _reference(material: Material) -> tuple[str, pd.DataFrame] | None:
    """What is normal for a single model, with its name."""
    profile = material.measured[0].profile if len(material.runs) == 1 else None
    reference = None if profile is None else reference_for(profile)
    if reference is None or "token_similarity" not in reference.low:
        return None
    low, high = (getattr(reference, side)["token_similarity"] for side in ("low", "high"))
    return reference.label, pd.DataFrame({"block": range(len(low)), "low": low, "high": high})
