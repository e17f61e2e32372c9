"""Several runs: how far each is from the baseline, block by block."""

from __future__ import annotations

from typing import Any

import altair as alt

from depthscope.drawing.palette import BLUE
from depthscope.measures import MEASURES
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import at_pointer, block_axis, choice, dashes
from depthscope.report.tables import NUMBERS

_SAME: Any = ["block", "station", "head", "measure"]


def difference(material: Material) -> Drawing | None:
    """A measure at the blocks' outputs, minus that of the baseline which is chosen at the top of the page."""
    runs = material.runs
    if len(runs) < 2:
        return None
    there = set(material.numbers.loc[material.numbers["station"] == "output", "measure"])
    measures = [name for name in MEASURES if name in there and not MEASURES[name].is_name]
    measures += sorted(there - set(MEASURES))
    if not measures:
        return None
    baseline = alt.param(name="baseline", value=runs[0])
    chosen = choice("measure", measures, "measure", [name.replace("_", " ") for name in measures])
    chart = (
        alt.Chart(alt.NamedData(NUMBERS))
        .transform_filter("datum.measure == measure")
        .transform_calculate(at_baseline="datum.run == baseline ? datum.value : null")
        .transform_joinaggregate(base="max(at_baseline)", groupby=_SAME)
        .transform_filter("isValid(datum.base) && isValid(datum.value) && datum.run != baseline")
        .transform_calculate(difference="datum.value - datum.base")
        .encode(
            x=block_axis(material.depth),
            y=alt.Y("difference:Q", title="difference to the baseline", axis=alt.Axis(format="~r")),
        )
    )
    zero = alt.Chart(alt.Data(values=[{}])).mark_rule(opacity=0.4).encode(y=alt.YDatum(0, type="quantitative"))  # type: ignore[arg-type]
    line = chart.mark_line().encode(**dashes(runs))
    point = chart.mark_point(filled=True, size=70, color=BLUE).encode(
        opacity=alt.condition("datum.block == hovered", alt.value(1), alt.value(0)),
        tooltip=[
            "run:N",
            "block:Q",
            *(alt.Tooltip(f"{name}:Q", format=".4g") for name in ("value", "base", "difference")),
        ],
    )
    return Drawing(
        "Difference to the baseline",
        "The measure chosen above the chart, at the blocks' outputs, minus that of the baseline chosen at the top of "
        "the page. Above 0 a run has more of it than the baseline; only blocks that both have are drawn.",
        at_pointer([zero, line, point], params=[baseline, chosen]),
        {NUMBERS: {"station": ("output",), "head": (-1,)}},
    )
