"""Charts of one run at a time: what blocks are worth, heads, attention paths, eigenvalues of the value weights."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from depthscope.attention_paths import CONSTANT
from depthscope.drawing import colour_limits
from depthscope.drawing.complex_plane import evenly
from depthscope.measures import MEASURES
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import NOTHING, at_pointer, choice, heat_map
from depthscope.report.subjects import Subject
from depthscope.report.tables import NUMBERS
from depthscope.usage.result import SHOWN

_MOST_POINTS = 4000  # of all blocks together: more cannot be told apart, and would be half of the page
_MOST_BLOCKS = 24


def blocks_that_matter(material: Material) -> Drawing | None:
    """Every quantity of the use of depth by block; colours are those of each row alone."""
    names = {name: heading.replace("\n", " ") for name, (heading, _) in SHOWN.items()}

    def of(subject: Subject) -> pd.DataFrame | None:
        found = []
        for name, said in names.items() if subject.use is not None else ():
            frame = subject.use.frame  # type: ignore[union-attr]
            values = frame[name].to_numpy(dtype=float) if name in frame else np.array([])
            if np.isfinite(values).any():
                low, high = colour_limits(name, values)
                shade = np.clip((values - low) / (high - low if high > low else 1.0), 0, 1)
                texts = ["" if np.isnan(value) else f"{value:.2g}" for value in values]
                columns = {"block": frame["block"], "quantity": said, "value": values, "shade": shade, "text": texts}
                found.append(pd.DataFrame(columns))
        return pd.concat(found) if found else None

    table = material.table(of)
    if table is None:
        return None
    rows = [said for said in names.values() if said in set(table["quantity"])]
    return Drawing(
        "Blocks that matter",
        "What each block adds and what it is worth, by block. Each row has colours of its own. A block that is dark in "
        "the rows of size and of skips does little; where the rows of the lens turn bright, the prediction is made.",
        heat_map(
            "depth_use",
            material.first(table),
            material.depth,
            rows=len(rows),
            y=alt.Y("quantity:N", title=None, sort=rows, axis=alt.Axis(labelLimit=260)),
            colour="shade",
            title="in its row",
            tooltip=["block:Q", "quantity:N", alt.Tooltip("value:Q", format=".4g")],
            text="text",
        ),
        {"depth_use": {}},
        tables={"depth_use": table},
        rules=("depth",),
    )


def heads(material: Material) -> Drawing | None:
    """A heat map for every measure of attention."""
    rows = material.numbers[material.numbers["head"] >= 0]
    if rows.empty:
        return None
    there = set(rows["measure"])
    measures = [name for name in MEASURES if name in there] + sorted(there - set(MEASURES))
    first = next((name for name in ("attention_entropy", "second_eigenvalue") if name in there), measures[0])
    measures.sort(key=lambda name: name != first)
    stations, count = sorted(set(rows["station"])), int(rows["head"].max()) + 1
    return Drawing(
        "Heads",
        "One cell per head and block, for the measure chosen above the chart. Attention entropy is high where a head "
        "attends to everything alike; a second eigenvalue near 0 says that a head passes on little but a mean.",
        heat_map(
            NUMBERS,
            material.first(rows),
            material.depth,
            rows=count,
            where="datum.measure == measure && datum.station == station",
            y=alt.Y("head:O", title="head"),
            colour="value",
            title="",
            tooltip=["block:Q", "head:O", alt.Tooltip("measure:N"), alt.Tooltip("value:Q", format=".4g")],
            params=[choice("measure", measures, "measure"), choice("station", stations, "of")],
        ),
        {NUMBERS: {"head": tuple(range(count)), "station": tuple(stations)}},
        "Why",
    )


def path_lengths(material: Material) -> Drawing | None:
    """The share of each length in the last block's output."""
    table = material.table(lambda item: None if item.shares is None else item.shares.summary().reset_index())
    if table is None:
        return None
    names = {CONSTANT: "biases"}
    table = table.assign(name=[names.get(length, str(length)) for length in table["length"]])
    order = [str(length) for length in sorted(set(table["length"]) - {CONSTANT})] + ["biases"]
    numbers = [alt.Tooltip(f"{name}:Q", format=".4g") for name in ("projection_share", "norm_share", "cosine")]
    bars = (
        alt.Chart(alt.NamedData("path_lengths"))
        .transform_filter("datum.run == shown")
        .mark_bar()
        .encode(
            x=alt.X("name:N", title="attention layers passed", sort=order, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("projection_share:Q", title="share of the output"),
            tooltip=["name:N", *numbers],
        )
    )
    return Drawing(
        "Attention layers that information passes through",
        "What share of the output passed how many attention layers; 0 went past all of them, and biases add their part "
        "whatever the tokens are. A model whose output is made of short paths uses little of its depth.",
        at_pointer([bars], rule=False, params=[alt.param(name="shown", value=material.first(table))]),
        {"path_lengths": {}},
        "Why",
        tables={"path_lengths": table},
        rules=("paths",),
        block=None,
    )


def eigenvalues(material: Material) -> Drawing | None:
    """A point for every eigenvalue of the heads, coloured by block; of a large model for some."""

    def of(subject: Subject) -> pd.DataFrame | None:
        if subject.spectra is None:
            return None
        rows = subject.spectra.frame[subject.spectra.frame["head"] >= 0].sort_values(["block", "real"])
        blocks = evenly(sorted(set(rows["block"].tolist())), _MOST_BLOCKS)
        most = _MOST_POINTS // max(1, len(blocks))
        kept = [
            group.iloc[np.unique(np.linspace(0, len(group) - 1, min(most, len(group))).round().astype(int))]
            for _, group in rows[rows["block"].isin(blocks)].groupby("block")
        ]
        return pd.concat(kept)[["block", "real", "imag"]]

    table = material.table(of)
    if table is None:
        return None
    here = "datum.block == hovered"
    scale, legend = alt.Scale(scheme="viridis"), alt.Legend(title="block", tickMinStep=1, format="d")
    points = (
        alt.Chart(alt.NamedData("eigenvalues"))
        .transform_filter("datum.run == shown")
        .mark_point(filled=True)
        .encode(
            x=alt.X("real:Q", title="real part"),
            y=alt.Y("imag:Q", title="imaginary part"),
            color=alt.Color("block:Q", scale=scale, legend=legend),
            size=alt.condition(here, alt.value(70), alt.value(16)),
            opacity=alt.condition(f"hovered < 0 || {here}", alt.value(0.75), alt.value(0.12)),
            tooltip=["block:Q", alt.Tooltip("real:Q", format=".4g"), alt.Tooltip("imag:Q", format=".4g")],
        )
    )
    zero = alt.Chart(NOTHING).mark_rule(opacity=0.4).encode(x=alt.XDatum(0, type="quantitative"))
    shown = alt.param(name="shown", value=material.first(table))
    return Drawing(
        "Spectra of the value weights",
        "The eigenvalues of W_V W_O of every head in the complex plane, coloured by block. Those right of 0 pull "
        "tokens together if one attention matrix is applied again and again, those left of it push them apart.",
        at_pointer([zero, points], height=340, rule=False, params=[shown]),
        {"eigenvalues": {}},
        "Tokens and weights",
        tables={"eigenvalues": table},
        rules=("spectra",),
        block=None,
    )
