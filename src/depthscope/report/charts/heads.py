"""Heads × blocks: what the attention of every head is like."""

from __future__ import annotations

import altair as alt

from depthscope.measures import MEASURES
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import choice, heat_map
from depthscope.report.tables import NUMBERS


def heads(material: Material) -> Drawing | None:
    """A heat map for every measure of attention, of one run at a time."""
    rows = material.numbers[material.numbers["head"] >= 0]
    if rows.empty:
        return None
    there = set(rows["measure"])
    measures = [name for name in MEASURES if name in there] + sorted(there - set(MEASURES))
    first = next((name for name in ("attention_entropy", "second_eigenvalue") if name in there), measures[0])
    measures.sort(key=lambda name: name != first)
    stations = sorted(set(rows["station"]))
    count = int(rows["head"].max()) + 1
    shown = alt.param(name="shown", value=str(rows["run"].iloc[0]))
    chosen = choice("measure", measures, "measure", [name.replace("_", " ") for name in measures])
    wheres = choice("station", stations, "of", [name.replace("_", " ") for name in stations])
    chart = (
        alt.Chart(alt.NamedData(NUMBERS))
        .transform_filter("datum.run == shown && datum.measure == measure && datum.station == station")
        .transform_filter("isValid(datum.value)")
    )
    return Drawing(
        "Heads",
        "One cell per head and block, for the measure chosen above the chart. Attention entropy: high where a head "
        "looks at everything alike. Second eigenvalue and δ: near 0 where a head passes on little but a mean.",
        heat_map(
            chart,
            depth=material.depth,
            y=alt.Y("head:O", title="head"),
            colour="value",
            title="",
            tooltip=["block:Q", "head:O", alt.Tooltip("measure:N"), alt.Tooltip("value:Q", format=".4g")],
            height=min(480, max(90, 22 * count)),
            params=[shown, chosen, wheres],
        ),
        {NUMBERS: {"head": tuple(range(count)), "station": tuple(stations)}},
        section="Why",
        rules=("spectra",),
    )
