"""The forms that charts are made of: lines over blocks, heat maps, and the rule at the block under the pointer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from depthscope.drawing.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from depthscope.report.drawings import Material

COLOURS = (VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY, GREY)  # all of them can be seen on black and on white
HEIGHT = 260
_LEGEND, _LEGEND_TITLE = 160, 30  # of the colours of a heat map, in pixels: at most; what stands above them
# Letters and lines have the colour of the text around them: light and dark need no other chart.
_TEXT: dict[str, Any] = {"labelColor": "currentColor", "titleColor": "currentColor"}
_TEXT |= {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
_AXIS: dict[str, Any] = {f"{part}Color": "currentColor" for part in ("domain", "tick", "grid")}
_AXIS |= {"gridOpacity": 0.12, "domainOpacity": 0.4, "tickOpacity": 0.4, "labelOverlap": True}
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": _TEXT | _AXIS,
    "legend": _TEXT | {"labelLimit": 420, "symbolStrokeWidth": 3},
    "line": {"strokeWidth": 2},
    "rule": {"color": "currentColor"},
    "text": {"color": "currentColor"},
}
NOTHING: Any = alt.Data(values=[{}])  # type: ignore[arg-type]
_HOVERED = "datum.block == hovered"


def block_axis(depth: int, first: float = 0) -> alt.X:
    """Blocks to the right, from what enters to the last."""
    last = max(depth if first == 0 else depth + 0.5, first + 1)
    scale = alt.Scale(domain=[first, last], nice=False)
    return alt.X("block:Q", title="block", scale=scale, axis=alt.Axis(format="d", tickMinStep=1))


def along_depth(chart: Any, material: Material) -> Any:
    """The chart with blocks to the right, or, where models differ in depth, with the share of their blocks."""
    if len(set(material.depths.values())) < 2:
        return chart.encode(x=block_axis(material.depth))
    depths = json.dumps(material.depths)
    scale, title = alt.Scale(domain=[0, 1], nice=False), "share of the blocks"
    return chart.transform_calculate(at=f"datum.block / ({depths})[datum.run]").encode(
        x=alt.X("at:Q", title=title, scale=scale, axis=alt.Axis(format=".0%", tickCount=5))
    )


def at_pointer(layers: Sequence[Any], *, height: int = HEIGHT, rule: bool = True, params: Sequence[Any] = ()) -> Any:
    """The layers, with a rule at the block under the pointer, wherever on the page that is."""
    hovered = alt.param(name="hovered", value=-1)
    here = (
        alt.Chart(NOTHING)
        .mark_rule(opacity=alt.expr("hovered < 0 ? 0 : 0.5"), clip=True)
        .encode(x=alt.XDatum(alt.expr("hovered"), type="quantitative"))
    )
    chart = alt.layer(*([here] if rule else []), *layers).properties(width="container", height=height)
    return chart.add_params(hovered, *params)


def lines(
    table: str,
    series: Sequence[str],
    material: Material,
    *,
    title: str,
    y: str = "value",
    by: str = "series",
    labels: Mapping[str, str] | None = None,
    log: bool = False,
    share: bool = False,
    behind: Sequence[Any] = (),
) -> Any:
    """Lines over blocks: of one run a colour for each of the series; of several a colour for each run, and one series
    at a time, which is chosen above the chart. A click on the legend shows one line only.

    `labels` turns "station measure" into a name of a series, where the table has no column of them. The axis of a
    `share` goes from 0 to 1, and lower where numbers do. `behind` are charts that are drawn first.
    """
    runs, params = material.labels, []
    chart: Any = alt.Chart(alt.NamedData(table))
    if labels is not None:
        chart = chart.transform_calculate(series=f"({json.dumps(labels)})[datum.station + ' ' + datum.measure]")
        chart = chart.transform_filter("isValid(datum.series)")
    colours, field = list(series), by
    if len(runs) > 1:
        colours, field = runs, "run"
        if len(series) > 1:
            params.append(choice("series", series, "line"))
            chart = chart.transform_filter(f"datum.{by} == series")
    if log:
        chart = chart.transform_filter(f"datum.{y} > 0")
    shares = alt.Scale(zero=True, domainMax=1, nice=False)
    scale = alt.Scale(type="log") if log else shares if share else alt.Scale(zero=False)
    chart = along_depth(chart, material).encode(
        y=alt.Y(f"{y}:Q", title=title, scale=scale, axis=alt.Axis(format=".0e" if log else "~r", tickCount=6)),
        color=colour(colours, field),
        detail=alt.Detail("run:N"),
    )
    wanted = alt.selection_point(name="wanted", fields=[field], bind="legend", toggle="true")
    faint = alt.condition(wanted, alt.value(1), alt.value(0.08))
    tooltip = [alt.Tooltip(f"{by}:N", title="what"), "block:Q", alt.Tooltip(f"{y}:Q", format=".4g")]
    line = chart.mark_line().encode(opacity=faint).add_params(wanted)
    point = chart.mark_point(filled=True, size=70).encode(
        opacity=alt.condition(_HOVERED, alt.value(1), alt.value(0)),
        tooltip=[alt.Tooltip("run:N"), *tooltip] if len(runs) > 1 else tooltip,
    )
    return at_pointer([*behind, line, point], rule=len(set(material.depths.values())) < 2, params=params)


def colour(names: Sequence[str], field: str) -> alt.Color:
    """The colours of the house in the order of the names; with a legend if there are several."""
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(names))]
    legend = alt.Legend(orient="top", title=None, columns=3, symbolOpacity=1) if len(names) > 1 else None
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=list(names), range=colours), legend=legend, sort=None)


def choice(name: str, options: Sequence[str], label: str) -> Any:
    """A list to choose from above a chart; its value is the parameter `name`."""
    said = [option.replace("_", " ") if option.isidentifier() else option for option in options]
    bound = alt.binding_select(options=list(options), labels=said, name=f"{label} ")
    return alt.param(name=name, value=options[0], bind=bound)


def heat_map(
    table: str,
    first: str,
    depth: int,
    *,
    rows: int,
    y: alt.Y,
    colour: str,
    title: str,
    tooltip: Sequence[Any],
    where: str = "",
    params: Sequence[Any] = (),
    text: str = "",
) -> Any:
    """A cell for every block and whatever stands on the other axis, of the run that is chosen on the page (the `first`
    to begin with); the column under the pointer has an edge.

    `where` is a filter besides. `text` is written into the cells where these are wide enough.
    """
    height = min(480, max(90, 22 * rows))
    scale = alt.Scale(scheme="viridis")
    length = max(40, min(_LEGEND, height - _LEGEND_TITLE))  # what is longer than the chart would be cut off
    wanted = f"datum.run == shown && isValid(datum.{colour})" + (f" && {where}" if where else "")
    chart = alt.Chart(alt.NamedData(table)).transform_filter(wanted)
    sides = alt.Scale(domain=[0.5, depth + 0.5], nice=False)
    axis = alt.Axis(format="d", tickMinStep=1, grid=False)
    cells = (
        chart.transform_calculate(left="datum.block - 0.5", right="datum.block + 0.5")
        .mark_rect()
        .encode(
            x=alt.X("left:Q", title="block", scale=sides, axis=axis),
            x2="right:Q",
            y=y,
            color=alt.Color(f"{colour}:Q", scale=scale, legend=alt.Legend(title=title, gradientLength=length)),
            stroke=alt.condition(_HOVERED, alt.value("currentColor"), alt.value(None)),
            tooltip=list(tooltip),
        )
    )
    layers = [cells]
    if text:
        room = alt.expr(f"width / {max(depth, 1)} < 30 ? 0 : 1")
        bright = alt.condition(f"datum.{colour} > 0.6", alt.value("#000"), alt.value("#fff"))
        x = alt.X("block:Q", title="block", scale=sides, axis=axis)
        layers.append(chart.mark_text(fontSize=10, opacity=room).encode(x=x, y=y, text=f"{text}:N", color=bright))
    shown = alt.param(name="shown", value=first)
    return at_pointer(layers, height=height, rule=False, params=[shown, *params])
