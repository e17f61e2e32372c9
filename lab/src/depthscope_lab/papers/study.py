"""What a study is: two pure functions and its claims. `compute` computes, `draw` never does.

`draw` chooses rows of the frame, and may average them over trials, samples or seeds (mean, standard deviation). All
else that a picture shows, theory above all, stands in the frame.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope.files import read_json, write_folder, write_json
from depthscope.locks import owned
from depthscope.progress import Share
from depthscope.report.formats import STUDY_FORMAT, read_about
from depthscope.sealed import with_record
from depthscope_lab.papers.catalogue import STUDIES
from depthscope_lab.papers.provenance import changes, provenance, short_hash
from depthscope_lab.papers.vocabulary import Claim as Claim
from depthscope_lab.papers.vocabulary import judge as judge

MOST_TRIALS = 100  # times the study's own: a standard error ten times smaller
FILES = ("data.parquet", "figure.png", "figure.pdf", "claims.json", "config.json")  # written in this order


@dataclass(frozen=True)
class Study:
    """A published figure, recomputed."""

    name: str
    full: Any  # a frozen dataclass with at least a seed; `trials` where there are trials
    quick: Any
    compute: Callable[..., pd.DataFrame]  # (config, progress: Share), and a folder if it is `in_folder`
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
    config = study.quick if quick else study.full
    if scale is not None:
        if quick or scale not in study.scales:
            there = ", ".join(study.scales) or "none"
            raise ValueError(f"{study.name} has no {'quick ' if quick else ''}scale {scale!r}; scales: {there}")
        config = study.scales[scale]
    elif data is not None and study.with_data is not None:
        if quick:
            raise ValueError(f"{study.name} --quick brings its data; leave --data out")
        config = study.with_data
    wanted = {"seed": seed, "trials": trials, "data": data}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    known = {field.name for field in fields(config)}
    if unknown := wanted.keys() - known:
        raise ValueError(f"{study.name} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    if trials is not None and trials < 2:
        raise ValueError(f"expected at least 2 trials, got {trials}")
    if trials is not None and trials > (most := MOST_TRIALS * (own := study.full.trials)):
        raise ValueError(
            f"{study.name}: expected at most {most} trials, {MOST_TRIALS} times its own {own}, got {trials}"
        )
    return replace(config, **wanted)


@dataclass(frozen=True)
class Earlier:
    """What an earlier run has left: its claims if it counts, else why it does not; both empty if there was none."""

    claims: list[Claim] | None = None
    refused: str = ""


def earlier(study: Study, config: Any, out: Path) -> Earlier:
    """An earlier run counts if it is complete, of this very configuration, by the same code and on the same data."""
    folder = out / study.name
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        return Earlier() if len(missing) == len(FILES) else Earlier(refused=f"{missing[0]} is missing")
    try:
        record = read_about(folder)
        before = {name: value for name, value in record.content.items() if name not in ("made_with", "words", "title")}
        for name in FILES[:-1]:
            try:
                whole = bool(record.require(folder / name, listed=True))
            except (OSError, ValueError):
                whole = False
            if not whole:
                return Earlier(refused=f"{name}: not what the earlier run wrote")
        claims = [Claim(**claim) for claim in read_json(folder / "claims.json")]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return Earlier(refused=" ".join(str(error).split()))
    now, other = _plain(study, config), []
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            values = f"{name} was {before.get(name)} and is {now.get(name)}"
            other.append(values if len(values) < 60 else f"other {name}")
    if other:
        return Earlier(refused=f"the earlier run had another configuration ({', '.join(other)})")
    data = getattr(config, "data", None)
    changed = changes(record.content.get("made_with"), provenance(study.compute, data), data)
    return Earlier(refused=changed) if changed else Earlier(claims)


def run(
    study: Study,
    config: Any,
    out: Path,
    progress: Share = lambda _share: None,
    seen: Callable[[list[Claim]], object] = lambda _claims: None,
) -> list[Claim]:
    """Computes, judges, draws and writes one study; its folder is complete or as it was.

    `seen` is called with the claims before anything is drawn or written. A study that is `in_folder` gets a folder of
    its own for every state of code, libraries and data: what it trained by other code stays, and does not count.
    """
    folder = out / study.name
    with owned(folder):
        # Before the numbers are computed: what is edited meanwhile is another version.
        made_with = provenance(study.compute, getattr(config, "data", None))
        place = [folder / f"runs-{short_hash(made_with)}"] if study.in_folder else []
        frame = study.compute(config, progress, *place)
        claims = study.claims(frame, config)
        seen(claims)
        figure = study.draw(frame)
        writers: dict[str, Callable[[Path], object]] = {
            "data.parquet": partial(frame.to_parquet, index=False),
            "figure.png": lambda path: figure.savefig(path, dpi=160),
            "figure.pdf": figure.savefig,
            "claims.json": lambda path: write_json(path, [asdict(claim) for claim in claims]),
        }
        title = STUDIES[study.name].title if study.name in STUDIES else ""
        known = {"title": title, **_plain(study, config), "made_with": made_with}
        writers = with_record(writers, "config.json", "study", STUDY_FORMAT, known)
        assert tuple(writers) == FILES  # config.json last: it says that the rest is there
        write_folder(folder, writers)
    return claims


def _plain(study: Study, config: Any) -> Any:
    return json.loads(json.dumps({"study": study.name, **asdict(config)}))
