"""A result in the terminal: its summary in at most twenty lines; with `--full` all tables and findings after it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from depthscope.cli.console import Screen
from depthscope.cli.sparkline import sparkline

if TYPE_CHECKING:
    import pandas as pd

    from depthscope.diagnosis import Diagnosis
    from depthscope.diagnosis.summary import Summary, Table
    from depthscope.probing import Profile
    from depthscope.usage import DepthUse, Finding

LINES = 20  # of a summary, with the blank ones
_STYLES = {
    "collapsed": "bold red",
    "broken": "bold red",
    "collapsing": "bold yellow",
    "rank collapse": "bold yellow",
    "cannot tell": "bold",
}
_INDENT = "    "


def show(summary: Summary, *, full: bool, rest: str = "") -> None:
    """The summary; findings and notes are left out from the end where twenty lines do not hold them.

    `rest` says what `--full` would add, where it is not asked for.
    """
    console = Screen(soft_wrap=True)
    verdict = f"{summary.verdict.capitalize()}: " if summary.verdict else ""
    begin = [*_wrapped(console, summary.model), "", *_wrapped(console, verdict + _after(verdict, summary.headline))]
    end = _wrapped(console, f"What to do: {summary.advice}") if summary.advice else []
    end += textwrap.indent(_code(console, summary.code), _INDENT).splitlines()
    middle = _pictured(console, summary)[: None if full else max(LINES - 4 - len(begin) - len(end), 1)]
    findings = [_wrapped(console, finding.sentence, "- ") for finding in summary.findings]
    notes = [_wrapped(console, note, "Note: ") for note in dict.fromkeys(summary.notes)]
    room = LINES - 2 - len(begin) - len(middle) - len(end) - bool(middle) - bool(end)
    kept = findings if full else _fitting(findings, room)
    room -= sum(map(len, kept))
    said = notes if full else _fitting(notes, room)
    left = summary.left + len(findings) - len(kept), len(notes) - len(said)
    style = _STYLES.get(summary.verdict, "bold green")
    console.print()
    for line in (*begin, *(line for finding in kept for line in finding)):
        console.print(console.styled(line, {verdict.rstrip(): style} if verdict else {}))
    for line in [*([""] if middle else []), *middle, *([""] if end else []), *end]:
        console.print(console.styled(line, {"What to do:": "bold"}))
    for line in (line for note in said for line in note):
        console.print(console.styled(line, {}))
    if not full:
        console.say(_more(left, rest))


def _after(verdict: str, headline: str) -> str:
    return headline[0].lower() + headline[1:] if verdict and not headline[:2].isupper() else headline


def _more(left: tuple[int, int], rest: str) -> str:
    findings, notes = left
    words = [f"{findings} finding{'s' if findings > 1 else ''}"] if findings else []
    words += [f"{notes} note{'s' if notes > 1 else ''}"] if notes else []
    words += [rest] if rest else []
    full = f"--full ({', '.join(words)})" if words else "--full"
    return f"More: {full}; --out DIR (a page)."


def _fitting(paragraphs: Sequence[list[str]], room: int) -> list[list[str]]:
    """The first paragraphs that together have no more lines than there is room for."""
    kept: list[list[str]] = []
    for paragraph in paragraphs:
        if sum(map(len, kept)) + len(paragraph) > room:
            break
        kept.append(paragraph)
    return kept


def _wrapped(console: Screen, text: str, indent: str = "") -> list[str]:
    return console.wrapped(text, indent).splitlines()


def _code(console: Screen, code: str) -> str:
    """Lines of Python; a call that is too long is broken after each argument."""
    return "\n".join(_broken(console, line) for line in code.splitlines())


def _broken(console: Screen, line: str) -> str:
    if len(line) + len(_INDENT) <= console.reading_width or "(" not in line:
        return line
    head, _, arguments = line.partition("(")
    inner, _, tail = arguments.rpartition(")")
    return "\n".join([f"{head}(", textwrap.indent(",\n".join(_arguments(inner)), "    "), f"){tail}"])


def _arguments(text: str) -> list[str]:
    """The arguments of a call, which hold commas of their own."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [argument.strip() for argument in found]


def _pictured(console: Screen, summary: Summary) -> list[str]:
    """Curves as bars, a line each, and the table."""
    labels = [curve.label for curve in summary.curves]
    room = console.reading_width - max(map(len, labels), default=0) - 20
    lines = [
        f"{curve.label:<{max(map(len, labels))}}  {format_value('', curve.values[0]):>6} "
        f"{sparkline(curve.values, curve.low, curve.high, min(room, 60))} {format_value('', curve.values[-1])}"
        for curve in summary.curves
        if curve.values
    ]
    if summary.table is not None:
        lines += ([""] if lines else []) + _columns(summary.table)
    return [console.legible(line) for line in lines]


def _columns(table: Table) -> list[str]:
    """A table as text: the first column left, numbers right, a last column of words left."""
    cells = [table.columns, *table.rows]
    widths = [max(len(row[place]) for row in cells) for place in range(len(table.columns))]
    words = [
        place == 0 or any(letter.isalpha() for row in table.rows for letter in row[place])
        for place in range(len(widths))
    ]
    return [
        "  ".join(
            f"{cell:<{width}}" if is_words else f"{cell:>{width}}"
            for cell, width, is_words in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in cells
    ]


# --- with --full ------------------------------------------------------------------------------------------


def show_findings(findings: Iterable[Finding]) -> None:
    """The findings that the summary has left out, a paragraph each."""
    console = Screen(soft_wrap=True)
    console.print()
    for finding in findings:
        console.say(finding.sentence, "- ")


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int] = (0,)) -> None:
    """A table that may be cut into several, as the terminal's width asks for; `words` are columns that stand left."""
    from rich.table import Table as Drawn

    console, rows = Screen(soft_wrap=True), [list(row) for row in rows]
    if not rows:
        return
    widths = [max(_width(heading), *(_width(row[place]) for row in rows)) for place, heading in enumerate(headings)]
    places = list(range(1, len(headings)))
    while places:
        here = [0]
        while (places and sum(widths[place] + 2 for place in (*here, places[0])) <= console.width) or len(here) == 1:
            here.append(places.pop(0))
        drawn = Drawn(*(headings[place] for place in here), box=None, header_style="bold")
        for column, place in zip(drawn.columns, here, strict=True):
            column.justify = "left" if place in words else "right"
        for row in rows:
            drawn.add_row(*(row[place] for place in here))
        console.print()
        console.print(drawn)


def _width(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def show_profile(profile: Profile, diagnosis: Diagnosis, skipped: pd.DataFrame | None, used: DepthUse | None) -> None:
    """What `probe --full` adds: every finding, every measure, the blocks, the loss without each block."""
    from depthscope.measures import MEASURES
    from depthscope.stations import FINAL

    said = diagnosis.findings[:3]
    show_findings(finding for finding in diagnosis.findings if finding not in said)
    pairs = profile.frame[["station", "measure"]].drop_duplicates().itertuples(index=False, name=None)
    here = set(profile.names())
    rows, blocks = [], []
    for station, measure in pairs:
        is_name = measure in MEASURES and MEASURES[measure].is_name  # a number that has no mean
        shown = not is_name and (station == "output" or measure not in here)
        for part in profile.parts if shown and measure != "token_diversity" else ():
            curve = profile.curve(measure, station, part)
            defined = [value for value in curve if not math.isnan(value)]
            low, high = (0.0, 1.0) if _is_share(measure) else (min(defined, default=0.0), max(defined, default=0.0))
            name = " ".join(word for word in (measure, "" if station == "output" else f"({station})", part) if word)
            ends = (defined[0], defined[-1]) if defined else (math.nan, math.nan)
            bars = sparkline(curve, low, high if high - low > 1e-5 * max(abs(low), abs(high)) else low, 28)
            rows.append([name, bars, *(format_value(measure, value) for value in ends)])
    show_table(["measure", "before block 1 to the last", "first", "last"], rows, words=(0, 1))
    columns = [(name, "output", name.replace("_", "\n", 1)) for name in _BY_BLOCK if name in here]
    if profile.metadata.get("placement") not in (None, "post"):  # what norms make for the branches to read
        read = (("attention_input", "attention\nreads"), ("ffn_input", "FFN\nreads"))
        columns += [("token_similarity", at, head) for at, head in read if "token_similarity" in profile.names(at)]
    for part, (first, last) in profile.parts.items():
        curves = [(name, profile.curve(name, station, part)) for name, station, _ in columns]
        for place in range(last - first + 2):
            cells = [format_value(name, curve[place]) for name, curve in curves]
            blocks.append([f"{part} {first - 1 + place if place else 'in'}" if part else str(place), *cells])
        after = [
            profile.curve(name, FINAL, part)[-1] if at == "output" and name in profile.names(FINAL) else math.nan
            for name, at, _ in columns
        ]
        if not all(map(math.isnan, after)):
            cells = [format_value(name, value) for (name, *_), value in zip(columns, after, strict=True)]
            blocks.append([f"{part} final".strip(), *cells])
    show_table(["block", *(heading for *_, heading in columns)], blocks)
    if used is not None:
        from depthscope.cli.depth_display import show_use

        show_use(used)
    if skipped is not None:
        show_skipped(skipped)


_BY_BLOCK = ("token_similarity", "direction_similarity", "cosine_similarity", "effective_rank",
             "queries_keys_gradient", "values_output_gradient")  # fmt: skip


def show_skipped(skipped: pd.DataFrame) -> None:
    """Every block, or run of blocks, with the loss without it."""
    rows = []
    for _, row in skipped.iterrows():
        first, last = round(row["first_block"]), round(row["last_block"])
        name = "nothing" if not first else f"block {first}" if first == last else f"blocks {first} to {last}"
        rows.append([name, f"{row['loss']:.4f}", f"{row['change']:+.4f}" if first else ""])
    show_table(["without", "loss", "change"], rows)


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
