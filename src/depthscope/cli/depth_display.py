"""With `--full`: the use of depth by block, the numbers of blocks that matter, and every finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthscope.cli.console import Screen
from depthscope.cli.display import show_table

if TYPE_CHECKING:
    from depthscope.usage import DepthUse


def show_use(found: DepthUse) -> None:
    """All numbers by block, and how many blocks matter."""
    from depthscope.usage.result import SHOWN, format_number

    names = [name for name in SHOWN if name in found.frame and found.frame[name].notna().any()]
    rows = [
        [str(row["block"]), *(format_number(name, row[name]) for name in names)]
        for row in found.frame.to_dict("records")
    ]
    show_table(["block", *(SHOWN[name][0] for name in names)], rows)
    console = Screen(soft_wrap=True)
    console.print()
    console.say("Blocks that matter, by what was looked at:")
    for question, row in found.summary().iterrows():
        console.say(f"{row['blocks']} of {row['of']} {question}: {row['rests_on']}", "  ")
