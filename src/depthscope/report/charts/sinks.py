"""Outlier tokens: what they are, where they appear and how long they stay."""

from __future__ import annotations

import altair as alt
import pandas as pd

from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import at_pointer

_BY_SIZE = alt.SortField("peak_norm_ratio", "descending")
_MOST = 24  # tokens that are shown, the largest


def sinks(material: Material) -> Drawing | None:
    """A bar from the block where an outlier token appears to its last, with its text."""
    tables = []
    for subject in material.measured:
        assert subject.profile is not None
        if len(subject.profile.sinks):
            found = subject.profile.sink_tokens().nlargest(_MOST, "peak_norm_ratio")
            tables.append(found.assign(run=subject.label))
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True)
    table["text"] = table["text"].fillna("").astype(str)
    shown = alt.param(name="shown", value=str(table["run"].iloc[0]))
    spoken = [f"“{text}”, " if text.strip() else "" for text in table["text"]]
    table["name"] = [
        f"{said}token {token}, sequence {sample}"
        for said, token, sample in zip(spoken, table["token"], table["sample"], strict=True)
    ]
    table["block"] = table["first_block"]
    chart = (
        alt.Chart(alt.NamedData("sinks"))
        .transform_filter("datum.run == shown")
        .transform_calculate(left="datum.first_block - 0.5", right="datum.last_block + 0.5")
        .mark_bar(height=12)
        .encode(
            x=alt.X(
                "left:Q",
                title="block",
                scale=alt.Scale(domain=[-0.5, material.depth + 0.5], nice=False),
                axis=alt.Axis(format="d", tickMinStep=1),
            ),
            x2="right:Q",
            y=alt.Y("name:N", title=None, sort=_BY_SIZE, axis=alt.Axis(labelLimit=260)),
            color=alt.Color(
                "peak_norm_ratio:Q", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(title="× median norm")
            ),
            tooltip=[
                "text:N", "sample:Q", "token:Q", "first_block:Q", "last_block:Q", "peak_block:Q",
                alt.Tooltip("peak_norm_ratio:Q", format=".4g"),
            ],
        )
    )  # fmt: skip
    count = max(sum(table["run"] == run) for run in set(table["run"]))
    return Drawing(
        "Outlier tokens (sinks)",
        "Tokens that are many times larger than the others, from the block where each appears to the last one that has "
        "it. They dominate raw similarity, which is why directions without them are judged beside it.",
        at_pointer([chart], height=max(60, 22 * count), params=[shown]),
        {"sinks": {}},
        section="Tokens and weights",
        tables={"sinks": table.drop(columns="block")},
        rules=("sink", "few outliers"),
    )
