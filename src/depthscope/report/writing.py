"""`write`: a page of what was measured; `write_index`: one of studies; `write_charts`: charts as pictures."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from depthscope.extras import require
from depthscope.files import write_folder, write_whole
from depthscope.report.drawings import Drawing, Material
from depthscope.report.page import damage_of, drawings_of, readable, render, tables_of
from depthscope.report.reading import read, studies_in, taken_as_they_are
from depthscope.report.subjects import Subject, named, subjects_of
from depthscope.report.tables import as_records, chosen

REPORT = "report.html"
_WIDTH = 720  # of a picture, in points


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def write(
    target: str | os.PathLike[str], *things: object, title: str = "", say: Callable[[str], object] = _warn
) -> Path:
    """Writes one HTML file that holds all it shows, about these things; at the top level it is `write_report`.

    Args:
        target: the file; a folder gets a `report.html`.
        things: folders that `--out` wrote, or a `Profile`, a `Diagnosis`, what `fix`, `paths`, `spectra` or `skip_loss`
            returned. A diagnosis, path shares or spectra behind a profile belong to it. Of several runs the first is
            the baseline.
        title: of the page.
        say: hears of each file that is damaged, missing or of another kind, which the page names too and does not show;
            by default it warns.

    Returns:
        The file's path.

    Example:
        >>> import tempfile, torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> profile = depthscope.probe(model, torch.randn(2, 5, 16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     depthscope.write_report(folder, profile).name
        'report.html'
    """
    subjects = gathered(things)
    for text in damage_of(subjects):
        say(text)
    with _taken_as_they_are(subjects):
        text = render(subjects, title=title or _title(subjects))
    return write_whole(_file(target), lambda path: path.write_text(text, encoding="utf-8"))


def write_index(folder: str | os.PathLike[str], *, say: Callable[[str], object] = _warn) -> Path:
    """A page for every study in this folder, and `report.html` with all their claims; returns the latter's path.

    `say`: as for `write`.
    """
    place = Path(folder)
    studies, refused = studies_in(place)
    if not studies:
        raise ValueError(f"there is no study in {str(folder)!r}: `depthscope reproduce NAME --out DIR` makes one")
    for reason in [*refused, *damage_of(list(studies.values()))]:
        say(reason)
    for name, study in studies.items():
        with _taken_as_they_are([study]):
            text = render([study], title=study.label)
        write_whole(place / name / REPORT, lambda path, text=text: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    labelled = {name: replace(study, label=name, commands={}) for name, study in studies.items()}
    links = {name: f"./{quote(name)}/{REPORT}" for name in studies}  # "./": a folder's name is no scheme
    text = render(list(labelled.values()), title="Studies and their claims", links=links, notes=refused)
    return write_whole(place / REPORT, lambda path: path.write_text(text, encoding="utf-8"))


def write_charts(folder: str | os.PathLike[str], *things: object, kind: Literal["svg", "png"] = "svg") -> list[Path]:
    """Every chart of the page as a picture, without a browser; a file per chart in this folder."""
    if kind not in ("svg", "png"):
        raise ValueError(f"expected charts as svg or png, got {kind!r}")
    vl_convert: Any = require("vl_convert", "report")
    require("altair", "report")
    subjects = gathered(things)
    with _taken_as_they_are(subjects):
        material = Material(subjects)
        drawings = drawings_of(material)
        if not drawings:
            raise ValueError("there is no chart to draw: nothing was measured block by block")
        tables = tables_of(material, drawings)
    convert = vl_convert.vegalite_to_svg if kind == "svg" else vl_convert.vegalite_to_png
    made = {f"{name}.{kind}": convert(_whole(drawing, tables)) for name, drawing in drawings.items()}

    def put(path: Path, content: str | bytes) -> None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))

    target = Path(folder)
    write_folder(target, {name: lambda path, c=content: put(path, c) for name, content in made.items()})  # type: ignore[misc]
    return [target / name for name in made]


def gathered(things: Sequence[object]) -> list[Subject]:
    """Folders are read, objects taken as they are."""
    if not things:
        raise ValueError("expected a folder, or something that was measured, to report")
    folders = [thing for thing in things if isinstance(thing, str | os.PathLike)]
    objects = [thing for thing in things if not isinstance(thing, str | os.PathLike)]
    return named([*read(*(Path(folder).expanduser() for folder in folders)), *subjects_of(objects)])


def _taken_as_they_are(subjects: Sequence[Subject]) -> AbstractContextManager[None]:
    return taken_as_they_are(name for subject in subjects for name in subject.unchecked)


def _whole(drawing: Drawing, tables: dict[str, Any]) -> dict[str, Any]:
    """The specification with its data, for a renderer that is given nothing else; on white."""
    from depthscope.report.marks import CONFIG

    rows = {name: as_records(chosen(tables[name], where)) for name, where in drawing.uses.items()}
    spec: dict[str, Any] = drawing.spec.to_dict(validate=False)
    title = {"text": drawing.title, "anchor": "start"}
    whole = spec | {"datasets": rows, "config": CONFIG | {"background": "white"}, "width": _WIDTH, "title": title}
    return {name: readable(part) for name, part in whole.items()}


def _file(target: str | os.PathLike[str]) -> Path:
    path = Path(target).expanduser()
    return path / REPORT if path.is_dir() or path.suffix.lower() not in (".html", ".htm") else path


def _title(subjects: Sequence[Subject]) -> str:
    labels = [subject.label for subject in subjects]
    models = list(dict.fromkeys(subject.model for subject in subjects if subject.model))
    if len(models) == 1:
        depths = {subject.depth for subject in subjects if subject.depth}
        return _short(models[0]) + (f", {depths.pop()} blocks" if len(depths) == 1 else "")
    return ", ".join(labels) if len(labels) < 4 else f"{len(labels)} runs"


def _short(model: str) -> str:
    """Of a long path the end; all of it is among what was measured."""
    parts = [part for part in model.split("/") if part]
    return "/".join(parts[-2:]) if len(parts) > 2 else model
