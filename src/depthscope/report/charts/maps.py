"""Charts of one run at a time: heat maps over blocks, shares of attention paths, outlier tokens, eigenvalues."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from depthscope.attention_paths import CONSTANT
from depthscope.drawing import colour_limits
from depthscope.drawing.complex_plane import evenly
from depthscope.measures import MEASURES
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import NOTHING, at_pointer, choice, colour, heat_map
from depthscope.report.subjects import Subject
from depthscope.report.tables import NUMBERS

_MOST_CELLS = 6000  # of a heat map: a deeper model shows its shorter paths
_MOST_TOKENS = 24  # outliers, the largest
_MOST_POINTS = 4000  # of all blocks together: more cannot be told apart, and would be half of the page
_MOST_BLOCKS = 24
# Quantities of the use of depth, in the order of the rows.
_USE = {
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
}


def blocks_that_matter(material: Material) -> Drawing | None:
    """Every quantity by block; colours are those of each row alone."""

    def of(subject: Subject) -> pd.DataFrame | None:
        found = []
        for name, said in _USE.items() if subject.use is not None else ():
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
    rows = [said for said in _USE.values() if said in set(table["quantity"])]
    return Drawing(
        "Blocks that matter",
        "What each block adds and what it is worth, by block. Each row has colours of its own: shares go from 0 to 1, "
        "cosines from −1 to 1, all else from 0, or a number below it, to what nine of ten blocks do not pass. A block "
        "that is dark in the rows of size and skips does little; where the rows of the prediction turn bright, it is "
        "made.",
        heat_map(
            "depth_use",
            _first(table),
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


def built_upon(material: Material) -> Drawing | None:
    """How far each block changes what it adds when an earlier one is skipped."""

    def of(subject: Subject) -> pd.DataFrame | None:
        if subject.use is None or subject.use.matrix.empty:
            return None
        return subject.use.matrix.reset_index().melt("skipped", var_name="block", value_name="change").dropna()

    table = material.table(of)
    if table is None:
        return None
    table = table.astype({"block": int, "skipped": int}).assign(shade=table["change"].clip(upper=1.0))
    return Drawing(
        "Who is built upon whom",
        "How far a block (columns) changes what it adds when an earlier one (rows) is skipped: 0 means that it does "
        "not notice, 1 and more that it does something else. Dark rows are blocks on which nothing is built.",
        heat_map(
            "built_upon",
            _first(table),
            material.depth,
            rows=int(table["skipped"].max()),
            y=alt.Y("skipped:O", title="skipped block"),
            colour="shade",
            title="change, up to 1",
            tooltip=["block:Q", "skipped:O", alt.Tooltip("change:Q", format=".3g")],
            domain=(0, 1),
        ),
        {"built_upon": {}},
        "Why",
        tables={"built_upon": table},
        rules=("built upon",),
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
        "One cell per head and block, for the measure chosen above the chart. Attention entropy: high where a head "
        "looks at everything alike. Second eigenvalue and δ: near 0 where a head passes on little but a mean.",
        heat_map(
            NUMBERS,
            _first(rows),
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
        rules=("spectra",),
    )


_KINDS = {
    "projection_share": "projection on the output (adds up to 1)",
    "norm_share": "norm, over the output's",
}


def path_lengths(material: Material) -> Drawing | None:
    """The share of each length in the last block's output."""
    table = material.table(lambda item: None if item.shares is None else item.shares.summary().reset_index())
    if table is None:
        return None
    long = table.melt(["run", "length"], list(_KINDS), "kind", "value")
    names = ["constant" if length == CONSTANT else str(length) for length in long["length"]]
    long = long.assign(kind=long["kind"].map(_KINDS), name=names)
    order = [str(length) for length in sorted(set(long["length"]) - {CONSTANT})] + ["constant"]
    bars = (
        alt.Chart(alt.NamedData("path_lengths"))
        .transform_filter("datum.run == shown")
        .mark_bar()
        .encode(
            x=alt.X("name:N", title="length of the path: heads on it", sort=order, axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("kind:N"),
            y=alt.Y("value:Q", title="share"),
            color=colour(list(_KINDS.values()), "kind"),
            tooltip=["name:N", "kind:N", alt.Tooltip("value:Q", format=".4g")],
        )
    )
    return Drawing(
        "Path shares",
        "What of the output came on attention paths of each length: 0 is what went past all heads, constant is what "
        "biases add whatever the tokens are. A model whose output is made of short paths uses little of its depth.",
        at_pointer([bars], rule=False, params=[alt.param(name="shown", value=_first(long))]),
        {"path_lengths": {}},
        "Why",
        tables={"path_lengths": long},
        rules=("paths",),
        block=None,
    )


def paths_by_block(material: Material) -> Drawing | None:
    """The share of each length after every block."""

    def of(subject: Subject) -> pd.DataFrame | None:
        if subject.shares is None or subject.shares.blocks.empty:
            return None
        return subject.shares.blocks.groupby(["block", "length"])["projection_share"].mean().reset_index()

    table = material.table(of)
    if table is None:
        return None
    longest = max(1, _MOST_CELLS // max(1, table["block"].nunique() * table["run"].nunique()))
    table = table[(table["length"] >= 0) & (table["length"] <= longest)]
    return Drawing(
        "Paths, block by block",
        "The same share after every block (columns), for paths of each length (rows). Colour that stays at the bottom "
        "says that the trunk goes on carrying what entered it.",
        heat_map(
            "paths_by_block",
            _first(table),
            material.depth,
            rows=int(table["length"].max() + 1),
            y=alt.Y("length:O", title="length", sort="descending"),
            colour="projection_share",
            title="share",
            tooltip=["block:Q", "length:O", alt.Tooltip("projection_share:Q", format=".4g")],
        ),
        {"paths_by_block": {}},
        "Why",
        tables={"paths_by_block": table},
    )


def sinks(material: Material) -> Drawing | None:
    """A bar from the block where an outlier token appears to its last, with its text."""

    def of(subject: Subject) -> pd.DataFrame | None:
        if subject.profile is None or not len(subject.profile.sinks):
            return None
        found = subject.profile.sink_tokens().nlargest(_MOST_TOKENS, "peak_norm_ratio")
        texts = found["text"].fillna("").astype(str)
        names = [
            (f"“{text}”, " if text.strip() else "") + f"token {token}, sequence {sample}"
            for text, token, sample in zip(texts, found["token"], found["sample"], strict=True)
        ]
        return found.assign(text=texts, name=names)

    table = material.table(of)
    if table is None:
        return None
    sides = alt.Scale(domain=[-0.5, material.depth + 0.5], nice=False)
    chart = (
        alt.Chart(alt.NamedData("sinks"))
        .transform_filter("datum.run == shown")
        .transform_calculate(left="datum.first_block - 0.5", right="datum.last_block + 0.5")
        .mark_bar(height=12)
        .encode(
            x=alt.X("left:Q", title="block", scale=sides, axis=alt.Axis(format="d", tickMinStep=1)),
            x2="right:Q",
            y=alt.Y(
                "name:N", title=None, sort=alt.SortField("peak_norm_ratio", "descending"), axis=alt.Axis(labelLimit=260)
            ),
            color=alt.Color(
                "peak_norm_ratio:Q", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(title="× median norm")
            ),
            tooltip=[
                *("text:N", "sample:Q", "token:Q", "first_block:Q", "last_block:Q", "peak_block:Q"),
                alt.Tooltip("peak_norm_ratio:Q", format=".4g"),
            ],
        )
    )
    height = max(60, 22 * int(table["run"].value_counts().max()))
    return Drawing(
        "Outlier tokens (sinks)",
        "Tokens that are many times larger than the others, from the block where each appears to the last one that has "
        "it. They dominate raw similarity, which is why directions without them are judged beside it.",
        at_pointer([chart], height=height, rule=False, params=[alt.param(name="shown", value=_first(table))]),
        {"sinks": {}},
        "Tokens and weights",
        tables={"sinks": table},
        rules=("sink", "few outliers"),
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
    zero = alt.Chart(NOTHING).mark_rule(opacity=0.4)
    axes = [
        zero.encode(x=alt.XDatum(0, type="quantitative")),
        zero.encode(y=alt.YDatum(0, type="quantitative")),
    ]
    shown = alt.param(name="shown", value=_first(table))
    return Drawing(
        "Spectra of the value weights",
        "The eigenvalues of H = W_V W_O of every head in the complex plane, coloured by block. Those right of 0 pull "
        "tokens together if one attention matrix is applied again and again, those left of it push them apart.",
        at_pointer([*axes, points], height=340, rule=False, params=[shown]),
        {"eigenvalues": {}},
        "Tokens and weights",
        tables={"eigenvalues": table},
        rules=("value weights", "eigenvalues"),
        block=None,
    )


def _first(table: pd.DataFrame) -> str:
    return str(table["run"].iloc[0])
