"""What a diagnosis is made of: values that print themselves and turn into JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from depthscope.naming import visible
from depthscope.remedies import Recommendation
from depthscope.usage import Finding

Verdict = Literal[
    "broken",  # numbers that are not finite
    "cannot tell",  # the data do not suffice
    "collapsed",  # tokens are equal to 1 %
    "collapsing",  # on the way there
    "rank collapse",  # few directions are left, but the mean is not what the tokens share
    "anisotropic",  # trained: one direction shared by everything, no loss of context
    "converges by training",  # trained: tokens come together in the last blocks, as in a sentence encoder
    "no collapse",
]


COLLAPSES: tuple[Verdict, ...] = ("collapsing", "collapsed")  # what a remedy is for

# What is shown first, by name of its rule. What somebody asked for by an option comes before what every probe says.
_ASKED = ("half", "could go", "settled", "spare blocks", "attention learns")
OF_A_COLLAPSE = (*_ASKED, "crossing", "steps", "rise", "sink", "trend arrives", "alike", "rank")
OF_OTHERS = (*_ASKED, "sink", "normal", "loss of context", "alike", "rank", "trend arrives", "rise", "steps", "trained")


@dataclass(frozen=True)
class Diagnosis:
    """A verdict in a word and a sentence, what else was found, and what to do."""

    verdict: Verdict
    headline: str
    findings: tuple[Finding, ...]
    recommendation: Recommendation
    numbers: Mapping[str, float]  # those that the headline rests on
    model: str = ""

    def finding(self, rule: str) -> Finding | None:
        """What a rule found; None if it had nothing to say."""
        return next((finding for finding in self.findings if finding.rule == rule), None)

    def leading(self, most: int = 3) -> tuple[Finding, ...]:
        """The findings that are shown first: what bears on a collapse, or, without one, what is usual."""
        order = OF_A_COLLAPSE if self.verdict in COLLAPSES else OF_OTHERS
        chosen = [finding for rule in order for finding in self.findings if finding.rule == rule]
        return tuple(chosen[:most])

    def to_dict(self) -> dict[str, Any]:
        """For JSON: numbers that are not finite are None."""
        return _finite(
            {
                "verdict": self.verdict,
                "headline": self.headline,
                "findings": [asdict(finding) for finding in self.findings],
                "recommendation": self.recommendation.to_dict(),
                "numbers": dict(self.numbers),
                "model": self.model,
            }
        )

    def render(self, width: int = 88, *, full: bool = False) -> str:
        """Plain text, wrapped: the verdict, at most three findings (`full`: all of them) and what to do."""
        shown = self.findings if full else self.leading()
        lines = textwrap.wrap(f"{self.verdict.capitalize()}. {self.headline}", width)
        for finding in shown:
            lines += textwrap.wrap(finding.sentence, width, initial_indent="- ", subsequent_indent="  ")
        if left := len(self.findings) - len(shown):
            lines.append(f"- {left} more: print(diagnosis.render(full=True))")
        if self.recommendation.reason:
            lines += textwrap.wrap(f"What to do: {self.recommendation.reason}", width)
        if self.recommendation.code is not None:
            lines.append(textwrap.indent(self.recommendation.code, "    "))
        return visible("\n".join(lines))

    def __str__(self) -> str:
        return self.render()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
