"""A diagnosis in the terminal: the verdict, a line per finding, and what to do."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from depthscope.diagnosis import Diagnosis

_STYLES = {
    "collapsed": "bold red",
    "broken": "bold red",
    "collapsing": "bold yellow",
    "rank collapse": "bold yellow",
    "cannot tell": "bold",
}
_INDENT = "  "
_WIDEST = 100  # longer lines are hard to read


def show_diagnosis(console: Console, diagnosis: Diagnosis, title: str = "Verdict", *, brief: bool = False) -> None:
    """Prints it, wrapped to the terminal; `brief` is the verdict alone. Shown twice, the titles tell the two apart."""
    from rich.text import Text

    width = min(console.width, _WIDEST)

    def paragraph(text: str, styles: dict[str, str], indent: str = "") -> None:
        lines = textwrap.fill(text, width, subsequent_indent=" " * len(indent), initial_indent=indent)
        shown = Text(lines)
        for words, style in styles.items():
            shown.highlight_words([words], style)
        console.print(shown)

    style = _STYLES.get(diagnosis.verdict, "bold green")
    paragraph(f"{title}: {diagnosis.verdict}. {diagnosis.headline}", {f"{title}: {diagnosis.verdict}.": style})
    if brief:
        return
    for finding in diagnosis.findings:
        paragraph(finding.sentence, {}, "- ")
    advice = diagnosis.recommendation
    paragraph(f"What to do: {advice.reason}", {"What to do:": "bold"})
    if advice.remedies:
        from depthscope.remedies.expression import call

        code = call(advice.remedies, advice.apply_options, width - len(_INDENT))
        console.print(textwrap.indent(code, _INDENT), markup=False, style="bold")
