"""The use of depth for people: a table by block, the blocks that matter in numbers, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthscope.cli.console import Screen, columns_that_fit

if TYPE_CHECKING:
    from depthscope.usage import DepthUse

_ROWS = 40  # of the table: of a deeper model some blocks are left out, evenly


def show(found: DepthUse) -> None:
    """Prints what was found."""
    from depthscope.stations import IN_WORDS

    console, about = Screen(soft_wrap=True), found.metadata
    loss = about.get("loss")
    words = [
        str(about["model"]),
        *([about["part"]] if about.get("part") else []),
        f"{found.depth} blocks of width {about['width']}",
        *([IN_WORDS[about["placement"]]] if about.get("placement") else []),
        *(["causal"] if about.get("causal") else []),
        f"{about['samples']} × {about['tokens']} tokens",
        f"{about['dtype']} on {about['device']}",
        *([f"loss {loss:.3f}"] if loss is not None else []),
    ]
    console.print()
    console.say(" · ".join(words))
    console.print()
    show_tables(console, found)
    for finding in found.findings:
        console.say(finding.sentence, "- ")
    for note in about.get("notes", []):
        console.say(f"Note: {note}")


def show_tables(console: Screen, found: DepthUse) -> None:
    """All numbers by block, and how many blocks matter."""
    _show_blocks(console, found)
    _show_counts(console, found)


def _show_blocks(console: Screen, found: DepthUse) -> None:
    """All columns that have numbers, in as many tables as the terminal's width asks for."""
    from rich.table import Table

    from depthscope.drawing.complex_plane import evenly
    from depthscope.usage.result import SHOWN, format_number

    names = [name for name in SHOWN if name in found.frame and found.frame[name].notna().any()]
    blocks = set(evenly(found.frame["block"].tolist(), _ROWS))
    while names:
        widths = [max(8, *map(len, SHOWN[name][0].splitlines())) for name in names]
        fit = max(1, columns_that_fit(widths, console.width - len(" block ")))
        here, names = names[:fit], names[fit:]
        table = Table("block", *(SHOWN[name][0] for name in here), box=None, header_style="bold")
        for column in table.columns:
            column.justify = "right"
        for row in found.frame.to_dict("records"):
            if row["block"] in blocks:
                table.add_row(str(row["block"]), *(format_number(name, row[name]) for name in here))
        console.print(table)
        console.print()


def _show_counts(console: Screen, found: DepthUse) -> None:
    console.say("Blocks that matter, by what was looked at:")
    for question, row in found.summary().iterrows():
        console.say(f"{row['blocks']} of {row['of']} {question}: {row['rests_on']}", "  ")
    console.print()
