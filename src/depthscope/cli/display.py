"""A profile in the terminal: a line per measure, a table of blocks, and the verdict."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from depthscope.cli.sparkline import sparkline

if TYPE_CHECKING:
    import pandas as pd

    from depthscope.cli.console import Screen
    from depthscope.diagnosis import Diagnosis
    from depthscope.probing import Profile
    from depthscope.usage import DepthUse

_ROWS = 12  # of the table of blocks
# What norms make for branches to read; in post-norm these are stations of the trunk.
_READ = {"attention_input": "attention\nreads", "ffn_input": "FFN\nreads"}
# Where they were taken: what attention can learn from, beside what it would learn with.
_LEARNING = {"queries_keys_gradient": "∂ queries\nand keys", "values_output_gradient": "∂ values\nand output"}
_MAIN = ("token_similarity", "token_diversity", "cosine_similarity", "direction_similarity", "largest_token_share")


def show(
    profile: Profile, diagnosis: Diagnosis, skipped: pd.DataFrame | None = None, used: DepthUse | None = None
) -> None:
    """Everything that a person wants to see first."""
    from depthscope.cli.console import Screen
    from depthscope.cli.verdict import show_diagnosis

    console = Screen(soft_wrap=True)
    console.print()
    for line in headline(profile.metadata).splitlines():
        console.say(line)
    console.print()
    _show_measures(console, profile)
    _show_blocks(console, profile)
    notes = [*profile.metadata.get("notes", [])]
    if used is not None:
        from depthscope.cli.depth_display import show_tables

        show_tables(console, used)
        notes += used.metadata.get("notes", [])
    show_diagnosis(console, diagnosis)
    if skipped is not None:
        _show_skipped(console, skipped)
    for note in dict.fromkeys(notes):
        console.say(f"Note: {note}")


def _show_skipped(console: Screen, skipped: pd.DataFrame) -> None:
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
    console.say(skip_sentence(skipped))


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
    towers = metadata.get("towers") or {}
    what = [
        str(metadata.get("model")),
        f"{metadata.get('blocks')} blocks" if towers else f"{metadata.get('blocks')} blocks{_trunk(metadata)}",
        f"{metadata.get('dtype')} on {metadata.get('device')}",
        *([f"without {', '.join(metadata['without'])}"] if metadata.get("without") else []),
    ]
    parts = [
        f"{name}: blocks {part['first_block']} to {part['last_block']}{_trunk(part)}" for name, part in towers.items()
    ]
    return "\n".join([" · ".join(what), *parts])


def _trunk(about: dict[str, Any]) -> str:
    """What is said of a model that is one trunk, or of a part of one that has several."""
    from depthscope.stations import IN_WORDS

    placement: Any = about.get("placement")
    words = [
        f" of width {about.get('width')}",
        IN_WORDS.get(placement, ""),
        "causal" if about.get("causal") else "",
        f"{about.get('samples')} × {about.get('tokens')} tokens",
    ]
    return " · ".join(word for word in words if word)


def _show_measures(console: Screen, profile: Profile) -> None:
    from rich.table import Table

    from depthscope.stations import TRUNK

    width = min(max(console.width - 52, min(20, console.width - 46), 8), 60)  # what names and values leave
    table = Table("measure", "block 0 to last", "first", "last", box=None, header_style="bold")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for station, measure in _rows(profile):
        whole = [value for value in profile.curve(measure, station) if not math.isnan(value)]
        low, high = (0.0, 1.0) if _is_share(measure) else _range(whole)
        for part in profile.parts:
            curve = profile.curve(measure, station, part)
            defined = [value for value in curve if not math.isnan(value)]
            name = " ".join([measure, *([f"({station})"] if station != "output" else []), *([part] if part else [])])
            ends = (defined[0], curve[-1]) if defined else (math.nan, math.nan)
            table.add_row(name, sparkline(curve, low, high, width), *(format_value(measure, value) for value in ends))
    console.print(table)
    asked = profile.metadata.get("stations", [])
    others = [name for name in profile.frame["station"].unique() if name in asked and name != "output"]
    if others and {*asked} - {"attention_input"} != {*TRUNK}:  # those are there for the verdict
        console.print()
        console.say(f"Also measured at {', '.join(others)}: --out saves all of it.")


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


def _show_blocks(console: Screen, profile: Profile) -> None:
    from rich.table import Table

    from depthscope.cli.console import columns_that_fit
    from depthscope.stations import FINAL

    names = [name for name in _MAIN if name in profile.names()]
    if not names:
        return
    readers = {s: head for s, head in _READ.items() if "token_similarity" in profile.names(s)}
    if profile.metadata.get("placement") in (None, "post"):
        readers = {}
    if readers and "token_similarity" in names and "token_diversity" in names:
        names.remove("token_diversity")  # it is the rest of t_sim, and a line of a terminal has 80 letters
    learning = [name for name in _LEARNING if name in profile.names()]
    names = [*names[:2], *learning, *names[2:]]
    columns = [(name, "output", _LEARNING.get(name, heading(name))) for name in names]
    columns += [("token_similarity", station, head) for station, head in readers.items()]
    fit = columns_that_fit(
        [max(9, *map(len, head.splitlines())) for *_, head in columns], console.width - len(" block ")
    )
    columns = columns[:fit]
    table = Table("block", *(head for *_, head in columns), box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for part, (first, last) in profile.parts.items():
        curves = [(name, profile.curve(name, station, part=part)) for name, station, _ in columns]
        for place, row in block_rows(part, first, last, _ROWS):
            table.add_row(row, *(format_value(name, curve[place]) for name, curve in curves))
        behind = [(name, profile.curve(name, FINAL, part=part)[-1]) for name in names if name in profile.names(FINAL)]
        if any(not math.isnan(value) for _, value in behind):
            table.add_row(f"{part} final".strip(), *(format_value(name, value) for name, value in behind))
    console.print()
    console.print(table)
    console.print()


def heading(measure: str) -> str:
    """A measure over a column of numbers."""
    return measure.replace("_", "\n", 1)


def heading_width(words: str) -> int:
    """How wide a column of that heading is: no number is wider than nine letters."""
    return max(9, *map(len, words.splitlines()))


def block_rows(part: str, first: int, last: int, rows: int) -> list[tuple[int, str]]:
    """The blocks of a part that a table of about so many rows shows: place in its curve, and name of the row."""
    depth = last - first + 1
    shown = sorted({*range(0, depth + 1, max(1, math.ceil(depth / rows))), depth})
    return [(place, f"{part} {first - 1 + place if place else 'in'}" if part else str(place)) for place in shown]


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
