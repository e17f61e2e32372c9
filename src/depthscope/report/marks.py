"""The forms that charts are made of: lines over blocks, heat maps, and the rule at the block under the pointer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from depthscope.drawing.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from depthscope.report.drawings import Material

COLOURS = (VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY, GREY)  # all of them can be seen on black and on white
HEIGHT = 260
_LEGEND, _LEGEND_TITLE = 160, 30  # of the colours of a heat map, in pixels: at most; what stands above them
# Letters and lines have the colour of the text around them: light and dark need no other chart.
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "domainColor": "currentColor",
        "tickColor": "currentColor",
        "gridColor": "currentColor",
        "gridOpacity": 0.12,
        "domainOpacity": 0.4,
        "tickOpacity": 0.4,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelOverlap": True,
    },
    "legend": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 420,
        "symbolStrokeWidth": 3,
    },
    "line": {"strokeWidth": 2},
    "rule": {"color": "currentColor"},
    "text": {"color": "currentColor"},
}
_HOVERED = "datum.block == hovered"


def block_axis(depth: int, first: float = 0) -> alt.X:
    """Blocks to the right, from what enters to the last."""
    last = depth if first == 0 else depth + 0.5
    return alt.X(
        "block:Q",
        title="block",
        scale=alt.Scale(domain=[first, max(last, first + 1)], nice=False),
        axis=alt.Axis(format="d", tickMinStep=1),
    )


def at_pointer(layers: Sequence[Any], *, height: int = HEIGHT, rule: bool = True, params: Sequence[Any] = ()) -> Any:
    """The layers, with a rule at the block under the pointer, wherever on the page that is."""
    hovered = alt.param(name="hovered", value=-1)
    here = (
        alt.Chart(alt.Data(values=[{}]))  # type: ignore[arg-type]
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
    domain: tuple[float, float] | None = None,
    behind: Sequence[Any] = (),
) -> Any:
    """A line for each of the series, in which a click on the legend chooses; of several runs, dashed by run.

    `labels` turns "station measure" into a name of a series, where the table has no column of them. `behind` are charts
    that are drawn first.
    """
    runs = material.labels
    chart: Any = alt.Chart(alt.NamedData(table))
    if labels is not None:
        names = ", ".join(f"{key!r}: {name!r}" for key, name in labels.items())
        chart = chart.transform_calculate(series=f"({{{names}}})[datum.station + ' ' + datum.measure]")
        chart = chart.transform_filter("isValid(datum.series)")
    if log:
        chart = chart.transform_filter(f"datum.{y} > 0")
    scale = alt.Scale(type="log") if log else alt.Scale(domain=list(domain)) if domain else alt.Scale(zero=False)
    chart = chart.encode(
        x=block_axis(material.depth),
        y=alt.Y(f"{y}:Q", title=title, scale=scale, axis=alt.Axis(format=".0e" if log else "~r", tickCount=6)),
        color=series_colour(series, by),
    )
    wanted = alt.selection_point(name="wanted", fields=[by], bind="legend", toggle="true")
    faint = alt.condition(wanted, alt.value(1), alt.value(0.08))
    tooltip = [alt.Tooltip(f"{by}:N", title="what"), "block:Q", alt.Tooltip(f"{y}:Q", format=".4g")]
    line = chart.mark_line().encode(opacity=faint, **dashes(runs)).add_params(wanted)
    point = chart.mark_point(filled=True, size=70).encode(
        opacity=alt.condition(_HOVERED, alt.value(1), alt.value(0)),
        tooltip=[alt.Tooltip("run:N"), *tooltip] if len(runs) > 1 else tooltip,
    )
    return at_pointer([*behind, line, point])


def series_colour(series: Sequence[str], by: str = "series") -> alt.Color:
    """The colours of the house in the order of the series; with a legend if there are several."""
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(series))]
    legend = alt.Legend(orient="top", title=None, columns=3, symbolOpacity=1) if len(series) > 1 else None
    return alt.Color(f"{by}:N", scale=alt.Scale(domain=list(series), range=colours), legend=legend, sort=None)


def dashes(runs: Sequence[str]) -> dict[str, Any]:
    """Solid for the first run, which is the baseline, and ever shorter dashes for the others."""
    if len(runs) < 2:
        return {"detail": alt.Detail("run:N")}
    patterns = [[1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [1, 3]]
    return {
        "strokeDash": alt.StrokeDash(
            "run:N",
            scale=alt.Scale(domain=list(runs), range=[patterns[number % len(patterns)] for number in range(len(runs))]),
            legend=alt.Legend(orient="top", title=None, symbolStrokeColor="currentColor", columns=2),
        )
    }


def choice(name: str, options: Sequence[str], label: str, labels: Sequence[str] | None = None) -> Any:
    """A list to choose from above a chart; its value is the parameter `name`."""
    bound = alt.binding_select(options=list(options), labels=list(labels or options), name=f"{label} ")
    return alt.param(name=name, value=options[0], bind=bound)


def heat_map(
    chart: Any,
    *,
    depth: int,
    y: alt.Y,
    colour: str,
    title: str,
    tooltip: Sequence[Any],
    height: int,
    params: Sequence[Any],
    signed: bool = False,
    domain: Sequence[float] | None = None,
) -> Any:
    """A cell for every block and whatever stands on the other axis; the column under the pointer has an edge.

    `signed`: 0 is in the middle of the colours. `domain` has the values of the first and the last colour; by default
    those of the smallest and the largest number.
    """
    ends: dict[str, Any] = {} if domain is None else {"domain": list(domain)}
    scale = alt.Scale(scheme="blueorange", domainMid=0) if signed else alt.Scale(scheme="viridis", **ends)
    length = max(40, min(_LEGEND, height - _LEGEND_TITLE))  # what is longer than the chart would be cut off
    cells = (
        chart.transform_calculate(left="datum.block - 0.5", right="datum.block + 0.5")
        .mark_rect()
        .encode(
            x=alt.X(
                "left:Q",
                title="block",
                scale=alt.Scale(domain=[0.5, depth + 0.5], nice=False),
                axis=alt.Axis(format="d", tickMinStep=1, grid=False),
            ),
            x2="right:Q",
            y=y,
            color=alt.Color(f"{colour}:Q", scale=scale, legend=alt.Legend(title=title, gradientLength=length)),
            stroke=alt.condition(_HOVERED, alt.value("currentColor"), alt.value(None)),
            tooltip=list(tooltip),
        )
    )
    return at_pointer([cells], height=height, rule=False, params=params)
