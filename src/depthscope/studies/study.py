"""What a study is: two pure functions and its claims. `compute` computes, `draw` never does."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

Verdict = Literal["reproduced", "not reproduced", "not testable here"]
Progress = Callable[[float], None]  # the share of the work that is done, 0 to 1
FILES = ("data.parquet", "figure.png", "figure.pdf", "claims.json", "config.json")  # written in this order


@dataclass(frozen=True)
class Claim:
    """A statement that can fail, with the number it rests on."""

    claim: str
    paper: str  # what the paper says, and where
    ours: str  # what came out, with its number
    tolerance: str  # what would still count as the same, and why
    verdict: Verdict
    note: str = ""


def judge(claim: str, *, paper: str, ours: str, tolerance: str, holds: bool | None, note: str = "") -> Claim:
    """A claim with its verdict; `holds=None`: not testable here."""
    verdict: Verdict = "not testable here" if holds is None else "reproduced" if holds else "not reproduced"
    return Claim(claim, paper, ours, tolerance, verdict, note)


@dataclass(frozen=True)
class Study:
    """A published figure, recomputed."""

    name: str
    full: Any  # a frozen dataclass with at least a seed; `trials` where there are trials
    quick: Any
    compute: Callable[..., pd.DataFrame]  # (config, progress), and the study's folder if it is `in_folder`
    draw: Callable[[pd.DataFrame], Any]  # → matplotlib Figure
    claims: Callable[[pd.DataFrame, Any], list[Claim]]
    in_folder: bool = False  # it keeps what it has trained, and an interrupted study goes on from there
    scales: Mapping[str, Any] = field(default_factory=dict)  # other forms, by name: "paper"
    with_data: Any = None  # the form for data that a user gives, if it is another than the full one


def configure(
    study: Study,
    *,
    quick: bool = False,
    seed: int | None = None,
    trials: int | None = None,
    scale: str | None = None,
    data: str | None = None,
) -> Any:
    """The study's configuration with the given changes; refuses what a study does not have."""
    if scale is not None and (quick or scale not in study.scales):
        there = ", ".join(study.scales) or "none"
        raise ValueError(f"{study.name} has no {'quick ' if quick else ''}scale {scale!r}; scales: {there}")
    if data is not None and study.with_data is not None and quick:
        raise ValueError(f"{study.name} --quick brings its data; leave --data out")
    config = study.quick if quick else study.full
    if scale is not None:
        config = study.scales[scale]
    elif data is not None and study.with_data is not None:
        config = study.with_data
    assert is_dataclass(config)
    given = (("seed", seed), ("trials", trials), ("data", data))
    changes = {name: value for name, value in given if value is not None}
    known = {field.name for field in fields(config)}
    if unknown := changes.keys() - known:
        raise ValueError(f"{study.name} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    if trials is not None and trials < 2:
        raise ValueError(f"expected at least 2 trials, got {trials}")
    return replace(config, **changes)  # type: ignore[type-var]


def finished(study: Study, config: Any, out: Path) -> list[Claim] | None:
    """The claims of an earlier run with this very configuration, if it is complete."""
    folder = out / study.name
    if not all((folder / name).exists() for name in FILES):
        return None
    try:
        if json.loads((folder / "config.json").read_text(encoding="utf-8")) != _plain(study, config):
            return None
        return [Claim(**claim) for claim in json.loads((folder / "claims.json").read_text(encoding="utf-8"))]
    except (json.JSONDecodeError, TypeError):
        return None


def run(study: Study, config: Any, out: Path, progress: Progress = lambda _share: None) -> list[Claim]:
    """Computes, judges, draws and writes one study; its folder is complete or as it was."""
    frame = study.compute(config, progress, *([out / study.name] if study.in_folder else []))
    claims = study.claims(frame, config)
    figure = study.draw(frame)
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out, prefix=f".{study.name}-"))
    try:
        frame.to_parquet(scratch / "data.parquet", index=False)
        figure.savefig(scratch / "figure.png", dpi=160)
        figure.savefig(scratch / "figure.pdf")
        _write_json(scratch / "claims.json", [asdict(claim) for claim in claims])
        _write_json(scratch / "config.json", _plain(study, config))
        folder = out / study.name
        folder.mkdir(exist_ok=True)
        for name in FILES:  # config.json last: it says that the rest is there
            os.replace(scratch / name, folder / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return claims


def _plain(study: Study, config: Any) -> Any:
    return json.loads(json.dumps({"study": study.name, **asdict(config)}))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
