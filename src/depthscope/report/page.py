"""One HTML file that holds everything it shows: words, data, charts, and the program that draws them."""

from __future__ import annotations

import json
import os
import warnings
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

import depthscope
from depthscope.extras import require
from depthscope.files import write_whole
from depthscope.naming import visible
from depthscope.report.drawings import SECTIONS, Drawing, Material
from depthscope.report.reading import in_one_line, read
from depthscope.report.subjects import Subject, named, subjects_of
from depthscope.report.tables import NUMBERS, packed
from depthscope.report.words import said_of

REPORT = "report.html"
_MOST_ROWS = 5000  # of a study's table
_BULLETS = 3  # of a run before the rest is folded; of more than two runs it is one
VERDICTS = ("reproduced", "not reproduced", "not testable here")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def write(
    target: str | os.PathLike[str], *things: object, title: str = "", say: Callable[[str], object] = _warn
) -> Path:
    """Writes one HTML file that holds all it shows, about these things; at the top level it is `write_report`.

    Args:
        target: the file; a folder gets a `report.html`.
        things: folders that `--out` wrote (also one that holds studies), or a `Profile`, a `Diagnosis`, what `fix`,
            `depth_use`, `paths` or `spectra` returned. What comes after a profile and is no profile belongs to it.
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
    if not things:
        raise ValueError("expected a folder, or something that was measured, to report")
    folders = [Path(thing).expanduser() for thing in things if isinstance(thing, str | os.PathLike)]
    objects = [thing for thing in things if not isinstance(thing, str | os.PathLike)]
    subjects = named([*read(*folders), *subjects_of(objects)])
    for reason in damage_of(subjects):
        say(reason)
    with in_one_line() if folders else nullcontext():
        text = render(subjects, title=title or _title(subjects))
    file = Path(target).expanduser()
    if file.is_dir() or file.suffix.lower() not in (".html", ".htm"):
        file = file / REPORT
    return write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))


def drawings_of(material: Material) -> dict[str, Drawing]:
    """The charts that have something to show, by name, in their order."""
    from depthscope.report.charts import CHARTS

    drawn = {name: chart(material) for name, chart in CHARTS.items()}
    return {name: drawing for name, drawing in drawn.items() if drawing is not None}


def tables_of(material: Material, drawings: Mapping[str, Drawing]) -> dict[str, pd.DataFrame]:
    """Every table of a page once: the page's own, and those that charts bring."""
    tables = {NUMBERS: material.numbers} if len(material.numbers) else {}
    for name, drawing in drawings.items():
        for table, frame in drawing.tables.items():
            if table in tables and tables[table] is not frame:
                raise ValueError(f"the chart {name!r} brings a table {table!r}, and there is one of that name already")
            tables[table] = frame
    return tables


def damage_of(subjects: Sequence[Subject]) -> list[str]:
    """Which files of these subjects are not as they were written, each once."""
    return list(dict.fromkeys(text for subject in subjects for text in subject.damage))


def render(subjects: Sequence[Subject], *, title: str) -> str:
    """The page as text."""
    jinja2: Any = require("jinja2", "report")
    require("altair", "report")
    require("vl_convert", "report")
    from depthscope.report.marks import CONFIG  # needs Altair

    material = Material(subjects)
    drawings = drawings_of(material)
    tables = tables_of(material, drawings)
    studies = [subject for subject in subjects if subject.claims]
    data = studies[0].data if len(studies) == 1 else None
    if data is not None:
        tables["data"] = data.head(_MOST_ROWS)
    chart_of = {rule: name for name, drawing in reversed(drawings.items()) for rule in drawing.rules}
    said = [said_of(subject, chart_of) for subject in subjects if not subject.claims]
    first = next((item.headline.chart for item in said if item.headline.chart), next(iter(drawings), ""))
    first = "similarity" if len(said) > 1 and "similarity" in drawings else first  # which all runs have
    others = {name: drawing for name, drawing in drawings.items() if name != first}
    drawn = {
        "tables": {name: packed(table) for name, table in tables.items()},
        "charts": {
            name: {
                "spec": drawing.spec.to_dict(validate=False),
                "uses": {
                    table: {key: list(values) for key, values in where.items()} for table, where in drawing.uses.items()
                },
                "block": drawing.block,
            }
            for name, drawing in drawings.items()
        },
        "depth": material.depth,
        "config": CONFIG,
    }
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=readable
    )
    return environment.from_string(_part("page.html")).render(
        title=title,
        said=said,
        most=_BULLETS if len(said) < 3 else 1,
        first={first: drawings[first]} if first else {},
        studies=studies,
        pictures={study.label: b64encode(study.figure).decode() for study in studies if study.figure},
        damage=damage_of(subjects),
        verdicts={name: sum(c["verdict"] == name for s in subjects for c in s.claims) for name in VERDICTS},
        sections={section: {n: d for n, d in others.items() if d.section == section} for section in SECTIONS},
        runs=material.labels,
        chosen='"name": "shown"' in json.dumps(drawn["charts"]),  # whether a chart is of one run at a time
        tables={name: len(table) for name, table in tables.items()},
        cut={studies[0].label: len(data)} if data is not None and len(data) > _MOST_ROWS else {},
        version=depthscope.__version__,
        data=_script(json.dumps(readable(drawn), ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
        bundle=_bundle() if drawings else "",
        style=_part("page.css"),
        script="\n".join(_part(name) for name in ("table.js", "charts.js", "page.js")),
    )


def readable(value: Any) -> Any:
    """With what would turn the direction of writing, or is no letter, spelled: in all texts of the page and its data.

    The page's own text (`safe`) stays as it is.
    """
    if isinstance(value, str):
        return value if hasattr(value, "__html__") else visible(value)
    if isinstance(value, dict):
        return {readable(key): readable(item) for key, item in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], int | float):
        return [readable(item) for item in value]
    return value


def _script(text: str) -> str:
    """JSON that no parser of HTML takes for the end of a script, and no old JavaScript for a new line."""
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and what embeds them, 0.9 MB; with an interpreter of expressions: nothing is evaluated."""
    vl_convert: Any = require("vl_convert", "report")
    return str(vl_convert.javascript_bundle()).replace("</script", "<\\/script")


@cache
def _part(name: str) -> str:
    return (files("depthscope.report") / "template" / name).read_text(encoding="utf-8")


def _title(subjects: Sequence[Subject]) -> str:
    labels = [subject.label for subject in subjects]
    models = list(dict.fromkeys(subject.model for subject in subjects if subject.model))
    if len(models) == 1:
        depths = {subject.depth for subject in subjects if subject.depth}
        parts = [part for part in models[0].split("/") if part]  # of a long path the end
        name = "/".join(parts[-2:]) if len(parts) > 2 else models[0]
        return name + (f", {depths.pop()} blocks" if len(depths) == 1 else "")
    return ", ".join(labels) if len(labels) < 4 else f"{len(labels)} runs"
