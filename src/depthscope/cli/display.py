"""A result in the terminal: its summary in at most twenty lines; with `--full` all findings and tables after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from depthscope.cli.console import Screen, sparkline
from depthscope.naming import counted, lowered

if TYPE_CHECKING:
    import pandas as pd

    from depthscope.diagnosis.summary import Summary, Table
    from depthscope.usage import Finding

LINES = 20  # of a summary, with the blank ones
_PROSE = 40  # letters: a longer cell is wrapped
_STYLES = {
    "collapsed": "bold red",
    "broken": "bold red",
    "collapsing": "bold yellow",
    "rank collapse": "bold yellow",
    "cannot tell": "bold",
}


def show(
    summary: Summary,
    *,
    full: bool = False,
    tables: Mapping[str, pd.DataFrame] | None = None,
    findings: Iterable[Finding] = (),
) -> None:
    """The summary; findings and notes are left out from the end where twenty lines do not hold them.

    `full` shows them all, then what only the result has: further `findings`, and `tables` by what they show.
    """
    console, tables = Screen(soft_wrap=True), tables or {}
    verdict = f"{summary.verdict.capitalize()}: " if summary.verdict else ""
    headline = summary.headline
    if verdict and not headline[:2].isupper():
        headline = lowered(headline)
    begin = [*console.wrapped(summary.model), "", *console.wrapped(verdict + headline)]
    end = console.wrapped(f"What to do: {summary.advice}") if summary.advice else []
    end += [part for line in summary.code.splitlines() for part in console.wrapped(line, "    ", " " * 8)]
    middle = _curves(console, summary) + ([""] if summary.curves and summary.table else []) + _rows(summary.table)
    middle = middle[: None if full else max(LINES - 4 - len(begin) - len(end), 1)]
    room = LINES - 2 - len(begin) - len(middle) - len(end) - bool(middle) - bool(end)
    left = []
    kept: list[list[str]] = []  # the lines of findings, then those of notes
    for texts, mark in (([item.sentence for item in summary.findings], "- "), (dict.fromkeys(summary.notes), "Note: ")):
        paragraphs = [console.wrapped(text, mark) for text in texts]
        fitting = len(paragraphs)
        while not full and sum(map(len, paragraphs[:fitting])) > room:
            fitting -= 1
        kept.append([line for paragraph in paragraphs[:fitting] for line in paragraph])
        room -= len(kept[-1])
        left.append(len(paragraphs) - fitting)
    blocks = [[*begin, *kept[0]], middle, [*end, *kept[1]] if end else kept[1]]
    styles = {"What to do:": "bold"} | (
        {verdict.rstrip(): _STYLES.get(summary.verdict, "bold green")} if verdict else {}
    )
    console.print()
    for place, block in enumerate(blocks):
        if place and block and (place == 1 or end):
            console.print()
        for line in block:
            shown = console.render_str(line)
            for words, style in styles.items():
                shown.highlight_words([words], style)
            console.print(shown)
    if not full:
        hidden = {"finding": summary.left + left[0], "note": left[1]}
        more = ", ".join([*(counted(number, noun) for noun, number in hidden.items() if number), *tables])
        console.say(f"More: --full ({more}); --out DIR (a page)." if more else "More: --full; --out DIR (a page).")
        return
    said = {summary.headline, *(item.sentence for item in summary.findings)}
    for finding in findings:
        if finding.sentence not in said:
            console.say(finding.sentence, "- ")
    for name, frame in tables.items():
        show_table(frame, name)


def show_table(frame: pd.DataFrame, title: str = "") -> None:
    """A table, cut into several where the terminal is narrow; no number is cut."""
    import pandas as pd

    console = Screen(soft_wrap=True)
    shown = frame.map(lambda value: format_value(value) if isinstance(value, float) else str(value))
    if title:
        console.print(f"\n{title}")
    if max((len(cell) for cell in shown.to_numpy().flat), default=0) > _PROSE:
        console.show_rows(
            ("", *shown), [(str(name), *row) for name, row in zip(shown.index, shown.to_numpy(), strict=True)]
        )
    else:
        is_plain = isinstance(frame.index, pd.RangeIndex) and frame.index.name is None
        console.print(shown.to_string(line_width=console.width, index=not is_plain))


def _curves(console: Screen, summary: Summary) -> list[str]:
    """Curves as bars, a line each."""
    widest = max((len(curve.label) for curve in summary.curves), default=0)
    room = min(console.reading_width - widest - 20, 60)
    return [
        f"{curve.label:<{widest}}  {format_value(curve.values[0]):>6} "
        f"{sparkline(curve.values, curve.low, curve.high, room)} {format_value(curve.values[-1])}"
        for curve in summary.curves
        if curve.values
    ]


def _rows(table: Table | None) -> list[str]:
    """A table as text: the first column left, numbers right, a last column of words left."""
    if table is None:
        return []
    columns = [
        _column(cells, first=not place) for place, cells in enumerate(zip(table.columns, *table.rows, strict=True))
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _column(cells: Sequence[str], *, first: bool) -> list[str]:
    width = max(map(len, cells))
    is_words = first or any(letter.isalpha() for cell in cells[1:] for letter in cell)
    return [cell.ljust(width) if is_words else cell.rjust(width) for cell in cells]


def format_value(value: float) -> str:
    """Three digits; what is undefined is a dot."""
    if math.isnan(value):
        return "·"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.2e}"
