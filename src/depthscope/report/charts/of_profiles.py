"""Charts of lines over blocks: similarity, directions left, who shares what, steps, gradients."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt
import pandas as pd

from depthscope.diagnosis import reference_for
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.steps import growth_by_block
from depthscope.drawing.palette import GREY
from depthscope.report.drawings import Chart, Drawing, Material
from depthscope.report.marks import block_axis, lines
from depthscope.report.subjects import Subject
from depthscope.report.tables import NUMBERS, Where

_SIMILARITIES = {
    "output token_similarity": "token similarity (t_sim)",
    "output direction_similarity": "of directions, without outliers",
    "attention_input token_similarity": "as attention reads them",
    "ffn_input token_similarity": "as the FFN reads them",
    "final_norm token_similarity": "as the head reads them, after the last norm",
}


def similarity(material: Material) -> Drawing | None:
    """How alike tokens are after each block: raw, robust, and as what follows reads them."""
    labels = _measured(material, _SIMILARITIES) or _measured(material, {"output cosine_similarity": "mean cosine"})
    if not labels:
        return None
    tables, bands, uses = {}, [], {NUMBERS: _rows(labels)}
    caption = "How alike the tokens of a sequence are after each block; 0 is what enters block 1, and 1 means that all "
    caption += "are equal. The higher a line ends, the less depth is left to work with."
    profile = material.measured[0].profile if len(material.measured) == 1 else None
    if profile is not None and "output token_similarity" in labels:
        reference = reference_for(profile)
        if reference is not None:
            low, high = (getattr(reference, side)["token_similarity"] for side in ("low", "high"))
            tables["reference"] = pd.DataFrame({"block": range(len(low)), "low": low, "high": high})
            band = alt.Chart(alt.NamedData("reference")).mark_area(color=GREY, opacity=0.25)
            y = alt.Y("low:Q", title="similarity")
            bands.append(band.encode(x=block_axis(material.depth), y=y, y2="high:Q"))
            uses["reference"] = {}
            caption += f" Grey: usual for {reference.label}."
    return Drawing(
        "Similarity of tokens",
        caption,
        lines(NUMBERS, list(labels.values()), material, title="similarity", labels=labels, share=True, behind=bands),
        uses,
        tables=tables,
        rules=("verdict",),
    )


def measured(
    name: str,
    heading: str,
    caption: str,
    labels: Mapping[str, str],
    *,
    y: str,
    rules: tuple[str, ...],
    fewest: int = 1,
    why: bool = False,
    log: bool = False,
    share: bool = False,
) -> Chart:
    """A chart of measures of the profile, `labels` from "station measure" to the name of a line; None with fewer than
    `fewest` of them. `log` and `share` as for `lines`."""

    def chart(material: Material) -> Drawing | None:
        there = _measured(material, labels)
        if len(there) < fewest:
            return None
        return Drawing(
            heading,
            caption,
            lines(NUMBERS, list(there.values()), material, title=y, labels=there, log=log, share=share),
            {NUMBERS: _rows(there)},
            "Why" if why else "What happens",
            rules=rules,
        )

    chart.__name__ = name
    return chart


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
    rules=("rank collapse",),
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
    rules=("anisotropic", "converges by training", "loss of context", "alike", "sequences alike"),
    fewest=4,
    share=True,
)
GRADIENTS = measured(
    "gradients",
    "Gradients",
    "The size of the gradient at each block, on a logarithmic scale. Where tokens are alike, that of queries and keys "
    "vanishes while the others stay: attention cannot learn what to attend to.",
    {
        "output output_gradient": "of a block's output",
        "output weight_gradient": "of all its weights",
        "output queries_keys_gradient": "queries and keys",
        "output values_output_gradient": "values and output",
        "output ffn_gradient": "FFN",
    },
    y="norm of the gradient",
    rules=("attention learns",),
    why=True,
    log=True,
)


def steps(material: Material) -> Drawing | None:
    """What each kind of step has added to the log-odds by each block."""

    def of(subject: Subject) -> pd.DataFrame | None:
        if subject.profile is None or (facts := Facts(subject.profile)).judged not in subject.profile.names():
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
        "What each kind of step has added, from block 1 on, to the logarithm of t_sim/(1 − t_sim). A line that climbs "
        "is a step that makes tokens alike; one that falls drives them apart.",
        lines("steps", list(dict.fromkeys(table["step"])), material, y="total", title="added by then", by="step"),
        {"steps": {}},
        "Why",
        tables={"steps": table},
        rules=("steps",),
    )


def _measured(material: Material, labels: Mapping[str, str]) -> dict[str, str]:
    """Of "station measure" → name, what was measured."""
    return {key: name for key, name in labels.items() if material.has(*reversed(key.split()))}


def _rows(labels: Mapping[str, str]) -> Where:
    stations, measures = zip(*(key.split() for key in labels), strict=True)
    return {"station": tuple(dict.fromkeys(stations)), "measure": tuple(dict.fromkeys(measures)), "head": (-1,)}
