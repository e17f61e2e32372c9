"""Trainings: curves with the spread over seeds, and depth over time."""

from __future__ import annotations

import altair as alt
import pandas as pd

from depthscope.drawing.complex_plane import evenly
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import at_pointer, choice, colour

_MOST_STEPS = 240  # points of a curve: more than a screen shows
_MOST_CELLS = 24_000  # of all heat maps together
_FIRST = ("loss", "test_loss", "valid_loss", "test_accuracy")  # what is chosen, if it is there


def training(material: Material) -> Drawing | None:
    """Every logged quantity over the steps: the mean over seeds, and one standard deviation to either side."""
    several = len(material.subjects) > 1
    table = material.table(lambda item: item.training)
    if table is None:
        return None
    if several:
        table["series"] = table["run"] + ": " + table["series"]
    keys = ["quantity", "series", "step"]
    found = table.groupby(keys, sort=False)["value"].agg(["mean", "std", "count"])
    table = found.reset_index().rename(columns={"mean": "value", "count": "runs"})
    table["low"], table["high"] = (table["value"] + sign * table["std"].fillna(0) for sign in (-1, 1))
    rows = [own.sort_values("step") for _, own in table.groupby(["quantity", "series"], sort=False)]
    kept = [own.iloc[evenly(list(range(len(own))), _MOST_STEPS)] for own in rows]
    table = pd.concat(kept, ignore_index=True).drop(columns="std")
    series = list(dict.fromkeys(table["series"]))
    quantities = sorted(set(table["quantity"]), key=lambda name: (_FIRST.index(name) if name in _FIRST else 9, name))
    wanted = alt.selection_point(name="wanted", fields=["series"], bind="legend", toggle="true")
    chart = (
        alt.Chart(alt.NamedData("training"))
        .transform_filter("datum.quantity == quantity && isValid(datum.value)")
        .encode(
            x=alt.X("step:Q", title="step", axis=alt.Axis(format="~s", tickMinStep=1, tickCount=8)),
            color=colour(series, "series"),
        )
    )
    bounds = [alt.Tooltip(f"{name}:Q", format=".4g") for name in ("value", "low", "high")]
    band = chart.mark_area(opacity=0.18).encode(
        y=alt.Y("low:Q", title="value", scale=alt.Scale(zero=False)), y2="high:Q"
    )
    line = (
        chart.mark_line(point=alt.OverlayMarkDef(size=14))
        .encode(
            y=alt.Y("value:Q", title="value", scale=alt.Scale(zero=False)),
            opacity=alt.condition(wanted, alt.value(1), alt.value(0.08)),
            tooltip=["series:N", "quantity:N", "step:Q", *bounds, "runs:Q"],
        )
        .add_params(wanted)
    )
    chosen = choice("quantity", quantities, "quantity")
    return Drawing(
        "Training",
        "The quantity chosen above the chart over the steps of training: the mean over the seeds, and in the band one "
        "standard deviation to either side. Where bands overlap, the difference may be chance.",
        at_pointer([band, line], rule=False, params=[chosen]),
        {"training": {}},
        section="Training",
        tables={"training": table},
        block=None,
    )


def compared(material: Material) -> Drawing | None:
    """What a fair comparison judged by, against depth: mean and range of every variant."""
    rows = []
    several = len(material.subjects) > 1
    for item in material.subjects:
        cells = (item.compared or {}).get("cells")
        for cell in cells if isinstance(cells, list) else []:
            judged = cell.get("judged")
            if not isinstance(judged, str) or not isinstance(cell.get(judged), float | int):
                continue
            series = f"{item.label}: {cell['variant']}" if several else str(cell["variant"])
            bounds = [cell.get(f"{judged}_{end}") for end in ("low", "high")]
            low, high = (cell[judged] if bound is None else bound for bound in bounds)
            lr = f"{cell['lr']:g}"
            rows.append((series, int(cell["depth"]), lr, judged, cell.get("rank", ""), cell[judged], low, high))
    if not rows:
        return None
    names = ["series", "depth", "lr", "quantity", "rank", "value", "low", "high"]
    table = pd.DataFrame(rows, columns=names).astype({"value": float, "low": float, "high": float})
    chart = alt.Chart(alt.NamedData("compared")).encode(
        x=alt.X("depth:O", title="blocks", axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("series:N", sort=None),
        color=colour(list(dict.fromkeys(table["series"])), "series"),
        tooltip=["series:N", "depth:O", "lr:N", "rank:N", "quantity:N", "value:Q", "low:Q", "high:Q"],
    )
    bars = chart.mark_rule(strokeWidth=2).encode(
        y=alt.Y("low:Q", title="test loss", scale=alt.Scale(zero=False)), y2="high:Q"
    )
    points = chart.mark_point(filled=True, size=60).encode(y=alt.Y("value:Q", title="test loss"))
    return Drawing(
        "Which variant, how deep",
        "The test loss of each variant at the learning rate that suits it: the mean over fresh seeds, and as a bar "
        "the least and the greatest of them.",
        at_pointer([bars, points], rule=False),
        {"compared": {}},
        section="Training",
        tables={"compared": table},
        rules=("comparison",),
        block=None,
    )


def watched(material: Material) -> Drawing | None:
    """Block × step, as `watch` saw it."""
    table = material.table(lambda item: item.watched)
    if table is None:
        return None
    table = table.drop(columns="run")
    table = table[table["measure"].str.endswith("similarity") | table["measure"].eq("token_diversity")]
    if table.empty:
        return None
    steps = sorted(set(table["step"]))
    per_step = len(table) / len(steps)
    table = table[table["step"].isin(evenly(steps, max(2, int(_MOST_CELLS / per_step))))].reset_index(drop=True)
    series, measures, stations = (list(dict.fromkeys(table[name])) for name in ("series", "measure", "station"))
    stations.sort(key=lambda name: name != "after_ffn")  # a remedy stands after it, and at τ = 1 leaves 0 there
    params = [
        choice("series", series, "run"),
        choice("measure", measures, "measure"),
        choice("station", stations, "at"),
    ]
    cells = (
        alt.Chart(alt.NamedData("watched"))
        .transform_filter("datum.series == series && datum.measure == measure && datum.station == station")
        .transform_calculate(low="datum.block - 0.5", high="datum.block + 0.5")
        .mark_rect()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelAngle=0)),
            y=alt.Y(
                "low:Q",
                title="block",
                scale=alt.Scale(domain=[-0.5, int(table["block"].max()) + 0.5], nice=False),
                axis=alt.Axis(format="d", tickMinStep=1, grid=False),
            ),
            y2="high:Q",
            color=alt.Color(
                "value:Q", scale=alt.Scale(scheme="viridis", domain=[0, 1], clamp=True), legend=alt.Legend(title="")
            ),
            stroke=alt.condition("datum.block == hovered", alt.value("currentColor"), alt.value(None)),
            tooltip=["series:N", "step:O", "block:Q", "station:N", "measure:N", alt.Tooltip("value:Q", format=".4g")],
        )
    )
    return Drawing(
        "Depth while training",
        "One cell per block and watched step: bright where the tokens after a block are alike. A bright band that "
        "grows downwards is a collapse that training does not undo; one that darkens is depth being gained.",
        at_pointer([cells], height=300, rule=False, params=params),
        {"watched": {}},
        section="Training",
        tables={"watched": table},
        block="y",
    )
