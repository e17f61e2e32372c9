"""The one description of what is shown: made here from a result, drawn by the terminal, the page and the figures.

A summary is short on purpose: the model in one line, a verdict, at most three findings, one set of curves or one table
of at most eight rows, what to do, and notes. Everything else stands in the result itself (`--full`, the page).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from depthscope.attention_paths import CONSTANT, PathShares
from depthscope.diagnosis.choices import Choice
from depthscope.diagnosis.facts import SIMILARITIES
from depthscope.diagnosis.fixing import Fixed
from depthscope.diagnosis.verdict import Diagnosis
from depthscope.drawing.complex_plane import evenly
from depthscope.naming import counted, ranges
from depthscope.probing import Profile
from depthscope.stations import IN_WORDS
from depthscope.usage import DepthUse, Finding
from depthscope.value_spectra import Spectra

FINDINGS = 3  # at most
_LONGEST = 40  # characters of a model's name
ROWS = 8  # of a table, at most
CHOICES = 5  # of `fix`, besides the model as it is
MOST = 0.95  # of the output: what is left is a twentieth
SIDE = 0.75  # of the eigenvalues on one side of 0: three of four, where random weights have two
ROUNDING = 1e-9  # of |1 + μ|


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

    kind: Literal["verdict", "depth", "paths", "spectra", "comparison", "training"]  # what it is a summary of
    model: str  # in one line
    headline: str
    verdict: str = ""  # in a word or two; "" where a result has none
    findings: tuple[Finding, ...] = ()  # at most three, the most important first
    others: tuple[Finding, ...] = ()  # those that are shown on the page, and with --full
    curves: tuple[Curve, ...] = ()
    table: Table | None = None
    advice: str = ""  # what to do; "" where nothing follows
    code: str = ""  # the lines of Python for it
    notes: tuple[str, ...] = ()  # what the reader must know of how it was measured

    @property
    def left(self) -> int:
        """Findings that are not shown by default."""
        return len(self.others)


def of_profile(
    profile: Profile, diagnosis: Diagnosis, use: DepthUse | None = None, skipped: pd.DataFrame | None = None
) -> Summary:
    """What `probe` shows: the verdict, and how alike tokens are after each block; what skipping costs, if asked for."""
    costs = () if use is None else of_use(use).curves
    if skipped is not None:
        costs = (_costs("loss without it", skipped["change"].iloc[1:]),)
    return Summary(
        "verdict",
        model_line(profile.metadata),
        diagnosis.headline,
        diagnosis.verdict,
        diagnosis.findings[:FINDINGS],
        diagnosis.findings[FINDINGS:],
        (*_curves([("", profile)]), *costs),
        advice=_sentence(diagnosis.recommendation.reason),
        code=diagnosis.recommendation.code or "",
        notes=(*profile.metadata.get("notes", ()), *(() if use is None else use.metadata.get("notes", ()))),
    )


def of_fix(fixed: Fixed, notes: Sequence[str] = ()) -> Summary:
    """What `fix` shows: the choices in their order, and the line for the first."""
    before, after = fixed.verdicts
    curves = [("before", fixed.before), ("after", fixed.after)] if fixed.remedies else [("", fixed.before)]
    return Summary(
        "verdict",
        model_line(fixed.before.metadata),
        before.headline + (f" With the remedy: {after.verdict}." if fixed.remedies else ""),
        before.verdict,
        curves=() if fixed.choices else _curves(curves),
        table=choices_table(fixed.choices) if fixed.choices else None,
        advice=_sentence(fixed.recommendation.reason),
        code=fixed.recommendation.code or "",
        notes=(*notes, *fixed.notes),
    )


def of_use(use: DepthUse) -> Summary:
    """What `depth` shows: the blocks that matter most, and those that matter least."""
    loss, priced = use.metadata.get("loss"), use.frame["skip_loss"].notna().any() and use.learnt
    costs = use.frame["skip_loss" if priced else "skip_output"]
    others = tuple(item for item in use.findings if item.sentence != use.headline)
    what = "loss without it" if priced else "output moves without it"
    return Summary(
        "depth",
        model_line(use.metadata) + (f" · loss {loss:.3f}" if loss is not None else ""),
        use.headline,
        findings=others[:FINDINGS],
        others=others[FINDINGS:],
        curves=(_costs(what, costs),) if costs.notna().any() else (),
        notes=tuple(use.metadata.get("notes", ())),
    )


def of_paths(shares: PathShares) -> Summary:
    """What `paths` shows: how much of the output has passed how many attention layers."""
    table = shares.summary()
    along = table["projection_share"]
    lengths = along[along.index >= 0]
    # Biases may hold a share, or take one away: what counts is which lengths make up what all lengths bring.
    sums = (lengths.cumsum() / lengths.sum()).to_numpy()
    reached = int((sums >= MOST).argmax()) if (sums >= MOST).any() else len(sums) - 1
    through = f"at most {reached} of {shares.depth} attention layers" if reached else "no attention layer"
    shown = [length for length in lengths.index if length < ROWS - 2]
    cosines = {length: "·" if math.isnan(cosine) else f"{cosine:+.2f}" for length, cosine in table["cosine"].items()}
    rest, constant = lengths[lengths.index >= ROWS - 2], along.get(CONSTANT, math.nan)
    rows = [(str(length), f"{lengths[length]:.1%}", cosines[length]) for length in shown]
    if len(rest):
        rows.append((f"{ROWS - 2} or more", f"{rest.sum():.1%}", ""))
    biased = abs(constant) >= 5e-3  # shown as a share in percent
    if abs(constant) >= 5e-4:  # and in tenths of a percent
        rows.append(("biases", f"{constant:.1%}", cosines[CONSTANT]))
    largest = int(str(lengths.idxmax()))
    layers = "no attention layer" if largest == 0 else "1 attention layer" if largest == 1 else f"{largest} layers"
    said = f"The largest single share, {lengths.max():.0%}, passed {layers}."
    findings = [Finding("longest", said, {"length": float(largest)})]
    return Summary(
        "paths",
        model_line(shares.metadata),
        f"Paths through {through} make {sums[reached]:.0%} of the output{', biases left out' if biased else ''}.",
        findings=tuple(findings),
        table=Table(("layers passed", "share of output", "cosine with output"), tuple(rows)),
        notes=tuple(shares.metadata.get("notes", ())),
    )


def of_spectra(found: Spectra) -> Summary:
    """What `spectra` shows: whether the value weights push tokens apart or together, block by block."""
    about, blocks = found.metadata, found.by_block
    shares = blocks["negative_share"].dropna()  # by block, the mean over its heads
    of_queries = about["product"] == "query-key"
    product = "W_Q W_Kᵀ" if of_queries else "W_V W_O"
    headline = f"All eigenvalues of {product} are 0 in all {found.depth} blocks."
    said = []
    if len(shares):
        headline = f"{shares.mean():.0%} of the eigenvalues of {product} are negative; of random weights half are."
    if len(shares) and not of_queries:
        growth = found.summary.query("head >= 0")["mean_growth"].dropna()  # by head
        apart, together = list(shares.index[shares >= SIDE]), list(shares.index[shares <= 1 - SIDE])
        count = f"of {len(shares)} blocks"
        if apart:
            said.append(f"{len(apart)} {count} push tokens apart (3 of 4 eigenvalues negative): {ranges(apart)}.")
        if together:
            said.append(f"{len(together)} {count} pull tokens together (1 of 4 negative): {ranges(together)}.")
        said = said or ["No block leans far to either side."]
        growing = int((growth > 1 + ROUNDING).sum())
        said.append(
            f"In {growing} of {len(growth)} heads, attention alone, applied again and again, would make tokens alike. "
            "`depthscope probe` measures what happens."
        )
    rows = [
        (str(block), f"{blocks['negative_share'][block]:.0%}", f"{blocks['spectral_radius'][block]:.3g}")
        for block in evenly(list(blocks.index), ROWS)
    ]
    return Summary(
        "spectra",
        f"{about['model']} · {found.depth} blocks · eigenvalues of {about['product']}",
        headline,
        findings=tuple(Finding("value weights", sentence, {}) for sentence in said[:FINDINGS]),
        table=Table(("block", "negative eigenvalues", "largest eigenvalue"), tuple(rows)),
        notes=tuple(about["notes"]),
    )


def model_line(about: Mapping[str, Any]) -> str:
    """A model and its inputs in one line."""
    towers: Mapping[str, Any] = about.get("towers") or {}
    weights = (about.get("weights") or {}).get("look")
    name, blocks = str(about.get("model")), counted(about.get("blocks", 0), "block")
    if len(name) > _LONGEST and "/" in name:
        name = "…/" + "/".join(name.split("/")[-2:])  # a long path by its end
    if about.get("width") and not towers:
        blocks += f" of width {about['width']}"
    words = [
        name,
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


def choices_table(choices: Sequence[Choice]) -> Table:
    """The first choices, and the model as it is to compare them with; each with what was measured of it."""
    shown = [*choices[:CHOICES], *(choice for choice in choices[CHOICES:] if not choice.remedies)]
    measured = any(choice.loss is not None for choice in shown)
    rows = []
    for choice in shown:
        number = choice.loss if measured else choice.similarity
        text = "" if number is None or math.isnan(number) else f"{number:.{4 if measured else 3}f}"
        rows.append((choice.name, text, choice.evidence.removeprefix("test loss ")))
    return Table(("choice", "loss here", "") if measured else ("choice", "similarity", "test loss"), tuple(rows))


def _curves(profiles: Sequence[tuple[str, Profile]]) -> tuple[Curve, ...]:
    """Token similarity of every part; of directions, or the mean cosine, where it was not measured."""
    found = []
    for when, profile in profiles:
        name = next((name for name in SIMILARITIES if name in profile.names()), None)
        for part in profile.parts if name is not None else ():
            label = " ".join(word for word in (str(name).replace("_", " "), part, when) if word)
            found.append(Curve(label, tuple(map(float, profile.curve(str(name), part=part)))))
    return tuple(found)


def _costs(label: str, values: Sequence[float] | pd.Series[float]) -> Curve:
    costs = tuple(map(float, values))
    return Curve(label, costs, min(0.0, *costs), max(costs))


def _sentence(text: str) -> str:
    return f"{text.rstrip('.')}." if text else ""
