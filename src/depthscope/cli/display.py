"""A profile in the terminal: a line per measure, a table of blocks, and the verdict."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from depthscope.cli.sparkline import sparkline

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from depthscope.diagnosis import Diagnosis
    from depthscope.probing import Profile

_ROWS = 12  # of the table of blocks
# What norms make for branches to read; in post-norm these are stations of the trunk.
_READ = {"attention_input": "attention\nreads", "ffn_input": "FFN\nreads"}
_MAIN = ("token_similarity", "token_diversity", "cosine_similarity", "direction_similarity", "largest_token_share")


def show(profile: Profile, diagnosis: Diagnosis, skipped: pd.DataFrame | None = None) -> None:
    """Everything that a person wants to see first."""
    from rich.console import Console

    from depthscope.cli.verdict import show_diagnosis

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\n{headline(profile.metadata)}\n", markup=False)
    _show_measures(console, profile)
    _show_blocks(console, profile)
    show_diagnosis(console, diagnosis)
    if skipped is not None:
        _show_skipped(console, skipped)
    for note in profile.metadata.get("notes", []):
        console.print(f"Note: {note}", markup=False)


def _show_skipped(console: Console, skipped: pd.DataFrame) -> None:
    """Every block, or run of blocks, with the loss without it."""
    from rich.table import Table

    table = Table("without", "loss", "change", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for _, row in skipped.iterrows():
        first, last = round(row["first_block"]), round(row["last_block"])
        name = "nothing" if not first else f"block {first}" if first == last else f"blocks {first} to {last}"
        table.add_row(name, f"{row['loss']:.4f}", f"{row['change']:+.4f}" if first else "")
    console.print()
    console.print(table)
    console.print(skip_sentence(skipped), markup=False)


def skip_sentence(skipped: pd.DataFrame) -> str:
    """The blocks that the loss misses least and most."""
    whole, single = skipped.iloc[0], skipped.iloc[1:].sort_values("change")
    least, most = (_blocks(row) for row in (single.iloc[0], single.iloc[-1]))
    run = round(single.iloc[0]["last_block"] - single.iloc[0]["first_block"]) + 1
    what = "a block" if run == 1 else f"{run} blocks in a row"
    return f"Loss {whole['loss']:.4f}. Skipping {what} changes it by {least} to {most}."


def _blocks(row: pd.Series[float]) -> str:
    first, last = round(row["first_block"]), round(row["last_block"])
    return f"{row['change']:+.4f} ({f'block {first}' if first == last else f'blocks {first} to {last}'})"


def headline(metadata: dict[str, Any]) -> str:
    halves = ", ".join(f"{part} {count}" for part, count in metadata.get("parts", {}).items())
    parts = [
        str(metadata.get("model")),
        f"{metadata.get('blocks')} blocks{f' ({halves})' if halves else ''} of width {metadata.get('width')}",
        f"{metadata['placement']}-norm" if metadata.get("placement") else "",
        "causal" if metadata.get("causal") else "",
        f"{metadata.get('samples')} × {metadata.get('tokens')} tokens",
        f"{metadata.get('dtype')} on {metadata.get('device')}",
    ]
    return " · ".join(part for part in parts if part)


def _show_measures(console: Console, profile: Profile) -> None:
    from rich.table import Table

    from depthscope.stations import TRUNK

    width = min(max(console.width - 52, 20), 60)  # what names and values leave
    table = Table("measure", "block 0 to last", "first", "last", box=None, header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
    for station, measure in _rows(profile):
        curve = profile.curve(measure, station)
        defined = [value for value in curve if not math.isnan(value)]
        low, high = (0.0, 1.0) if _is_share(measure) else _range(defined)
        name = measure if station == "output" else f"{measure} ({station})"
        ends = (defined[0], curve[-1]) if defined else (math.nan, math.nan)
        table.add_row(name, sparkline(curve, low, high, width), *(format_value(measure, value) for value in ends))
    console.print(table)
    asked = profile.metadata.get("stations", [])
    others = [name for name in profile.frame["station"].unique() if name in asked and name != "output"]
    if others and {*asked} - {"attention_input"} != {*TRUNK}:  # those are there for the verdict
        console.print(f"\nAlso measured at {', '.join(others)}: --out saves all of it.", markup=False)


def _range(values: list[float]) -> tuple[float, float]:
    """From the lowest to the highest; a curve that differs by rounding only is flat."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return (low, low) if high - low <= 1e-5 * max(abs(low), abs(high)) else (low, high)


def _rows(profile: Profile) -> list[tuple[str, str]]:
    """(station, measure): all at `output`, and those that stand elsewhere only, such as attention's."""
    from depthscope.measures import MEASURES

    here = profile.names()
    pairs = profile.frame[["station", "measure"]].drop_duplicates().itertuples(index=False, name=None)
    found = [("output", name) for name in here] + [pair for pair in pairs if pair[1] not in here]
    return [pair for pair in found if pair[1] not in MEASURES or not MEASURES[pair[1]].is_name]


def _show_blocks(console: Console, profile: Profile) -> None:
    from rich.table import Table

    from depthscope.stations import FINAL

    names = [name for name in _MAIN if name in profile.names()]
    if not names:
        return
    readers = {s: head for s, head in _READ.items() if "token_similarity" in profile.names(s)}
    if profile.metadata.get("placement") in (None, "post"):
        readers = {}
    if readers and "token_similarity" in names and "token_diversity" in names:
        names.remove("token_diversity")  # it is the rest of t_sim, and a line of a terminal has 80 letters
    columns = [(name, "output", name.replace("_", "\n", 1)) for name in names]
    columns += [("token_similarity", station, head) for station, head in readers.items()]
    curves = [(name, profile.curve(name, station)) for name, station, _ in columns]
    table = Table("block", *(head for _, _, head in columns), box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    depth = profile.depth
    for block in sorted({*range(0, depth + 1, max(1, math.ceil(depth / _ROWS))), depth}):
        table.add_row(str(block), *(format_value(name, curve[block]) for name, curve in curves))
    if profile.names(FINAL):
        table.add_row("final", *(format_value(name, profile.curve(name, FINAL)[depth]) for name in names))
    console.print()
    console.print(table)
    console.print()


def format_value(measure: str, value: float) -> str:
    """Diversity in powers of ten, since its last digits are the point; the rest in three digits."""
    if math.isnan(value):
        return "·"
    if measure == "token_diversity":
        return f"{value:.1e}"
    return f"{value:.3f}" if _is_share(measure) or 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.2e}"


def _is_share(measure: str) -> bool:
    """Whether it goes from 0 to 1, and is drawn so."""
    from depthscope.measures import MEASURES

    return measure in MEASURES and MEASURES[measure].is_share
