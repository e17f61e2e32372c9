"""The one description of what is shown: made here from a result, drawn by the terminal, the page and the figures.

A summary is short on purpose: the model in one line, a verdict, at most three findings, one set of curves or one table
of at most eight rows, what to do, and notes. Everything else stands in the result itself (`--full`, the page).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from depthscope.attention_paths import CONSTANT, PathShares
from depthscope.diagnosis.choices import Choice
from depthscope.diagnosis.fixing import Fixed
from depthscope.diagnosis.value_weights import headline_of, sentences
from depthscope.diagnosis.verdict import Diagnosis
from depthscope.drawing.complex_plane import evenly
from depthscope.naming import counted
from depthscope.probing import Profile
from depthscope.stations import IN_WORDS
from depthscope.usage import DepthUse, Finding
from depthscope.value_spectra import Spectra

FINDINGS = 3  # at most
_LONGEST = 40  # letters of a model's name
ROWS = 8  # of a table, at most
CHOICES = 5  # of `fix`, besides the model as it is
MOST = 0.95  # of the output: what is left is a twentieth


@dataclass(frozen=True)
class Curve:
    """A quantity over the blocks, drawn from `low` to `high`; the first value is before block 1."""

    label: str
    values: tuple[float, ...]
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Table:
    """Cells as text, ready to be shown; numbers stand right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Summary:
    """What is shown of a result by default."""

    model: str  # in one line
    headline: str
    verdict: str = ""  # in a word or two; "" where a result has none
    findings: tuple[Finding, ...] = ()  # at most three, the most important first
    curves: tuple[Curve, ...] = ()
    table: Table | None = None
    advice: str = ""  # what to do; "" where nothing follows
    code: str = ""  # the lines of Python for it
    notes: tuple[str, ...] = ()  # what the reader must know of how it was measured
    left: int = 0  # findings that are not shown


def of_profile(
    profile: Profile, diagnosis: Diagnosis, use: DepthUse | None = None, skipped: pd.DataFrame | None = None
) -> Summary:
    """What `probe` shows: the verdict, and how alike tokens are after each block; what skipping costs, if asked for."""
    leading = diagnosis.leading(FINDINGS)
    costs = () if use is None else of_use(use).curves
    if skipped is not None:
        changes = tuple(map(float, skipped["change"].iloc[1:]))
        costs = (Curve("loss without it", changes, min(0.0, *changes), max(changes)),)
    notes = [*profile.metadata.get("notes", ()), *(() if use is None else use.metadata.get("notes", ()))]
    return Summary(
        model_line(profile.metadata),
        diagnosis.headline,
        diagnosis.verdict,
        leading,
        (*_curves([("", profile)]), *costs),
        advice=_sentence(diagnosis.recommendation.reason),
        code=diagnosis.recommendation.code or "",
        notes=tuple(notes),
        left=len(diagnosis.findings) - len(leading),
    )


def of_fix(fixed: Fixed, notes: Sequence[str] = ()) -> Summary:
    """What `fix` shows: the choices in their order, and the line for the first."""
    before, after = fixed.verdicts
    headline = before.headline
    if fixed.remedies:
        headline += f" With the remedy: {after.verdict}."
    return Summary(
        model_line(fixed.before.metadata),
        headline,
        before.verdict,
        curves=()
        if fixed.choices
        else _curves([("before", fixed.before), ("after", fixed.after)] if fixed.remedies else [("", fixed.before)]),
        table=choices_table(_shown(fixed.choices)) if fixed.choices else None,
        advice=_sentence(fixed.recommendation.reason),
        code=fixed.recommendation.code or "",
        notes=(*notes, *fixed.notes),
    )


def of_use(use: DepthUse) -> Summary:
    """What `depth` shows: the blocks that matter most, and those that matter least."""
    loss, priced = use.metadata.get("loss"), use.frame["skip_loss"].notna().any() and use.learnt
    column = "skip_loss" if priced else "skip_output"
    model = model_line(use.metadata) + (f" · loss {loss:.3f}" if loss is not None else "")
    headline = use.headline
    findings = [item for item in use.findings if item.sentence != headline][:FINDINGS]
    curves: tuple[Curve, ...] = ()
    if use.frame[column].notna().any():
        costs = tuple(float(cost) for cost in use.frame[column])
        what = "loss without it" if priced else "output moves without it"
        curves = (Curve(what, costs, min(0.0, *costs), max(costs)),)
    return Summary(
        model,
        headline,
        findings=tuple(findings),
        curves=curves,
        notes=tuple(use.metadata.get("notes", ())),
        left=len(use.findings) - len(findings) - 1,
    )


def of_paths(shares: PathShares) -> Summary:
    """What `paths` shows: how much of the output has passed how many attention layers."""
    table = shares.summary()
    along = table["projection_share"]
    lengths = along[along.index >= 0]
    sums = lengths.cumsum().to_numpy()
    reached = int((sums >= MOST).argmax()) if (sums >= MOST).any() else len(sums) - 1
    shown = [length for length in lengths.index if length < ROWS - 2]
    rest, constant = lengths[lengths.index >= ROWS - 2], along.get(CONSTANT, math.nan)
    rows = [(str(length), f"{lengths[length]:.1%}", f"{table['cosine'][length]:+.2f}") for length in shown]
    if len(rest):
        rows.append((f"{ROWS - 2} or more", f"{rest.sum():.1%}", ""))
    if abs(constant) >= 5e-4:  # shown as a share in tenths of a percent
        rows.append(("biases", f"{constant:.1%}", f"{table['cosine'][CONSTANT]:+.2f}"))
    findings = [Finding("longest", _largest(lengths), {"length": float(str(lengths.idxmax()))})]
    return Summary(
        model_line(shares.metadata),
        f"Paths through at most {reached} of {shares.depth} attention layers make {sums[reached]:.0%} of the output.",
        findings=tuple(findings),
        table=Table(("layers passed", "share of output", "cosine with output"), tuple(rows)),
        notes=tuple(shares.metadata.get("notes", ())),
    )


def of_spectra(found: Spectra) -> Summary:
    """What `spectra` shows: whether the value weights push tokens apart or together, block by block."""
    blocks = found.by_block
    rows = [
        (str(block), f"{blocks['negative_share'][block]:.0%}", f"{blocks['spectral_radius'][block]:.3g}")
        for block in evenly(list(blocks.index), ROWS)
    ]
    about = found.metadata
    return Summary(
        f"{about['model']} · {found.depth} blocks · eigenvalues of {about['product']}",
        headline_of(found),
        findings=tuple(sentences(found)[:FINDINGS]),
        table=Table(("block", "negative eigenvalues", "largest eigenvalue"), tuple(rows)),
        notes=tuple(about["notes"]),
    )


def model_line(about: Mapping[str, Any]) -> str:
    """A model and its inputs in one line."""
    towers: Mapping[str, Any] = about.get("towers") or {}
    weights = (about.get("weights") or {}).get("look")
    blocks = counted(about.get("blocks", 0), "block")
    if about.get("width") and not towers:
        blocks += f" of width {about['width']}"
    words = [
        _short(str(about.get("model"))),
        str(about.get("part") or ""),
        blocks,
        "" if towers else IN_WORDS.get(about.get("placement"), ""),  # type: ignore[arg-type]
        *(f"{name} {part['first_block']}–{part['last_block']}" for name, part in towers.items()),
        "causal" if about.get("causal") else "",
        {"initialised": "random weights", "trained": "trained"}.get(str(weights), ""),
        f"{about.get('samples')} × {counted(about.get('tokens', 0), 'token')}",
        f"without {', '.join(about['without'])}" if about.get("without") else "",
    ]
    if about.get("dtype") not in (None, "float32") or about.get("device") not in (None, "cpu"):
        words.append(f"{about.get('dtype')} on {about.get('device')}")
    return " · ".join(word for word in words if word)


def _short(name: str) -> str:
    """A long path by its end."""
    return name if len(name) <= _LONGEST or "/" not in name else "…/" + "/".join(name.split("/")[-2:])


def _shown(choices: Sequence[Choice]) -> Sequence[Choice]:
    """The first choices, and the model as it is to compare them with."""
    first = choices[:CHOICES]
    return [*first, *(choice for choice in choices[CHOICES:] if not choice.remedies)]


def choices_table(choices: Sequence[Choice]) -> Table:
    """Every choice with what was measured of it."""
    measured = [choice for choice in choices if choice.loss is not None]
    columns = ("choice", "loss here", "") if measured else ("choice", "similarity", "test loss")
    rows = []
    for choice in choices:
        number = choice.loss if measured else choice.similarity
        digits = 4 if measured else 3
        shown = "" if number is None or math.isnan(number) else f"{number:.{digits}f}"
        rows.append((choice.name, shown, choice.evidence.removeprefix("test loss ")))
    return Table(columns, tuple(rows))


def _curves(profiles: Sequence[tuple[str, Profile]]) -> tuple[Curve, ...]:
    """Token similarity of every part; of directions where an outlier token makes the raw one."""
    found = []
    for when, profile in profiles:
        names = profile.names()
        name = next((n for n in ("token_similarity", "direction_similarity", "cosine_similarity") if n in names), None)
        for part in profile.parts if name is not None else ():
            label = " ".join(word for word in (str(name).replace("_", " "), part, when) if word)
            found.append(Curve(label, tuple(map(float, profile.curve(str(name), part=part)))))
    return tuple(found)


def _largest(lengths: Any) -> str:
    length = int(lengths.idxmax())
    layers = "no attention layer" if length == 0 else "1 attention layer" if length == 1 else f"{length} layers"
    return f"The largest single share, {lengths.max():.0%}, passed {layers}."


def _sentence(text: str) -> str:
    if not text:
        return ""
    first = text[0].upper() if text[0].isascii() else text[0]  # τ stays small
    return f"{first}{text[1:].rstrip('.')}."
