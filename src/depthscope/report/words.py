"""The words of a page: the summaries of what was measured of a subject, each sentence with its chart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from depthscope.diagnosis.summary import Summary, Table, of_paths, of_profile, of_spectra, of_use
from depthscope.report.subjects import Subject
from depthscope.usage import Finding

_MOOD = {"collapsed": "bad", "broken": "bad", "collapsing": "warn", "rank collapse": "warn", "cannot tell": "unsure"}


@dataclass(frozen=True)
class Sentence:
    """A sentence, and the name of the chart that shows what it says; "" if none does."""

    text: str
    chart: str = ""


@dataclass(frozen=True)
class Said:
    """What the page says of one subject: its first summary, and of the others headline and findings."""

    label: str
    model: str = ""
    verdict: str = ""
    mood: str = "good"
    headline: Sentence = Sentence("")
    findings: list[Sentence] = field(default_factory=list)
    advice: str = ""
    code: str = ""
    tables: dict[str, Any] = field(default_factory=dict)  # `training`: where it ended; `others`: a list
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)


def said_of(subject: Subject, chart_of: Mapping[str, str]) -> Said:
    """`chart_of` has, by rule of a finding, verdict or kind of a summary, the chart that shows what it speaks of."""
    summaries = summaries_of(subject)
    if not summaries:
        return Said(subject.label, tables={"training": None, "others": []}, commands=dict(subject.commands))
    first, *others = summaries
    listed = [Sentence(f.sentence, _chart(first, f.rule, chart_of)) for f in (*first.findings, *first.others)]
    for other in others:
        listed.append(Sentence(other.headline, chart_of.get(other.kind, "")))
        listed += [Sentence(f.sentence, _chart(other, f.rule, chart_of)) for f in (*other.findings, *other.others)]
    about: Mapping[str, Any] = next((item.metadata for item in subject.of_model if item is not None), {})
    return Said(
        subject.label,
        first.model,
        first.verdict,
        _MOOD.get(first.verdict, "good"),
        Sentence(first.headline, chart_of.get(first.verdict, chart_of.get(first.kind, ""))),
        list({item.text: item for item in listed if item.text}.values()),
        first.advice,
        first.code,
        {
            "training": next((item.table for item in summaries if item.kind == "training"), None),
            "others": [item.table for item in summaries if item.table is not None and item.kind != "training"],
        },
        _plain(about),
        list(dict.fromkeys([*subject.notes, *(note for item in summaries for note in map(str, item.notes))])),
        dict(subject.commands),
    )


def summaries_of(subject: Subject) -> list[Summary]:
    """Of everything that was measured of it, the verdict first."""
    found = []
    if subject.profile is not None and subject.diagnosis is not None:
        found.append(of_profile(subject.profile, subject.diagnosis))
    found += [] if subject.use is None else [of_use(subject.use)]
    found += [] if subject.shares is None else [of_paths(subject.shares)]
    found += [] if subject.spectra is None else [of_spectra(subject.spectra)]
    if subject.compared is not None:
        first, *rest = [*map(str, subject.compared.get("verdict") or ()), ""]
        found.append(Summary("comparison", "", first, findings=tuple(Finding("compared", text, {}) for text in rest)))
    if subject.training is not None and len(subject.training):
        found.append(Summary("training", "", "", table=_ended(subject.training)))
    return found


def _chart(summary: Summary, rule: str, chart_of: Mapping[str, str]) -> str:
    return chart_of.get(rule, chart_of.get(summary.kind, ""))


def _plain(about: Mapping[str, Any]) -> dict[str, str]:
    """What a result says of its model, where that is one number or text, or a few."""
    found = {}
    for name, value in about.items():
        if isinstance(value, Mapping) and len(value) < 8:
            value = ", ".join(f"{key} {item}" for key, item in value.items() if isinstance(item, str | int | float))
        if isinstance(value, str | int | float) and value != "" and name != "format":
            found[name.replace("_", " ")] = f"{value:,}" if type(value) is int else str(value)
    return found


def _ended(training: pd.DataFrame) -> Table:
    """A row per series: the last value of every quantity, mean and standard deviation over the seeds."""
    last = training.sort_values("step").groupby(["series", "seed", "quantity"], sort=False)["value"].last()
    table = last.groupby(["series", "quantity"], sort=False).agg(["mean", "std"])
    quantities = list(dict.fromkeys(training["quantity"]))
    rows = []
    for series, own in training.groupby("series", sort=False):
        row = [str(series), str(own["seed"].nunique())]
        for quantity in quantities:
            there: Any = table.loc[(series, quantity)] if (series, quantity) in table.index else (float("nan"),) * 2
            mean, std = map(float, there)
            row.append("–" if pd.isna(mean) else f"{mean:.4g}" + ("" if pd.isna(std) else f" ± {std:.2g}"))
        rows.append(tuple(row))
    return Table(("run", "seeds", *(str(name).replace("_", " ") for name in quantities)), tuple(rows))
