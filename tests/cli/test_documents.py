"""Every command's `--json` is what its schema says, and every schema can fail."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator, ValidationError

from depthscope.cli.app import app
from depthscope.cli.documents import SCHEMA_VERSION, commands_with_schemas, document, schema_of
from json_documents import checked, strict

DOCS = Path(__file__).parents[2] / "docs" / "json.md"
TINY = ("--depth", "2", "--width", "16", "--heads", "2", "--tokens", "8", "--samples", "2")
DIGITS = ("vit-digits", "--width", "8", "--set", "heads=1", "--set", "ffn_width=8", "--steps", "2", "--cpu")
QUIET = ("--set", "tracker=none", "--set", "log_every=1")
COMMANDS = [
    ("probe", "encoder", *TINY, "--measures", "all", "--stations", "all", "--gradients"),
    ("probe", "encoder", *TINY, "--measures", "token_similarity", "--without", "skips"),
    ("probe", "t5", *TINY),
    ("fix", "encoder", "--depth", "20", *TINY[2:]),
    ("fix", "encoder", "--depth", "2", *TINY[2:]),
    ("fix", "gpt2", *TINY, "--tau", "0.5"),
    ("paths", "encoder", *TINY),
    ("depth", "encoder", *TINY),
    ("depth", "gpt2", *TINY),
    ("depth", "t5", *TINY, "--quick", "--part", "decoder"),
    ("spectra", "encoder", *TINY[:6]),
    ("spectra", "gpt2", *TINY[:6], "--product", "query-key", "--heads-only"),
    ("reproduce",),
    ("reproduce", "yu2024-fig4", "--quick"),
    ("train",),
    ("train", *DIGITS, "--dry-run"),
    ("train", "txl-manual", "--dry-run"),
    ("train", *DIGITS, "--depth", "1", *QUIET),
    ("compare", *DIGITS, "--dry-run"),
    ("demo", "--depth", "3"),
]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short_manual):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_what_is_printed_is_what_the_schema_says(command: tuple[str, ...], program):
    checked(command[0], program(*command, "--json").out)


def test_every_command_with_results_has_a_schema():
    group = typer.main.get_command(app)
    with_json = {
        name
        for name, command in group.commands.items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert with_json == set(commands_with_schemas()) == {command[0] for command in COMMANDS}
    assert group.commands.keys() - with_json == {"schema", "report", "agents", "tour"}  # which write pages and schemas


def without_its_seal(path: Path) -> dict[str, Any]:
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert {"kind", "format", "files", "sha256"} <= saved.keys()
    return {name: value for name, value in saved.items() if name not in ("kind", "format", "files", "sha256")}


def test_what_is_saved_is_what_is_printed(program, trained_here, tmp_path: Path):
    found = checked("fix", program("fix", "encoder", "--depth", "20", *TINY[2:], "--json", "--out", "out").out)
    assert without_its_seal(tmp_path / "out" / "fix.json") == found
    arguments = (*DIGITS, "--depths", "1", "--seeds", "1", "--variants", "post", "--out", "runs", "--json")
    found = checked("compare", program("compare", *arguments).out)
    assert without_its_seal(tmp_path / "runs" / "summary.json") == found


def test_a_training_that_cannot_go_on_says_so_in_json(program):
    printed = program("train", *DIGITS, "--depth", "1", *QUIET, "--lr", "1e37", "--json", code=4)
    found = checked("train", printed.out)
    assert "is not finite" in found["failed"]
    assert printed.err.splitlines()[-1] == f"depthscope: {found['failed']}"


@pytest.mark.parametrize("command", commands_with_schemas())
def test_a_schema_is_one_and_needs_no_other_file(command: str, program):
    printed = json.loads(program("schema", command).out)
    assert printed == schema_of(command)
    Draft202012Validator.check_schema(printed)
    for name in re.findall(r'"\$ref": "(.*?)"', json.dumps(printed)):
        assert name.removeprefix("#/$defs/") in printed["$defs"]
    for name in printed["$defs"]:
        assert f'"#/$defs/{name}"' in json.dumps(printed), f"{name} is not used"


def test_the_schemas_are_listed_and_an_unknown_one_is_refused(program):
    assert program("schema").out.split() == commands_with_schemas()
    assert "did you mean 'probe'?" in program("schema", "prob", code=2).err


def test_the_page_describes_every_command_and_the_version():
    page = DOCS.read_text(encoding="utf-8")
    for command in commands_with_schemas():
        assert f"| `{command}` |" in page
    assert f"`schema_version` is {SCHEMA_VERSION}" in page


@pytest.fixture
def probed(program) -> dict:
    return checked("probe", program("probe", "encoder", *TINY, "--json").out)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("diagnosis"),
        lambda found: found.update(schema_version=3),
        lambda found: found.update(command="fix"),
        lambda found: found.update(blocks="2"),
        lambda found: found["diagnosis"].update(verdict="fine"),
        lambda found: found["profile"].update(token_similarity=[0.1, "0.2"]),
        lambda found: found["diagnosis"].update(findings=[{"sentence": "of no rule", "numbers": {}}]),
        lambda found: found.update(not_described=1),
    ],
)
def test_a_document_that_is_not_as_described_is_refused(probed: dict, change):
    changed = copy.deepcopy(probed)
    change(changed)
    with pytest.raises(ValidationError):
        Draft202012Validator(strict(schema_of("probe"))).validate(changed)


def test_readers_of_this_version_accept_fields_that_come_later(probed: dict):
    probed["new"] = probed["diagnosis"]["new"] = 1
    Draft202012Validator(schema_of("probe")).validate(probed)


def test_what_is_not_finite_is_null():
    found = document("demo", {"curves": {"a": [math.nan, math.inf, -math.inf, 1.0], "b": (math.nan,)}})
    assert found["curves"] == {"a": [None, None, None, 1.0], "b": [None]}
