"""Path shares for people: a table by length, the heads that stand out, and what is missed when paths are left out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from depthscope.cli.console import Screen

if TYPE_CHECKING:
    from depthscope.attention_paths import PathShares

_HEADS = 5  # that are named
_MEASURES = ("projection_share", "norm_share", "cosine", "composite_residual")


def show(shares: PathShares) -> None:
    """Prints what was found."""
    console = Screen()
    known = shares.metadata
    total = sum(shares.counts.values())
    paths = str(total) if total < 10**6 else f"{_power(total)}"
    words = [
        str(known["model"]),
        f"{shares.depth} blocks of width {known['width']}",
        *([known["part"]] if known.get("part") else []),
        f"{paths} paths",
        f"{known['samples']} × {known['tokens']} tokens",
        f"{known['dtype']} on {known['device']}",
    ]
    console.print(" · ".join(words))
    console.print()
    _show_lengths(console, shares)
    console.print()
    console.say(_in_words(shares))
    if not shares.heads.empty:
        console.say(_heads_in_words(shares))
    if not shares.losses.empty:
        console.say(_losses_in_words(shares))
    for note in known.get("notes", []):
        console.say(note, indent="note: ")


def _show_lengths(console: Screen, shares: PathShares) -> None:
    from rich.table import Table

    losses = shares.losses[shares.losses["left_out"].isin(["length", "constant"])].set_index("length")["change"]
    heading = ["length", "paths", "share along\nthe output", "norm", "cosine", "composite\nresidual"]
    table = Table(*heading, *(["loss\nwithout"] if len(losses) else []), box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for length, row in shares.summary().iterrows():
        place = int(str(length))
        count = "" if place < 0 else _power(shares.counts[place])
        cells = [_number(float(row[measure])) for measure in _MEASURES]
        change = [f"{losses[place]:+.4f}"] if len(losses) else []
        table.add_row("constant" if place < 0 else str(place), count, *cells, *change)
    console.print(table)


def _in_words(shares: PathShares) -> str:
    summary = shares.summary()
    lengths = summary[summary.index >= 0]["projection_share"]
    total = sum(shares.counts.values())
    mean = sum(length * count for length, count in shares.counts.items()) / total
    longest = lengths.idxmax()
    return (
        f"Paths of length {longest} are the largest share of the output, {lengths.max():.1%} along it. Counted, paths "
        f"have a mean length of {mean:.1f}. The terms add up to the output within "
        f"{shares.metadata['largest_error']:.0e} of it."
    )


def _heads_in_words(shares: PathShares) -> str:
    rows = shares.heads[shares.heads["length"] == 1]
    means = rows.groupby(["block", "head"])["projection_share"].mean()
    chosen = means.reindex(means.abs().sort_values(ascending=False).index)[:_HEADS]
    rows = chosen.reset_index()
    named = ", ".join(
        f"block {block} head {head} ({share:+.1%})" for block, head, share in rows.itertuples(index=False, name=None)
    )
    return f"Heads that carry most of the paths of length 1: {named}."


def _losses_in_words(shares: PathShares) -> str:
    losses = shares.losses
    whole = losses[losses["left_out"] == "nothing"]["loss"].iloc[0]
    single = losses[losses["left_out"] == "length"].sort_values("change")
    most = single.iloc[-1]
    return (
        f"Loss {whole:.4f}. It misses paths of length {int(most['length'])} most: {most['change']:+.4f} without them."
    )


def _power(count: int) -> str:
    return str(count) if count < 10**6 else f"{float(count):.1e}" if count < 10**300 else "> 1e+300"


def _number(value: float) -> str:
    if math.isnan(value):
        return "·"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.1e}"
