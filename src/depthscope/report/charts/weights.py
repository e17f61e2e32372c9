"""The eigenvalues of H = W_V W_O: in the complex plane, and how many are negative (Dovonon et al. 2025)."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from depthscope.drawing.complex_plane import evenly
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import at_pointer, lines
from depthscope.value_spectra import Spectra

_MOST_POINTS = 4000  # of all blocks together: more cannot be told apart, and would be half of the page
_MOST_BLOCKS = 24


def eigenvalues(material: Material) -> Drawing | None:
    """A point for every eigenvalue, coloured by block."""
    tables = [_points(item.spectra).assign(run=item.label) for item in material.subjects if item.spectra is not None]
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True)
    shown = alt.param(name="shown", value=str(table["run"].iloc[0]))
    base = alt.Chart(alt.NamedData("eigenvalues")).transform_filter("datum.run == shown")
    here = "datum.block == hovered"
    points = base.mark_point(filled=True).encode(
        x=alt.X("real:Q", title="real part"),
        y=alt.Y("imag:Q", title="imaginary part"),
        color=alt.Color(
            "block:Q", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(title="block", tickMinStep=1, format="d")
        ),
        size=alt.condition(here, alt.value(70), alt.value(16)),
        opacity=alt.condition(f"hovered < 0 || {here}", alt.value(0.75), alt.value(0.12)),
        tooltip=["block:Q", alt.Tooltip("real:Q", format=".4g"), alt.Tooltip("imag:Q", format=".4g")],
    )
    axes = [
        alt.Chart(alt.Data(values=[{}])).mark_rule(opacity=0.4).encode(x=alt.XDatum(0, type="quantitative")),  # type: ignore[arg-type]
        alt.Chart(alt.Data(values=[{}])).mark_rule(opacity=0.4).encode(y=alt.YDatum(0, type="quantitative")),  # type: ignore[arg-type]
    ]
    return Drawing(
        "Spectra of the value weights",
        "The eigenvalues of H = W_V W_O in the complex plane, coloured by block. Those right of 0 pull tokens together "
        "if one attention matrix is applied again and again, those left of it push them apart.",
        at_pointer([*axes, points], height=340, rule=False, params=[shown]),
        {"eigenvalues": {}},
        section="Tokens and weights",
        tables={"eigenvalues": table},
        rules=("value weights", "eigenvalues"),
        block=None,
    )


def negative_share(material: Material) -> Drawing | None:
    """How many eigenvalues of each block are negative."""
    tables = [
        item.spectra.by_block["negative_share"].reset_index().assign(run=item.label, series="negative share")
        for item in material.subjects
        if item.spectra is not None
    ]
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True).rename(columns={"negative_share": "value"})
    chart = lines("negative_share", ["negative share"], material, title="negative share", domain=(0, 1))
    return Drawing(
        "Negative eigenvalues by block",
        "The share of a block's eigenvalues whose real part is negative; random weights have one half. At three of "
        "four or more the value weights push tokens apart, at one of four or fewer they pull them together.",
        chart,
        {"negative_share": {}},
        section="Tokens and weights",
        tables={"negative_share": table},
    )


def _points(spectra: Spectra) -> pd.DataFrame:
    """Eigenvalues of whole blocks, or of their heads where whole blocks were left out; of a large model some."""
    frame = spectra.frame
    whole = frame[frame["head"] < 0]
    rows = whole if len(whole) else frame
    blocks = evenly(sorted(set(rows["block"].tolist())), _MOST_BLOCKS)
    rows = rows[rows["block"].isin(blocks)]
    most = _MOST_POINTS // max(1, len(blocks))
    kept = [
        group.iloc[np.unique(np.linspace(0, len(group) - 1, min(most, len(group))).round().astype(int))]
        for _, group in rows.groupby("block")
    ]
    return pd.concat(kept, ignore_index=True)[["block", "real", "imag"]]
