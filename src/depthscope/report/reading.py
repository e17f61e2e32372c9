"""Folders that `--out` wrote, as subjects of a page. What is damaged is refused, by the reader of its kind."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope.decomposition import PathShares
from depthscope.files import read_json, require_file
from depthscope.probing import Profile, Spectra, load_records
from depthscope.report.formats import COLUMNS, ENDS, FACTORS, WATCHED, Claim, evaluated, read_metrics, run_name
from depthscope.report.subjects import Subject, has_content, named, subjects_of
from depthscope.usage import DepthUse

COMMANDS = "commands.json"  # by command, what was typed and the line of Python that does the same
_MOST_WATCHED = 12  # runs of a comparison whose depth is shown
_WATCHED_COLUMNS = ["series", "step", "block", "station", "measure", "value"]


def read(*folders: Path) -> list[Subject]:
    """The subjects in these folders, with labels that differ; the first is the baseline of the page."""
    found: list[Subject] = []
    for folder, label in zip(folders, _labels(folders), strict=True):
        subjects = _in(folder)
        found += [replace(subject, label=_label(label, subject.label, len(folders))) for subject in subjects]
    return named(found)


def studies_in(folder: Path) -> tuple[dict[str, Subject], list[str]]:
    """The studies that have folders of their own in this one, by name; and why others cannot be read."""
    if not folder.is_dir():
        return {}, []
    found, refused = {}, []
    for path in sorted(path for path in folder.iterdir() if (path / "claims.json").is_file()):
        try:
            found[path.name] = replace(_study(path), commands=_commands(path))
        except ValueError as error:
            refused.append(str(error))
    return found, refused


def _labels(folders: Sequence[Path]) -> list[str]:
    """The folders' own names; where two are the same, all that was typed."""
    names = [folder.resolve().name or str(folder) for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _label(folder: str, own: str, count: int) -> str:
    if not own:
        return folder
    return own if count == 1 else f"{folder}, {own}"


def _in(folder: Path) -> list[Subject]:
    if folder.suffix == ".jsonl" and folder.is_file():
        return [Subject(watched=_watched(folder, folder.stem))]
    if not folder.is_dir():
        raise ValueError(f"expected a folder that a depthscope command wrote with --out, got {str(folder)!r}")
    commands = _commands(folder)
    if (folder / "fix.json").is_file():
        return [replace(subject, commands=commands) for subject in _fix(folder)]
    readers: dict[str, Callable[[Path], Subject]] = {
        "profile.json": _profile,
        "paths.json": lambda place: Subject(shares=PathShares.load(place)),
        "spectra.json": lambda place: Subject(spectra=Spectra.load(place)),
        "depth.json": lambda place: Subject(use=DepthUse.load(place)),
        "curves.parquet": _comparison,
        "metrics.jsonl": _training,
        "claims.json": _study,
    }
    there = [reader(folder) for name, reader in readers.items() if (folder / name).is_file()]
    if not there and (folder / "depth.jsonl").is_file():
        there = [Subject(watched=_watched(folder / "depth.jsonl", folder.name))]
    if not there:
        raise ValueError(f"there is nothing of depthscope to report in {str(folder)!r}: give a folder that --out wrote")
    return [replace(_together(there), commands=commands)]


def _together(subjects: Sequence[Subject]) -> Subject:
    """One of several that were written into one folder by several commands; of a field that two have, the first."""
    merged: dict[str, Any] = {}
    for subject in reversed(subjects):
        own = {item.name: getattr(subject, item.name) for item in fields(subject)}
        merged |= {name: value for name, value in own.items() if value is not None and has_content(value)}
    return Subject(**merged)


def _profile(folder: Path) -> Subject:
    profile = Profile.load(folder)
    diagnosis = _object(folder / "diagnosis.json") if (folder / "diagnosis.json").is_file() else None
    skipped = None
    if (folder / "skip_loss.csv").is_file():
        skipped = pd.read_csv(require_file(folder / "skip_loss.csv"))
    subject = Subject(profile=profile, diagnosis=diagnosis, skipped=skipped)
    return subject if diagnosis is not None else replace(subjects_of([subject])[0], label="")


def _fix(folder: Path) -> list[Subject]:
    said = _object(folder / "fix.json")
    found = []
    for when in ("before", "after"):
        judged = said.get(when, {})
        diagnosis = judged.get("diagnosis") if isinstance(judged, dict) else None
        found.append(Subject(when, Profile.load(folder / when), diagnosis if isinstance(diagnosis, dict) else None))
    remedy = {name: said.get(name) for name in ("reason", "python", "loss", "notes", "trained")}
    found[0] = replace(found[0], remedy=remedy)
    return found if said.get("remedies") else found[:1]


def _comparison(folder: Path) -> Subject:
    try:
        frame = pd.read_parquet(require_file(folder / "curves.parquet"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder / 'curves.parquet'} is damaged: {' '.join(str(error).split())[:200]}") from None
    if list(frame.columns) != COLUMNS:
        raise ValueError(f"{folder / 'curves.parquet'} holds no curves of a comparison")
    varying = [name for name in FACTORS if frame[name].nunique() > 1 and name != "variant"]
    names = {"depth": "{} blocks", "lr": "lr {:g}", "warmup_steps": "warm-up {}"}
    labels = [
        ", ".join([str(row["variant"]), *(names[name].format(row[name]) for name in varying)])
        for row in frame[FACTORS].to_dict("records")
    ]
    training = frame.assign(series=labels)[["series", "seed", "step", "quantity", "value"]]
    watched = [_watched(path, path.parent.name) for path in _depth_files(folder, frame)[:_MOST_WATCHED]]
    summary = _object(folder / "summary.json") if (folder / "summary.json").is_file() else {}
    return Subject(
        compared=summary if isinstance(summary.get("verdict"), list) else None,
        training=training[~training["quantity"].isin(ENDS)],
        watched=pd.concat(watched, ignore_index=True) if watched else None,
    )


def _depth_files(folder: Path, frame: pd.DataFrame) -> list[Path]:
    """Where the depth of runs was written down: of each series the first seed; of a fair comparison what was judged."""
    found = []
    for row in frame.groupby(FACTORS, sort=False)["seed"].min().reset_index().to_dict("records"):
        name = run_name(*(row[factor] for factor in (*FACTORS, "seed")))
        places = [folder / "runs" / name, *sorted((folder / "runs").glob(f"{glob.escape(name)}-*steps-test"))]
        found += [place / "depth.jsonl" for place in places if (place / "depth.jsonl").is_file()]
    return found


def _training(folder: Path) -> Subject:
    rows = [
        (folder.name, 0, int(row["step"]), name, float("nan") if row[name] is None else float(row[name]))
        for row in read_metrics(folder / "metrics.jsonl")
        for name in (*(name for name in ("loss", "lr", WATCHED) if name in row), *evaluated(row))
    ]
    depth = folder / "depth.jsonl"
    return Subject(
        training=pd.DataFrame(rows, columns=["series", "seed", "step", "quantity", "value"]),
        watched=_watched(depth, folder.name) if depth.is_file() else None,
    )


def _watched(path: Path, series: str) -> pd.DataFrame:
    return load_records(path).assign(series=series)[_WATCHED_COLUMNS]


def _study(folder: Path) -> Subject:
    try:
        claims = tuple(vars(Claim(**claim)) for claim in read_json(folder / "claims.json"))
        config = _object(folder / "config.json") if (folder / "config.json").is_file() else {}
        data = pd.read_parquet(require_file(folder / "data.parquet")) if (folder / "data.parquet").is_file() else None
    except (TypeError, ValueError, OSError) as error:
        raise ValueError(f"{folder} holds no study: {' '.join(str(error).split())[:200]}") from None
    picture = folder / "figure.png"
    name = str(config.get("study", folder.name))
    return Subject(
        name,
        title=str(config.get("title", "")),
        claims=claims,
        data=data,
        figure=require_file(picture).read_bytes() if picture.is_file() else None,
    )


def _commands(folder: Path) -> dict[str, str]:
    """What was typed, and in Python; nothing where the file is not there or not ours."""
    try:
        kept = _object(folder / COMMANDS)
    except (OSError, ValueError):
        return {}
    found: dict[str, str] = {}
    for command, said in kept.items():
        if isinstance(said, dict):
            found |= {f"{command}, {kind}": text for kind, text in said.items() if isinstance(text, str) and text}
    return found


def _object(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: expected an object, got {type(found).__name__}")
    return found
