"""How much of its depth a model uses: every quantity of `depth_use` by block, and who is built upon whom."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from depthscope.drawing import colour_limits
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import heat_map

# In the order of the rows.
_NAMES = {
    "attention_ratio": "attention: size over the trunk's",
    "attention_cosine": "attention: cosine with the trunk",
    "cross_attention_ratio": "cross-attention: size",
    "cross_attention_cosine": "cross-attention: cosine",
    "ffn_ratio": "FFN: size over the trunk's",
    "ffn_cosine": "FFN: cosine with the trunk",
    "sink_rate": "heads that look at the first token",
    "largest_logit": "largest attention logit",
    "lens_kl": "KL to the final prediction",
    "lens_top1": "tokens with the final first choice",
    "lens_top5": "of the final five likeliest",
    "skip_later": "skipped: change of later blocks",
    "skip_output": "skipped: change of the output",
    "skip_loss": "skipped: rise of the loss",
    "linear_error": "what a linear map misses",
    "linear_loss": "linear map: rise of the loss",
}


def blocks_that_matter(material: Material) -> Drawing | None:
    """Every quantity by block; colours are those of each row alone."""
    tables = []
    for item in material.subjects:
        if item.use is None:
            continue
        frame = item.use.frame
        for name, said in _NAMES.items():
            if name in frame and np.isfinite(frame[name].to_numpy(dtype=float)).any():
                values = frame[name].to_numpy(dtype=float)
                low, high = colour_limits(name, values)
                shade = np.clip((values - low) / (high - low if high > low else 1.0), 0, 1)
                found = {"run": item.label, "block": frame["block"], "quantity": said, "value": values, "shade": shade}
                tables.append(pd.DataFrame(found))
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True)
    rows = [said for said in _NAMES.values() if said in set(table["quantity"])]
    chart = alt.Chart(alt.NamedData("depth_use")).transform_filter("datum.run == shown && isValid(datum.shade)")
    return Drawing(
        "Blocks that matter",
        "What each block adds and what it is worth, by block. Each row has colours of its own: shares go from 0 to 1, "
        "cosines from −1 to 1, all else from 0, or a number below it, to what nine of ten blocks do not pass. A block "
        "that is dark in the rows of size, skips and linear maps does little; where the rows of the prediction turn "
        "bright, it is made.",
        heat_map(
            chart,
            depth=material.depth,
            y=alt.Y("quantity:N", title=None, sort=rows, axis=alt.Axis(labelLimit=260)),
            colour="shade",
            title="in its row",
            tooltip=["block:Q", "quantity:N", alt.Tooltip("value:Q", format=".4g")],
            height=22 * len(rows),
            params=[_shown(table)],
        ),
        {"depth_use": {}},
        tables={"depth_use": table},
        rules=("depth",),
    )


def built_upon(material: Material) -> Drawing | None:
    """How far each block changes what it adds when an earlier one is skipped."""
    tables = [
        item.use.matrix.reset_index().melt("skipped", var_name="block", value_name="change").assign(run=item.label)
        for item in material.subjects
        if item.use is not None and not item.use.matrix.empty
    ]
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True).dropna().astype({"block": int, "skipped": int})
    if table.empty:
        return None
    table["shade"] = table["change"].clip(upper=1.0)
    chart = alt.Chart(alt.NamedData("built_upon")).transform_filter("datum.run == shown")
    return Drawing(
        "Who is built upon whom",
        "How far a block (columns) changes what it adds when an earlier one (rows) is skipped: 0 means that it does "
        "not notice, 1 and more that it does something else. Dark rows are blocks on which nothing is built.",
        heat_map(
            chart,
            depth=material.depth,
            y=alt.Y("skipped:O", title="skipped block"),
            colour="shade",
            title="change, up to 1",
            tooltip=["block:Q", "skipped:O", alt.Tooltip("change:Q", format=".3g")],
            height=min(480, max(90, 20 * int(table["skipped"].max()))),
            params=[_shown(table)],
            domain=(0, 1),
        ),
        {"built_upon": {}},
        section="Why",
        tables={"built_upon": table},
        rules=("built upon",),
    )


def _shown(table: pd.DataFrame) -> alt.Parameter:
    return alt.param(name="shown", value=str(table["run"].iloc[0]))
