"""What attention paths of each length make of the output (Dong et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable

import altair as alt
import pandas as pd

from depthscope.attention_paths import CONSTANT, PathShares
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import at_pointer, heat_map, series_colour

_KINDS = {
    "projection_share": "projection on the output (adds up to 1)",
    "norm_share": "norm, over the output's",
}
_MOST_CELLS = 6000  # of a heat map: a deeper model shows its shorter paths


def path_lengths(material: Material) -> Drawing | None:
    """The share of each length in the last block's output."""
    table = _table(material, lambda shares: shares.summary().reset_index())
    if table is None:
        return None
    long = table.melt(["run", "length"], list(_KINDS), "kind", "value").assign(
        kind=lambda rows: rows["kind"].map(_KINDS),
        name=lambda rows: ["constant" if length == CONSTANT else str(length) for length in rows["length"]],
    )
    order = [str(length) for length in sorted(set(long["length"]) - {CONSTANT})] + ["constant"]
    bars = (
        alt.Chart(alt.NamedData("path_lengths"))
        .transform_filter("datum.run == shown")
        .mark_bar()
        .encode(
            x=alt.X("name:N", title="length of the path: heads on it", sort=order, axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("kind:N"),
            y=alt.Y("value:Q", title="share"),
            color=series_colour(list(_KINDS.values()), "kind"),
            tooltip=["name:N", "kind:N", alt.Tooltip("value:Q", format=".4g")],
        )
    )
    return Drawing(
        "Path shares",
        "What of the output came on attention paths of each length: 0 is what went past all heads, constant is what "
        "biases add whatever the tokens are. A model whose output is made of short paths uses little of its depth.",
        at_pointer([bars], rule=False, params=[_shown(long)]),
        {"path_lengths": {}},
        section="Why",
        tables={"path_lengths": long},
        rules=("paths",),
        block=None,
    )


def paths_by_block(material: Material) -> Drawing | None:
    """The share of each length behind every block."""
    table = _table(
        material,
        lambda shares: (
            shares.blocks.groupby(["block", "length"])["projection_share"].mean().reset_index()
            if len(shares.blocks)
            else pd.DataFrame(columns=["block", "length", "projection_share"])
        ),
    )
    if table is None or table.empty:
        return None
    longest = max(1, _MOST_CELLS // max(1, table["block"].nunique() * table["run"].nunique()))
    table = table[(table["length"] >= 0) & (table["length"] <= longest)]
    chart = alt.Chart(alt.NamedData("paths_by_block")).transform_filter("datum.run == shown")
    return Drawing(
        "Paths, block by block",
        "The same share behind every block (columns), for paths of each length (rows). Colour that stays at the bottom "
        "says that the trunk goes on carrying what entered it.",
        heat_map(
            chart,
            depth=material.depth,
            y=alt.Y("length:O", title="length", sort="descending"),
            colour="projection_share",
            title="share",
            tooltip=["block:Q", "length:O", alt.Tooltip("projection_share:Q", format=".4g")],
            height=min(420, max(120, 20 * int(table["length"].max() + 1))),
            params=[_shown(table)],
        ),
        {"paths_by_block": {}},
        section="Why",
        tables={"paths_by_block": table},
    )


def path_heads(material: Material) -> Drawing | None:
    """The share of the paths through every head."""
    table = _table(
        material,
        lambda shares: (
            shares.by_head().reset_index().melt("block", var_name="head", value_name="share").astype({"head": int})
            if len(shares.heads)
            else pd.DataFrame(columns=["block", "head", "share"])
        ),
    )
    if table is None or table.empty:
        return None
    chart = alt.Chart(alt.NamedData("path_heads")).transform_filter("datum.run == shown && isValid(datum.share)")
    return Drawing(
        "Paths through heads",
        "How much of the output came on paths through each head. Near 0 a head adds little; below 0 what it adds "
        "works against the output.",
        heat_map(
            chart,
            depth=material.depth,
            y=alt.Y("head:O", title="head"),
            colour="share",
            title="share",
            tooltip=["block:Q", "head:O", alt.Tooltip("share:Q", format=".4g")],
            height=min(480, max(90, 22 * (int(table["head"].max()) + 1))),
            params=[_shown(table)],
            signed=True,
        ),
        {"path_heads": {}},
        section="Why",
        tables={"path_heads": table},
    )


def _table(material: Material, of: Callable[[PathShares], pd.DataFrame]) -> pd.DataFrame | None:
    found = [of(item.shares).assign(run=item.label) for item in material.subjects if item.shares is not None]
    return pd.concat(found, ignore_index=True) if found else None


def _shown(table: pd.DataFrame) -> alt.Parameter:
    return alt.param(name="shown", value=str(table["run"].iloc[0]))
