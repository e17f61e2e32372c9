"""`depthscope report`, and the page that `--out` of every command adds."""

import json
import sys
from pathlib import Path

import pytest

from depthscope.sealed import read_commands

BERT = ("bert", "--depth", "2", "--width", "32", "--heads", "4", "--tokens", "8", "--samples", "2")
VIT = (
    "vit-digits",
    "--depth",
    "2",
    "--width",
    "16",
    "--steps",
    "3",
    "--cpu",
    "--set",
    "tracker=none",
    "--set",
    "watch_every=1",
)


@pytest.fixture(autouse=True)
def _short(short_manual: None) -> None:
    pass


def charts_in(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    return {part.split('"')[0] for part in text.split('data-chart="')[1:]}


def test_probe_writes_the_page_and_how_it_was_made(program, tmp_path: Path):
    out = tmp_path / "a b"
    program("probe", *BERT, "--gradients", "--out", str(out))
    assert {"similarity", "steps", "gradients"} <= charts_in(out / "report.html")
    kept = json.loads((out / "commands.json").read_text())["probe"]
    assert kept["typed"] == f"depthscope probe {' '.join(BERT)} --gradients --out '{out}'"
    assert kept["in Python"].startswith("depthscope.probe(model, inputs, ")
    assert "gradients=True" in kept["in Python"]
    saved = json.loads((out / "diagnosis.json").read_text())
    assert f"{saved['verdict']}</strong>" in (out / "report.html").read_text(encoding="utf-8")


def test_several_commands_share_a_page(program, tmp_path: Path):
    for command in (("paths", *BERT), ("spectra", *BERT[:7])):
        program(*command, "--out", str(tmp_path))
    assert {"path_lengths", "eigenvalues"} == charts_in(tmp_path / "report.html")
    assert list(read_commands(tmp_path)) == ["paths", "spectra"]


def test_fix_shows_before_and_after(program, tmp_path: Path):
    program("fix", *BERT, "--tau", "0.5", "--out", str(tmp_path))
    assert "similarity" in charts_in(tmp_path / "report.html")
    kept = json.loads((tmp_path / "commands.json").read_text())["fix"]["in Python"]
    assert kept.startswith("depthscope.fix(model, inputs, tau=0.5")


def test_train_and_compare_show_their_curves(program, trained_here, tmp_path: Path):
    program("train", *VIT, "--out", str(tmp_path / "run"))
    assert charts_in(tmp_path / "run" / "report.html") == {"training", "watched"}
    sizes = ("--depths", "2", "--seeds", "1", *VIT[3:])
    program("compare", "vit-digits", "--variants", "post", *sizes, "--out", str(tmp_path / "both"))
    assert charts_in(tmp_path / "both" / "report.html") == {"training"}


def test_reproduce_writes_a_page_of_all_studies(program, tmp_path: Path):
    out = ("--out", str(tmp_path))
    found = json.loads(program("reproduce", "dong2021-lengths", "--quick", "--json", *out).out)
    claims = found["studies"]["dong2021-lengths"]["claims"]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("<tr data-verdict=") == len(claims)
    assert "data:image/png;base64," in text
    assert "depthscope reproduce dong2021-lengths" in text
    before = (tmp_path / "report.html").read_bytes()
    program("report", str(tmp_path))
    assert (tmp_path / "report.html").read_bytes() == before


def test_report_sets_two_folders_side_by_side(program, tmp_path: Path):
    for name, seed in (("one", "0"), ("two", "1")):
        program("probe", *BERT, "--seed", seed, "--out", str(tmp_path / name))
    places = (str(tmp_path / "one"), str(tmp_path / "two"))
    program("report", *places, "--out", str(tmp_path / "page"), "--title", "a <b>")
    text = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "<title>a &lt;b&gt;</title>" in text
    assert "<h2>two</h2>" in text


def test_a_mistake_is_one_line(program, tmp_path: Path):
    assert "nothing of depthscope to report" in program("report", str(tmp_path), code=2).err
    assert "expected a folder" in program("report", str(tmp_path / "nowhere"), code=2).err


def test_without_the_extra_all_else_is_written(program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    said = program("probe", *BERT, "--out", str(tmp_path))
    assert "no report.html: this needs jinja2: pip install 'depthscope[report]'" in said.err
    assert said.out.rstrip().endswith(f"wrote {tmp_path}")
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "profile.json").exists()
    assert (tmp_path / "commands.json").exists()
    assert "pip install" in program("report", str(tmp_path), code=2).err


def test_what_is_damaged_is_named_and_costs_nothing_else(program, tmp_path: Path):
    (tmp_path / "paths.json").write_text("{}")
    said = program("spectra", *BERT[:7], "--out", str(tmp_path))
    assert "depthscope: not shown:" in said.err
    assert "holds no path shares" in said.err
    assert "holds no path shares" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "spectra.json").exists()
