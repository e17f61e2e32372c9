"""One HTML file that holds everything it shows: words, data, charts, and the program that draws them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd

import depthscope
from depthscope.extras import require
from depthscope.naming import visible
from depthscope.report.drawings import SECTIONS, Drawing, Material
from depthscope.report.subjects import Subject
from depthscope.report.tables import NUMBERS, RANGES, packed
from depthscope.report.words import said_of

_MOST_ROWS = 5000  # of a study's table
VERDICTS = ("reproduced", "not reproduced", "not testable here")


def drawings_of(material: Material) -> dict[str, Drawing]:
    """The charts that have something to show, by name, in their order."""
    from depthscope.report.charts import CHARTS

    drawn = {name: chart(material) for name, chart in CHARTS.items()}
    return {name: drawing for name, drawing in drawn.items() if drawing is not None}


def tables_of(material: Material, drawings: Mapping[str, Drawing]) -> dict[str, pd.DataFrame]:
    """Every table of a page once: the page's own, and those that charts bring."""
    tables: dict[str, pd.DataFrame] = {}
    if len(material.numbers):
        tables = {NUMBERS: material.numbers, RANGES: material.ranges}
    for name, drawing in drawings.items():
        for table, frame in drawing.tables.items():
            if table in tables and tables[table] is not frame:
                raise ValueError(f"the chart {name!r} brings a table {table!r}, and there is one of that name already")
            tables[table] = frame
    return tables


def damage_of(subjects: Sequence[Subject]) -> list[str]:
    """Which files of these subjects are not as they were written, each once."""
    return list(dict.fromkeys(text for subject in subjects for text in subject.damage))


def render(
    subjects: Sequence[Subject], *, title: str, links: Mapping[str, str] | None = None, notes: Sequence[str] = ()
) -> str:
    """The page as text. `links` has, by label, where a study has a page of its own; `notes` what could not be read."""
    jinja2: Any = require("jinja2", "report")
    require("altair", "report")
    require("vl_convert", "report")
    material = Material(subjects)
    drawings = drawings_of(material)
    tables = tables_of(material, drawings)
    for subject in subjects:
        if subject.data is not None and links is None:
            tables["data"] = subject.data.head(_MOST_ROWS)
    chart_of = {rule: name for name, drawing in reversed(drawings.items()) for rule in drawing.rules}
    data = {
        "runs": _runs(drawings, material),
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
        "config": _config(),
    }
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=readable
    )
    return environment.from_string(_part("page.html")).render(
        title=title,
        said=[said_of(subject, chart_of) for subject in subjects if not subject.claims],
        studies=[subject for subject in subjects if subject.claims],
        pictures={subject.label: _as_text(subject.figure) for subject in subjects if subject.figure and links is None},
        links=links or {},
        notes=notes,
        damage=damage_of(subjects),
        unchecked=list(dict.fromkeys(name for subject in subjects for name in subject.unchecked)),
        verdicts={name: sum(c["verdict"] == name for s in subjects for c in s.claims) for name in VERDICTS},
        sections={section: {n: d for n, d in drawings.items() if d.section == section} for section in SECTIONS},
        runs=data["runs"],
        tables={name: len(table) for name, table in tables.items()},
        cut={s.label: len(s.data) for s in subjects if s.data is not None and len(s.data) > _MOST_ROWS},
        version=depthscope.__version__,
        data=_script(json.dumps(readable(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
        bundle=_bundle() if drawings else "",
        style=_part("page.css"),
        script="\n".join(_part(name) for name in ("table.js", "charts.js", "page.js")),
    )


def _runs(drawings: Mapping[str, Drawing], material: Material) -> list[str]:
    """Labels that charts know, in the order of the subjects."""
    known = {
        str(run)
        for drawing in drawings.values()
        for table in drawing.tables.values()
        if "run" in table
        for run in table["run"]
    }
    return [item.label for item in material.subjects if item.label in known or item.profile is not None]


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


def _as_text(picture: bytes | None) -> str:
    return base64.b64encode(picture or b"").decode("ascii")


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and what embeds them, 0.9 MB; with an interpreter of expressions: nothing is evaluated."""
    vl_convert: Any = require("vl_convert", "report")
    return str(vl_convert.javascript_bundle()).replace("</script", "<\\/script")


def _config() -> dict[str, Any]:
    from depthscope.report.marks import CONFIG

    return CONFIG


@cache
def _part(name: str) -> str:
    return (files("depthscope.report") / "template" / name).read_text(encoding="utf-8")
