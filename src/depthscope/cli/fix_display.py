"""Before and after, in the terminal and as a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from depthscope.cli.display import block_rows, format_value, heading, heading_width
from depthscope.cli.sparkline import sparkline

if TYPE_CHECKING:
    from depthscope.cli.console import Screen
    from depthscope.diagnosis import Fixed

_ROWS = 8
MEASURES = ("token_similarity", "direction_similarity", "effective_rank")
NEEDS_TRAINING = (
    "The weights look trained. De-escalation is for training, not for patching trained weights: put it in and train, "
    "from the start or at least on"
)


def show(fixed: Fixed) -> None:
    """The remedy with its reason, both curves, a table, the loss, and the line of Python."""
    from depthscope.cli.console import Screen
    from depthscope.cli.display import headline
    from depthscope.cli.verdict import show_diagnosis

    console = Screen(soft_wrap=True)
    console.print()
    for line in headline(fixed.before.metadata).splitlines():
        console.say(line)
    console.print()
    console.say(_sentence(fixed.recommendation.reason))
    if not fixed.remedies:
        console.say("--tau puts de-escalation in all the same.")
        show_diagnosis(console, fixed.verdicts[0], title="Verdict", brief=True)
        return
    _show_curves(console, fixed)
    _show_blocks(console, fixed)
    for when, verdict in zip(("Before", "After"), fixed.verdicts, strict=True):
        show_diagnosis(console, verdict, title=when, brief=True)
    for line in warnings(fixed):
        console.say(line)
    console.print("\n[bold]To put it in[/bold]\n", markup=True)
    console.print(_indented(str(fixed.python)) + "\n", markup=False)
    for note in fixed.notes:
        console.say(f"Note: {note}")


def warnings(fixed: Fixed) -> list[str]:
    """What a reader must not miss."""
    lines = []
    if fixed.trained:
        lines.append(NEEDS_TRAINING + ".")
    if fixed.losses is not None:
        before, after = fixed.losses
        lines.append(f"Loss on this text: {before:.4f} before, {after:.4f} after ({after - before:+.4f}).")
    spared = getattr(fixed.remedies[0], "leave_alone", ())
    if spared:
        named = ", ".join(map(str, spared))
        lines.append(f"Left alone: token {named}, an outlier in most samples (an attention sink).")
    return lines


def draw(fixed: Fixed) -> Any:
    """A matplotlib figure: a panel per measure, before and after."""
    from depthscope.drawing import AFTER, BEFORE, Curve, draw_by_block

    shown = (("before", fixed.before, BEFORE), ("after", fixed.after, AFTER))
    curves = {
        name: [
            Curve(range(first - 1, last + 1), profile.curve(name, part=part), colour, when if first == 1 else None)
            for when, profile, colour in shown
            for part, (first, last) in profile.parts.items()
        ]
        for name in _names(fixed)
    }
    put_in = str(fixed.recommendation.line).partition("(model, ")[2].removesuffix(")")
    return draw_by_block(
        curves, title=f"{fixed.before.metadata.get('model', '')}, {fixed.before.depth} blocks: {put_in}"
    )


def _show_curves(console: Screen, fixed: Fixed) -> None:
    from rich.table import Table

    width = min(max(console.width - 56, 8), 50)  # what names and values leave
    table = Table("measure", "", "block 0 to last", "first", "last", box=None, header_style="bold")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
    for name, part in ((name, part) for name in _names(fixed) for part in fixed.before.parts):
        curves = [profile.curve(name, part=part) for profile in (fixed.before, fixed.after)]
        low, high = (0.0, 1.0) if "similarity" in name else _range([value for curve in curves for value in curve])
        for when, curve in zip(("before", "after"), curves, strict=True):
            defined = [value for value in curve if not math.isnan(value)] or [math.nan]
            ends = (format_value(name, value) for value in (defined[0], defined[-1]))
            shown = f"{name} {part}".rstrip() if when == "before" else ""
            table.add_row(shown, when, sparkline(curve, low, high, width), *ends)
    console.print()
    console.print(table)


def _show_blocks(console: Screen, fixed: Fixed) -> None:
    from rich.table import Table

    from depthscope.cli.console import columns_that_fit

    columns = [(name, profile) for name in _names(fixed) for profile in (fixed.before, fixed.after)]
    fit = columns_that_fit([heading_width(heading(name)) for name, _ in columns], console.width - len(" block "))
    columns = columns[: fit - fit % 2]
    titles = [f"{heading(name)}\n{'before' if i % 2 == 0 else 'after'}" for i, (name, _) in enumerate(columns)]
    table = Table("block", *titles, box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for part, (first, last) in fixed.before.parts.items():
        curves = [(name, profile.curve(name, part=part)) for name, profile in columns]
        for place, row in block_rows(part, first, last, _ROWS):
            table.add_row(row, *(format_value(name, curve[place]) for name, curve in curves))
    console.print()
    console.print(table)
    console.print()


def _names(fixed: Fixed) -> list[str]:
    return [name for name in MEASURES if name in fixed.before.names()]


def _range(values: list[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    return min(finite, default=0.0), max(finite, default=0.0)


def _sentence(text: str) -> str:
    first = text[0].upper() if text[0].isascii() else text[0]  # τ stays small
    return f"{first}{text[1:].rstrip('.')}."


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
