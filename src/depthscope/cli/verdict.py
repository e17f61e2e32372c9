"""A diagnosis in the terminal: the verdict, a line per finding, and what to do."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthscope.cli.console import Screen
    from depthscope.diagnosis import Diagnosis

_STYLES = {
    "collapsed": "bold red",
    "broken": "bold red",
    "collapsing": "bold yellow",
    "rank collapse": "bold yellow",
    "cannot tell": "bold",
}
_INDENT = "  "


def show_diagnosis(console: Screen, diagnosis: Diagnosis, title: str = "Verdict", *, brief: bool = False) -> None:
    """Prints it, wrapped to the terminal; `brief` is the verdict alone. Shown twice, the titles tell the two apart."""
    style = _STYLES.get(diagnosis.verdict, "bold green")
    console.say(f"{title}: {diagnosis.verdict}. {diagnosis.headline}", styles={f"{title}: {diagnosis.verdict}.": style})
    if brief:
        return
    for finding in diagnosis.findings:
        console.say(finding.sentence, "- ")
    advice = diagnosis.recommendation
    console.say(f"What to do: {advice.reason}", styles={"What to do:": "bold"})
    if advice.remedies:
        from depthscope.remedies.record import call

        code = call(advice.remedies, advice.apply_options, console.reading_width - len(_INDENT))
        console.print(textwrap.indent(code, _INDENT), markup=False, style="bold")
