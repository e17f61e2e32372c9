"""The words of a page: the verdict with each sentence's chart, what was measured, where a training ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from depthscope.diagnosis.summary import of_paths
from depthscope.diagnosis.value_weights import headline_of, sentences
from depthscope.diagnosis.verdict import COLLAPSES, OF_A_COLLAPSE, OF_OTHERS
from depthscope.report.subjects import Subject
from depthscope.stations import IN_WORDS
from depthscope.usage import Finding

_MOOD = {
    "collapsed": "bad",
    "broken": "bad",
    "collapsing": "warn",
    "rank collapse": "warn",
    "cannot tell": "unsure",
}


@dataclass(frozen=True)
class Sentence:
    """A sentence, and the name of the chart that shows what it says; "" if none does."""

    text: str
    chart: str = ""


@dataclass(frozen=True)
class Said:
    """What the page says of one subject."""

    label: str
    verdict: str = ""
    mood: str = "good"
    headline: Sentence = Sentence("")
    findings: list[Sentence] = field(default_factory=list)
    advice: str = ""
    code: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)
    ended: list[dict[str, str]] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)


def said_of(subject: Subject, chart_of: Mapping[str, str]) -> Said:
    """`chart_of` has, by rule of the diagnosis, the chart that shows what it speaks of."""
    judged = _mapping(subject.diagnosis)
    verdict = str(judged.get("verdict", ""))
    of_use = [] if subject.use is None else list(subject.use.findings)
    rules_of_use = {item.rule for item in of_use}
    listed = [_mapping(item) for item in _list(judged.get("findings"))]
    if joined := rules_of_use & {str(item.get("rule")) for item in listed}:  # a verdict with the use of depth
        of_use = [item for item in of_use if item.rule in joined]
    order = {rule: place for place, rule in enumerate(OF_A_COLLAPSE if verdict in COLLAPSES else OF_OTHERS)}
    listed.sort(key=lambda item: order.get(str(item.get("rule")), len(order)))  # as the terminal shows them
    findings = [
        Sentence(str(item.get("sentence", "")), chart_of.get(str(item.get("rule")), ""))
        for item in listed
        if item.get("rule") not in rules_of_use
    ]
    if subject.use is not None:
        findings += [Sentence(item.sentence, chart_of.get("depth", "")) for item in of_use]
    if (shares := subject.shares) is not None:
        paths = of_paths(shares)
        findings += [Sentence(text, chart_of.get("paths", "")) for text in (paths.headline, *_said(paths.findings))]
    if (found := subject.spectra) is not None:
        spectra = (headline_of(found), *_said(sentences(found)))
        findings += [Sentence(text, chart_of.get("eigenvalues", "")) for text in spectra]
    if subject.compared is not None:
        compared = map(str, _list(subject.compared.get("verdict")))
        findings += [Sentence(text, chart_of.get("compared", "")) for text in compared]
    headline = Sentence(str(judged.get("headline", "")), chart_of.get(verdict, chart_of.get("verdict", "")))
    if not judged:
        headline = findings.pop(0) if findings else Sentence("")
    advice = _mapping(judged.get("recommendation"))
    remedy = subject.remedy or {}
    return Said(
        subject.label,
        verdict,
        _MOOD.get(verdict, "good"),
        headline,
        findings + [Sentence(text) for text in _of_losses(remedy)],
        str(remedy.get("reason") or advice.get("reason") or ""),
        str(remedy.get("python") or advice.get("line") or ""),
        _facts(subject),
        _notes(subject, remedy),
        dict(subject.commands),
        _ended(subject.training),
        [f"{row['blocks']} of {row['of']} {question}: {row['rests_on']}" for question, row in _counted(subject)],
    )


def _said(findings: Iterable[Finding]) -> list[str]:
    return [finding.sentence for finding in findings]


def _counted(subject: Subject) -> Iterable[tuple[Any, Any]]:
    return () if subject.use is None else subject.use.summary().iterrows()


def _mapping(value: Any) -> Mapping[str, Any]:
    """What a file brings need not be what we write there."""
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _of_losses(remedy: Mapping[str, Any]) -> list[str]:
    loss = remedy.get("loss")
    if not isinstance(loss, Mapping) or not all(
        isinstance(loss.get(when), float | int) for when in ("before", "after")
    ):
        return []
    trained = (
        " Remedies are for training: trained weights have not learnt to work with one." if remedy.get("trained") else ""
    )
    return [f"The loss is {loss['before']:.4g} before and {loss['after']:.4g} after.{trained}"]


def _facts(subject: Subject) -> dict[str, str]:
    """What was measured, of what, in which state."""
    found = next((item for item in subject.of_model if item is not None), None)
    if found is None:
        return {}
    about = found.metadata
    parts, versions, weights, text = (_mapping(about.get(name)) for name in ("parts", "versions", "weights", "text"))
    known = {
        "model": about.get("model"),
        "class": about.get("class"),
        "blocks": subject.depth,
        "parts": ", ".join(f"{name} {count}" for name, count in parts.items()),
        "width": about.get("width"),
        "parameters": f"{about['parameters']:,}" if isinstance(about.get("parameters"), int) else None,
        "norms": {str(name): said for name, said in IN_WORDS.items()}.get(str(about.get("placement"))),
        "causal": {"True": "yes", "False": "no"}.get(str(about.get("causal"))),
        "weights look": weights.get("look"),
        "sequences × tokens": f"{about.get('samples')} × {about['tokens']}" if about.get("tokens") else None,
        "text": text.get("source"),
        "left out": ", ".join(map(str, _list(about.get("without")))),
        "numbers": f"{about['dtype']} on {about.get('device')}" if about.get("dtype") else None,
        "seed": about.get("seed"),
        "made with": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return {name: str(value) for name, value in known.items() if value not in (None, "")}


def _notes(subject: Subject, remedy: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for item in subject.of_model:
        found += _list(item.metadata.get("notes")) if item is not None else []
    found += _list(remedy.get("notes"))
    return list(dict.fromkeys(map(str, found)))


def _ended(training: pd.DataFrame | None) -> list[dict[str, str]]:
    """A row per series: the last value of every quantity, mean and standard deviation over the seeds."""
    if training is None or training.empty:
        return []
    last = training.sort_values("step").groupby(["series", "seed", "quantity"], sort=False)["value"].last()
    table = last.groupby(["series", "quantity"], sort=False).agg(["mean", "std"])
    rows = []
    for series in dict.fromkeys(training["series"]):
        row = {"run": str(series), "seeds": str(training.loc[training["series"] == series, "seed"].nunique())}
        for quantity in dict.fromkeys(training["quantity"]):
            mean, std = table.loc[(series, quantity)] if (series, quantity) in table.index else (float("nan"),) * 2
            shown = "–" if pd.isna(mean) else f"{mean:.4g}" + ("" if pd.isna(std) else f" ± {std:.2g}")
            row[str(quantity).replace("_", " ")] = shown
        rows.append(row)
    return rows
