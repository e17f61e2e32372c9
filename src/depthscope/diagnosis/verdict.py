"""What a diagnosis is made of: values that print themselves, turn into JSON and come back from it."""

from __future__ import annotations

import ast
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from depthscope.naming import visible
from depthscope.remedies import Recommendation
from depthscope.remedies.record import from_dict
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


@dataclass(frozen=True)
class Diagnosis:
    """A verdict in a word and a sentence, what else was found (the most important first), and what to do."""

    verdict: Verdict
    headline: str
    findings: tuple[Finding, ...]
    recommendation: Recommendation
    numbers: Mapping[str, float]  # those that the headline rests on
    model: str = ""

    def finding(self, rule: str) -> Finding | None:
        """What a rule found; None if it had nothing to say."""
        return next((finding for finding in self.findings if finding.rule == rule), None)

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

    @classmethod
    def from_dict(cls, saved: Any) -> Diagnosis:
        """What `to_dict` wrote, as far as a reader is shown of it; a ValueError if it is something else."""
        try:
            advice = saved["recommendation"]
            line: Any = ast.parse(advice["line"] or "apply()", mode="eval").body  # its keywords are in no other field
            options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in line.keywords}
            remedies = tuple(map(from_dict, advice["remedies"]))
            return cls(
                saved["verdict"],
                str(saved["headline"]),
                tuple(Finding(str(f["rule"]), str(f["sentence"]), dict(f["numbers"])) for f in saved["findings"]),
                Recommendation(str(advice["reason"]), remedies, apply_options=options),
                dict(saved["numbers"]),
                str(saved.get("model", "")),
            )
        except (TypeError, KeyError, AttributeError, ValueError, SyntaxError) as error:
            raise ValueError(f"expected a verdict, got something else ({type(error).__name__}: {error})") from None

    def render(self, width: int = 88, *, full: bool = False) -> str:
        """Plain text, wrapped: the verdict, at most three findings (`full`: all of them) and what to do."""
        shown = self.findings if full else self.findings[:3]
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
