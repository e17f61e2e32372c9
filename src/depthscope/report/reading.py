"""Folders that `--out` wrote, as subjects of a page.

What is damaged, missing or of another kind is left out and named (`Subject.damage`); a folder of which nothing is left
is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from depthscope.attention_paths import PathShares
from depthscope.diagnosis import Diagnosis
from depthscope.files import in_words, read_json, require_own_file
from depthscope.probing import Profile
from depthscope.probing.saved import read_made
from depthscope.report.formats import (
    COLUMNS,
    ENDS,
    FACTORS,
    METRICS,
    WATCHED,
    Claim,
    checkpoints_in,
    evaluated,
    read_about,
    read_metrics,
    read_state,
)
from depthscope.report.subjects import Subject, judged, named, of_losses
from depthscope.sealed import COMMANDS, Record, read_commands, read_record, require_whole_log
from depthscope.usage import DepthUse
from depthscope.value_spectra import Spectra
from depthscope.watching import load_records

T = TypeVar("T")
_WATCHED_COLUMNS = ["series", "step", "block", "station", "measure", "value"]


def read(*folders: Path) -> list[Subject]:
    """The subjects in these folders, with labels that differ."""
    found: list[Subject] = []
    for folder, label in zip(folders, _labels(folders), strict=True):
        with in_one_line():
            subjects = _in(folder)
        for subject in subjects:
            own = subject.label if len(folders) == 1 else f"{label}, {subject.label}"
            found.append(replace(subject, label=own if subject.label else label))
    return named(found)


@contextmanager
def in_one_line() -> Iterator[None]:
    """Files that an earlier version wrote without a sum may hold anything: what trips over it says so in one line."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot show it: a file that an earlier version has saved may be damaged ({why})") from None


def _is_study(folder: Path) -> bool:
    """Whether what is there is of a study, also if its claims are gone."""
    return _has(folder, "claims.json") or (_has(folder, "config.json") and _has(folder, "data.parquet"))


def _has(folder: Path, *names: str) -> bool:
    """Whether one of these is there, be it a pipe or a link that leads nowhere."""
    return folder.is_dir() and any(os.path.lexists(folder / name) for name in names)


def _tried(damage: list[str], read: Callable[[], T]) -> T | None:
    """What it reads; None, and a sentence more, if it cannot be read."""
    try:
        return read()
    except FileNotFoundError as error:
        damage.append(f"{error.filename} is missing")
    except OSError as error:
        damage.append(f"{error.filename or 'a file'} cannot be read: {in_words(error)}")
    except ValueError as error:
        damage.append(" ".join(str(error).split()))
    return None


def _labels(folders: Sequence[Path]) -> list[str]:
    """The folders' own names; where two are the same, all that was typed."""
    names = [folder.resolve().name or str(folder) for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _in(folder: Path) -> list[Subject]:
    if folder.suffix == ".jsonl" and folder.is_file():
        return [Subject(watched=_watched(folder, folder.stem))]
    if not folder.is_dir():
        raise ValueError(f"expected a folder that a depthscope command wrote with --out, got {str(folder)!r}")
    damage: list[str] = []
    commands = _tried(damage, lambda: _commands(folder)) or {}
    if _has(folder, "fix.json", "before/profile.json", "after/profile.json"):
        before_and_after = _tried(damage, lambda: _fix(folder))
        if before_and_after is None:
            raise ValueError("; ".join(damage))
        first, *others = before_and_after
        return [replace(first, commands=commands, damage=tuple(damage)), *others]
    readers = [reader for reader, signs in _READERS.items() if _has(folder, *signs)]
    if not readers and _has(folder, "depth.jsonl"):  # of a `watch` that a user's own training has called
        readers = [lambda folder: Subject(watched=_watched(folder / "depth.jsonl", folder.name))]
    there = [found for reader in readers if (found := _tried(damage, partial(reader, folder))) is not None]
    if not there and damage:
        raise ValueError("; ".join(damage))
    if not there:
        return _studies(folder)
    named = [text for found in there for text in found.damage]
    return [replace(_together(there), commands=commands, damage=(*damage, *named))]


def _studies(folder: Path) -> list[Subject]:
    """The studies that have folders of their own in this one; what cannot be read of them is named with the first."""
    damage: list[str] = []
    places = [path for path in sorted(folder.iterdir()) if _is_study(path)]
    read = [(path, found) for path in places if (found := _tried(damage, partial(_in, path))) is not None]
    if not read:
        nothing = f"there is nothing of depthscope to report in {str(folder)!r}: give a folder that --out wrote"
        raise ValueError("; ".join(damage) or nothing)
    first, *others = [replace(subject, label=path.name) for path, subjects in read for subject in subjects]
    return [replace(first, damage=(*first.damage, *damage)), *others]


def _together(subjects: Sequence[Subject]) -> Subject:
    """One of several that were written into one folder by several commands; of a field that two have, the first."""
    merged: dict[str, Any] = {}
    for subject in reversed(subjects):
        merged |= {"label": subject.label} | subject.filled()
    return Subject(**merged)


def _profile(folder: Path) -> Subject:
    profile = Profile.load(folder)
    damage: list[str] = []
    return replace(judged(Subject("", profile, _tried(damage, lambda: _diagnosis(folder)))), damage=tuple(damage))


def _diagnosis(folder: Path) -> Diagnosis | None:
    path = read_made(folder, "diagnosis.json")
    if path is None:
        return None
    try:
        return Diagnosis.from_dict(read_record(path, "diagnosis", unnumbered=1).content)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path} is damaged: {error}") from None


def _fix(folder: Path) -> list[Subject]:
    record = read_record(folder / "fix.json", "fix", unnumbered=1)
    said, found = record.content, []
    for when in ("before", "after"):
        record.require(folder / when / "profile.json", f"{when}/profile.json")  # which has the sums of the others
        verdict = said.get(when, {}).get("diagnosis") if isinstance(said.get(when), dict) else None
        found.append(Subject(when, Profile.load(folder / when), Diagnosis.from_dict(verdict)))
    losses = said.get("loss") or {}
    notes = [of_losses(losses["before"], losses["after"])] if losses else []
    found[0] = replace(found[0], notes=(*map(str, said.get("notes") or ()), *notes))
    return found if said.get("remedies") else found[:1]


def _comparison(folder: Path) -> Subject:
    damage: list[str] = []
    record = _tried(damage, lambda: read_record(folder / "summary.json", "comparison", unnumbered=1))
    frame = _curves(folder / "curves.parquet" if record is None else record.require(folder / "curves.parquet"))
    varying = [name for name in FACTORS if frame[name].nunique() > 1 and name != "variant"]
    names = {"depth": "{} blocks", "lr": "lr {:g}", "warmup_steps": "warm-up {}"}
    labels = [
        ", ".join([str(row["variant"]), *(names[name].format(row[name]) for name in varying)])
        for row in frame[FACTORS].to_dict("records")
    ]
    training = frame.assign(series=labels)[["series", "seed", "step", "quantity", "value"]]
    summary = {} if record is None else record.content
    return Subject(
        compared=summary if isinstance(summary.get("verdict"), list) else None,
        training=training[~training["quantity"].isin(ENDS)],
        damage=tuple(damage),
    )


def _curves(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(require_own_file(path))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None
    if list(frame.columns) != COLUMNS:
        raise ValueError(f"{path} holds no curves of a comparison")
    return frame


def _training(folder: Path) -> Subject:
    damage: list[str] = []
    logs = _logs_at_the_last_checkpoint(folder / "checkpoints", damage)
    if _has(folder, "config.json", "checkpoints"):
        _tried(damage, lambda: read_record(folder / "config.json", "training", unnumbered=1))
    rows = _tried(damage, lambda: _logged(folder, logs.get(METRICS)))
    depth = folder / "depth.jsonl"
    there = os.path.lexists(depth) or depth.name in logs
    watched = _tried(damage, lambda: _watched(depth, folder.name, logs.get(depth.name))) if there else None
    if rows is None and watched is None:
        raise ValueError("; ".join(damage))
    return Subject(
        training=None if rows is None else pd.DataFrame(rows, columns=["series", "seed", "step", "quantity", "value"]),
        watched=watched,
        damage=tuple(damage),
    )


def _logged(folder: Path, written: Any) -> list[tuple[str, int, int, str, float]]:
    require_whole_log(folder / METRICS, written)
    logged = read_metrics(folder / METRICS)
    if any("curves" in row for row in logged):
        raise ValueError(f"{folder / METRICS} is another file: that of a watch")
    rows = [
        (folder.name, 0, int(row["step"]), name, float("nan") if row[name] is None else float(row[name]))
        for row in logged
        for name in (*(name for name in ("loss", "lr", WATCHED) if name in row), *evaluated(row))
    ]
    if not rows:
        raise ValueError(f"{folder / METRICS} is empty: a training writes its numbers there")
    return rows


def _logs_at_the_last_checkpoint(folder: Path, damage: list[str]) -> dict[str, Any]:
    """Length and sum of what a run had logged by its newest checkpoint: the beginning of what is there now."""
    for path in reversed(checkpoints_in(folder)):
        state = _tried(damage, lambda path=path: read_state(require_own_file(path / "state.json")))  # type: ignore[misc]
        if state is not None:
            logs = state.get("logs")
            return logs if isinstance(logs, dict) else {}
        damage[-1] = f"the checkpoint {path} is damaged: {damage[-1]}"
    return {}


def _watched(path: Path, series: str, written: Any = None) -> pd.DataFrame:
    require_whole_log(path, written)
    return load_records(path).assign(series=series)[_WATCHED_COLUMNS]


def _study(folder: Path) -> Subject:
    damage: list[str] = []
    record = _tried(damage, lambda: read_about(folder)) or Record({}, {}, summed=False, sealed=False)
    try:
        claims = tuple(vars(Claim(**claim)) for claim in read_json(record.require(folder / "claims.json")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder} holds no study: {' '.join(str(error).split())[:200]}") from None

    def beside(name: str, read: Callable[[Path], T]) -> T | None:
        there = name in record.files or os.path.lexists(folder / name)
        return read(record.require(folder / name)) if there else None

    data = _tried(damage, lambda: beside("data.parquet", pd.read_parquet))
    figure = _tried(damage, lambda: beside("figure.png", Path.read_bytes))
    name, title = str(record.content.get("study", folder.name)), str(record.content.get("title", ""))
    return Subject(name, title=title, claims=claims, data=data, figure=figure, damage=tuple(damage))


def _commands(folder: Path) -> dict[str, str]:
    """What was typed, and in Python; nothing where there is no such file."""
    if not os.path.lexists(folder / COMMANDS):
        return {}
    kept = read_commands(folder)
    found: dict[str, str] = {}
    for command, said in kept.items():
        if isinstance(said, dict):
            found |= {f"{command}, {kind}": text for kind, text in said.items() if isinstance(text, str) and text}
    return found


# By reader, the names of which one tells that there is something for it.
_READERS: dict[Callable[[Path], Subject], tuple[str, ...]] = {
    _profile: ("profile.json", "profile.parquet"),
    lambda folder: Subject(shares=PathShares.load(folder)): ("paths.json", "paths.parquet"),
    lambda folder: Subject(spectra=Spectra.load(folder)): ("spectra.json", "spectra.parquet"),
    lambda folder: Subject(use=DepthUse.load(folder)): ("depth.json", "depth.parquet"),
    _comparison: ("curves.parquet", "summary.json"),
    _training: (METRICS, "checkpoints"),
    _study: ("claims.json", "data.parquet"),
}
