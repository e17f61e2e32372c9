"""Every chart: it is drawn where its data are, validates, and says how to read it."""

import dataclasses
import re

import altair as alt
import pandas as pd
import pytest

from depthscope.diagnosis.findings import FINDINGS
from depthscope.diagnosis.rules import VERDICTS
from depthscope.report import CHARTS, Drawing, Material, Subject, write
from depthscope.report.page import drawings_of, tables_of
from depthscope.report.subjects import subjects_of
from depthscope.report.tables import chosen
from profiles_made_up import made_up
from report_samples import Measured

# Sentences that no rule of the diagnosis says.
OWN_RULES = {"verdict", "paths", "spectra", "depth", "comparison", "alike"}


@pytest.fixture(scope="module")
def drawings(everything: Material) -> dict[str, Drawing]:
    return drawings_of(everything)


def test_all_are_drawn_where_all_was_measured(drawings: dict[str, Drawing]):
    assert list(drawings) == list(CHARTS)


@pytest.mark.parametrize("name", list(CHARTS))
def test_each_is_valid_and_says_how_to_read_it(name: str, drawings: dict[str, Drawing], everything: Material):
    drawing = drawings[name]
    spec = drawing.spec.to_dict(validate=True)
    assert re.fullmatch(r"[A-Z].*", drawing.title)
    assert drawing.caption.endswith(".")
    assert len(drawing.caption) > 80
    tables = tables_of(everything, drawings)
    named = set(re.findall(r"'data': \{'name': '(\w+)'\}", str(spec)))
    assert named == set(drawing.uses)
    for table, where in drawing.uses.items():
        assert len(chosen(tables[table], where)), f"{name} shows no row of {table}"
    assert any(param["name"] == "hovered" for param in spec["params"])


def test_what_leads_to_a_chart_is_a_rule(drawings: dict[str, Drawing]):
    known = set(FINDINGS) | OWN_RULES
    known |= {name for rule in VERDICTS for name in (rule.name, rule.verdict)}
    assert {rule for drawing in drawings.values() for rule in drawing.rules} <= known


def test_a_chart_without_data_is_not_drawn():
    profile = made_up({"token_similarity": [0.1, 0.5, 0.9, 0.95]})
    assert list(drawings_of(Material(subjects_of([profile])))) == ["similarity"]
    assert drawings_of(Material([Subject("nothing")])) == {}


def test_the_steps_add_up_to_the_whole(measured: Measured):
    """What all steps have added by the last block is what the log-odds have grown by."""
    steps = CHARTS["steps"](Material(subjects_of([measured.profile])))
    assert steps is not None
    table = steps.tables["steps"]
    from depthscope.diagnosis.facts import Facts

    facts = Facts(measured.profile)
    grown = facts.log_odds[facts.last] - facts.log_odds[facts.first]
    assert table.loc[table["block"] == facts.last, "total"].sum() == pytest.approx(grown, abs=1e-9)


def test_many_eigenvalues_are_thinned_evenly(measured: Measured):
    many = pd.concat([measured.spectra.frame.assign(block=block) for block in range(1, 101)] * 5, ignore_index=True)
    drawn = CHARTS["eigenvalues"](Material(subjects_of([dataclasses.replace(measured.spectra, frame=many)])))
    assert drawn is not None
    table = drawn.tables["eigenvalues"]
    assert len(table) <= 4000
    assert {1, 100} <= set(table["block"])


def test_a_chart_of_another_package_is_one_function(measured: Measured, tmp_path):
    def how_many_rows(material: Material) -> Drawing | None:
        """Rows by block."""
        table = material.numbers.groupby("block").size().rename("rows").reset_index()
        spec = alt.Chart(alt.NamedData("row_counts")).mark_bar().encode(x="block:O", y="rows:Q")
        caption = "How many numbers each block has; there is nothing to learn from it."
        return Drawing("Rows of mine", caption, spec, {"row_counts": {}}, tables={"row_counts": table}, block=None)

    CHARTS.register(how_many_rows)
    try:
        page = write(tmp_path / "page.html", measured.profile)
    finally:
        CHARTS.unregister("how_many_rows")
    assert "Rows of mine" in page.read_text(encoding="utf-8")


def test_two_charts_cannot_bring_two_tables_of_one_name(measured: Measured):
    def mine(material: Material) -> Drawing | None:
        return dataclasses.replace(first, tables={"steps": first.tables["steps"].head(1)})

    material = Material(subjects_of([measured.profile]))
    first = CHARTS["steps"](material)
    assert first is not None
    with pytest.raises(ValueError, match="'mine' brings a table 'steps'"):
        tables_of(material, {"steps": first, "mine": mine(material)})


def test_the_colours_of_a_low_heat_map_are_not_cut_off(drawings: dict[str, Drawing]):
    spec = drawings["heads"].spec.to_dict()
    for layer in spec["layer"]:
        if "color" in layer["encoding"]:
            assert layer["encoding"]["color"]["legend"]["gradientLength"] < spec["height"]
