"""Charts of measures over blocks: similarity, what is left, ranks, energy, gradients, rogue features."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt
import pandas as pd

from depthscope.diagnosis import reference_for
from depthscope.drawing.palette import GREY
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import COLOURS, at_pointer, block_axis, lines, series_colour
from depthscope.report.tables import NUMBERS, RANGES, Where
from depthscope.stations import WHOLE_TRUNK

_SIMILARITIES = {
    "output token_similarity": "as they are (t_sim)",
    "output direction_similarity": "directions, without outliers",
    "output cosine_similarity": "mean cosine of two tokens",
    "attention_input token_similarity": "as attention reads them",
    "ffn_input token_similarity": "as the FFN reads them",
    "final_norm token_similarity": "as the head reads them, behind the last norm",
}
_RULES_OF_SIMILARITY = (
    *("verdict", "crossing", "rise", "read", "uneven", "trend arrives", "trend settles"),
    *("trend passed", "no forecast", "normal", "few outliers"),
)


def similarity(material: Material) -> Drawing | None:
    """How alike tokens are behind each block: raw, robust, and as what follows reads them."""
    labels = _there(material, _SIMILARITIES)
    if not labels:
        return None
    tables, bands, uses = {}, [], {NUMBERS: _rows(labels)}
    if "output token_similarity" in labels and len(material.ranges) and len(material.runs) == 1:
        bands.append(_band(RANGES, material.depth, COLOURS[0], 0.15))
        uses[RANGES] = {"measure": ("token_similarity",)}
    caption = (
        "How alike the tokens of a sequence are behind each block; 0 is what enters block 1, and 1 means that all are "
        "equal. The higher a line ends, the less depth is left to work with."
    )
    reference = _reference(material)
    if reference is not None:
        label, tables["reference"] = reference
        bands.insert(0, _band("reference", material.depth, GREY, 0.25))
        uses["reference"] = {}
        caption += f" Grey: what is usual ({label})."
    chart = lines(NUMBERS, list(labels.values()), material, title="similarity", labels=labels, behind=bands)
    return Drawing("Similarity of tokens", caption, chart, uses, tables=tables, rules=_RULES_OF_SIMILARITY)


def stations(material: Material) -> Drawing | None:
    """Raw similarity at every station of the trunk."""
    there = [name for name in WHOLE_TRUNK if material.has("token_similarity", name)]
    if len(there) < 3:
        return None
    labels = {f"{name} token_similarity": name.replace("_", " ") for name in there}
    return Drawing(
        "Similarity by station",
        "The same similarity at every point inside the blocks: between two lines stands one step. A step whose line "
        "lies above the one before it makes the tokens more alike.",
        lines(NUMBERS, list(labels.values()), material, title="t_sim", labels=labels),
        {NUMBERS: _rows(labels)},
    )


def diversity(material: Material) -> Drawing | None:
    """What is left of the differences, on a scale that shows powers of ten."""
    labels = _there(material, {"output token_diversity": "t_div, of the tokens' energy"})
    if not labels:
        return None
    return Drawing(
        "What is left of the differences",
        "The share of the tokens' energy in which they differ, on a logarithmic scale. A straight line downwards is a "
        "collapse at a constant rate: every block takes the same share of what is left.",
        lines(
            NUMBERS,
            list(labels.values()),
            material,
            title="t_div = 1 − t_sim",
            labels=labels,
            log=True,
        ),
        {NUMBERS: _rows(labels)},
    )


def ranks(material: Material) -> Drawing | None:
    """How many directions the tokens have."""
    known = {
        "output effective_rank": "effective rank",
        "output ordinary_rank": "without outlier tokens",
        "output stable_rank": "stable rank",
    }
    labels = _there(material, known)
    if not labels:
        return None
    return Drawing(
        "Directions left",
        "How many directions the tokens of a sequence spread over, by three definitions. A line that falls towards 1 "
        "says that the tokens come to lie on one line.",
        lines(NUMBERS, list(labels.values()), material, title="rank", labels=labels),
        {NUMBERS: _rows(labels)},
        rules=("rank", "rank collapse"),
    )


def energy(material: Material) -> Drawing | None:
    """Whom the unit tokens share their energy with."""
    parts = {
        "energy_shared": "shared by all sequences",
        "energy_sequence": "a sequence's own",
        "energy_position": "of a position, in all sequences",
        "energy_token": "a token's own",
    }
    if not all(material.has(name) for name in parts):
        return None
    labels = {f"output {name}": said for name, said in parts.items()}
    return Drawing(
        "Who shares what",
        "The energy of the unit tokens, split by who has it in common. Much that all sequences share is usual in "
        "trained models and harmless; a growing part of a sequence's own means that its tokens become one vector.",
        lines(NUMBERS, list(parts.values()), material, title="share", labels=labels),
        {NUMBERS: _rows(labels)},
        rules=("anisotropic", "shared by whom", "shared by all", "loss of context", "sequences alike", "converges"),
    )


def gradients(material: Material) -> Drawing | None:
    """How much of the gradient reaches each block."""
    known = {"output output_gradient": "of a block's output", "output weight_gradient": "of a block's weights"}
    labels = _there(material, known)
    if not labels:
        return None
    return Drawing(
        "Gradients",
        "The size of the gradient at each block, on a logarithmic scale. Blocks where it is many times smaller than "
        "elsewhere learn next to nothing.",
        lines(
            NUMBERS,
            list(labels.values()),
            material,
            title="norm of the gradient",
            labels=labels,
            log=True,
        ),
        {NUMBERS: _rows(labels)},
        section="Why",
        rules=("gradients",),
    )


def gradient_roles(material: Material) -> Drawing | None:
    """What the gradient of each block's weights is made of."""
    known = {
        "output queries_keys_gradient": "queries and keys",
        "output values_output_gradient": "values and output",
        "output ffn_gradient": "FFN",
        "output norms_gradient": "norms",
        "output other_gradient": "other weights",
    }
    labels = _there(material, known)
    if len(labels) < 2:
        return None
    return Drawing(
        "Gradients by role",
        "The gradient of each block's weights, split by what they are for, on a logarithmic scale. Where tokens are "
        "alike, that of queries and keys vanishes while the others stay: attention cannot learn what to attend to.",
        lines(
            NUMBERS,
            list(labels.values()),
            material,
            title="norm of the gradient",
            labels=labels,
            log=True,
        ),
        {NUMBERS: _rows(labels)},
        section="Why",
        rules=("attention learns",),
    )


def rogue_features(material: Material) -> Drawing | None:
    """The share of the largest feature, and which one it is."""
    if not material.has("largest_feature_share"):
        return None
    labels = {"output largest_feature_share": "the largest feature's share of the energy"}
    return Drawing(
        "Rogue dimensions",
        "How much of the tokens' energy one single feature carries behind each block (outlier tokens left out). Above "
        "a quarter, similarity tells of this feature more than of the tokens.",
        lines(NUMBERS, list(labels.values()), material, title="share of energy", labels=labels),
        {NUMBERS: _rows(labels)},
        section="Tokens and weights",
        rules=("rogue feature",),
    )


def skipped_blocks(material: Material) -> Drawing | None:
    """What the loss becomes without each block."""
    tables = [
        item.skipped[item.skipped["first_block"] > 0].assign(run=item.label)
        for item in material.subjects
        if item.skipped is not None
    ]
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True).rename(columns={"first_block": "block"})
    runs = list(dict.fromkeys(table["run"]))
    bars = (
        alt.Chart(alt.NamedData("skipped"))
        .mark_bar(size=max(2, 400 // max(material.depth, 1) // len(runs)))
        .encode(
            x=block_axis(material.depth, 0.5),
            y=alt.Y("change:Q", title="change of the loss"),
            color=series_colour(runs, "run"),
            tooltip=[
                "run:N",
                "block:Q",
                "last_block:Q",
                alt.Tooltip("loss:Q", format=".4g"),
                alt.Tooltip("change:Q", format=".3g"),
            ],
        )
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


def _band(table: str, depth: int, colour: str, opacity: float) -> alt.Chart:
    return (
        alt.Chart(alt.NamedData(table))
        .mark_area(color=colour, opacity=opacity)
        .encode(x=block_axis(depth), y=alt.Y("low:Q", title="similarity"), y2="high:Q")
    )


def _reference(material: Material) -> tuple[str, pd.DataFrame] | None:
    """What is normal for a single model, with its name."""
    profile = material.measured[0].profile if len(material.runs) == 1 else None
    reference = None if profile is None else reference_for(profile)
    if reference is None or "token_similarity" not in reference.low:
        return None
    low, high = (getattr(reference, side)["token_similarity"] for side in ("low", "high"))
    return reference.label, pd.DataFrame({"block": range(len(low)), "low": low, "high": high})
