"""Narrow terminals, streams that know few letters, readers that go away: no number is cut, and nothing aborts."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import typer

from depthscope.cli.app import app, main
from depthscope.cli.console import legible
from depthscope_lab.cli.compare_display import show_summary
from processes import ENVIRONMENT

SMALL = ("--depth", "30", "--width", "16", "--heads", "2", "--tokens", "8")
TABLES = [
    ("demo", "--depth", "4"),
    ("probe", "encoder", *SMALL, "--measures", "all", "--gradients"),
    ("fix", "encoder", *SMALL),
    ("train",),
    ("reproduce",),
]
COMMANDS = [
    ("--help",),
    ("probe", "--help"),
    ("fix", "--help"),
    ("train", "vit-digits", "--dry-run"),
    ("compare", "vit-digits", "--dry-run"),
    ("reproduce", "yu2024-rate", "--quick"),
]


def app_commands() -> list[str]:
    return sorted(typer.main.get_command(app).commands)


@pytest.fixture(scope="module")
def computed_once():
    """What `probe` and `fix` compute does not depend on the terminal: it is computed once per command."""
    with pytest.MonkeyPatch.context() as patch:
        for module, computing in (
            (import_module("depthscope.cli.probe"), "_measure"),
            (import_module("depthscope.cli.fix"), "_fix"),
        ):
            patch.setattr(module, computing, by_arguments(getattr(module, computing)))
        yield


def by_arguments(compute: Callable[..., object]) -> Callable[..., object]:
    found: dict[str, object] = {}

    def call(*arguments: object) -> object:
        key = repr(arguments)
        if key not in found:
            found[key] = compute(*arguments)
        return found[key]

    return call


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Calls the program with streams of some encoding and width; gives what it wrote."""
    monkeypatch.chdir(tmp_path)

    def call(arguments: tuple[str, ...], encoding: str, columns: int) -> str:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(columns))
            patch.setattr(sys, "argv", ["depthscope", *arguments])
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            with pytest.raises(SystemExit) as exit:
                main()
        found, errors = (stream.buffer.getvalue().decode(encoding) for stream in streams)
        assert (exit.value.code, errors) == (0, "")
        return found

    return call


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_aborts(command: tuple[str, ...], encoding: str, shown):
    assert shown(command, encoding, 60).strip()


@pytest.mark.parametrize("command", TABLES, ids=lambda command: command[0])
def test_no_number_is_cut(command: tuple[str, ...], shown, computed_once):
    for columns in (80, 60):
        by_encoding = {encoding: shown(command, encoding, columns) for encoding in ("utf-8", "cp1252", "ascii")}
        for encoding, text in by_encoding.items():
            where = (columns, encoding)
            assert "\\u" not in text, where
            assert not re.search(r"\w(…|\.\.\.)", text.replace("NAME", "")), where  # rich's sign of a cut
            code = r"^ {4}\S.*"  # to be copied: it is not wrapped
            assert max(map(len, re.sub(code, "", text, flags=re.MULTILINE).splitlines())) <= columns, where
            assert numbers(text) == numbers(by_encoding["utf-8"]), where


@pytest.mark.parametrize("command", [*app_commands(), ""])
def test_the_help_is_whole_at_80_columns(command: str, shown):
    texts = [shown((*command.split(), "--help"), "utf-8", 80)]
    if "--help-all" in texts[0]:
        texts.append(shown((*command.split(), "--help-all"), "utf-8", 80))
    for text in texts:
        assert not re.search(r"[\w(.,]…", text)  # rich's sign of a cut
        assert "9223372036854775807" not in text
        assert "<bool>" not in text


def numbers(text: str) -> list[str]:
    """Decimal numbers, as far as they stand in one piece."""
    return re.findall(r"\d\.\d+(?:e[+-]\d+)?", text)


def test_a_curve_in_ascii_rises_as_it_does_in_blocks():
    assert legible("▁▂▃▄▅▆▇█·", "ascii") == "_-~=+*%#."
    assert legible("▁▂▃▄▅▆▇█·", "cp1252") == "_-~=+*%#·"
    assert legible("▁█", "utf-8") == "▁█"
    assert legible("τ_c, Ω, λ₂ ± 1 → 2, ‖x‖² ≥ ½ …", "ascii") == "tau_c, Omega, lambda2 +- 1 -> 2, |x|^2 >= 1/2 ..."
    assert legible("Zoë, 中", "ascii") == "Zoe, \\u4e2d"


def test_a_comparison_is_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    cell = {"variant": "deescalated-leaking", "depth": 48, "lr": 0.0003, "warmup_steps": 100, "runs": 3}
    cell |= {"failed": 0, "stopped": 0}
    for name in ("loss", "test_loss", "test_accuracy"):
        cell |= {name: 0.12345, f"{name}_std": 0.0234, f"{name}_low": 0.1, f"{name}_high": 0.15}
    summary = {"cells": [cell | {"best_lr": True}, cell | {"best_lr": False}], "runs": {}}
    printed = {}
    for columns in (120, 80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        show_summary(summary, Path("out"))
        printed[columns] = capsys.readouterr().out
        assert max(map(len, printed[columns].splitlines()[:-1])) <= columns  # the last line ends in a path
        assert " ".join(printed[columns].split()).count("0.123 ± 0.023") == 6
        assert "…" not in printed[columns]
    assert printed[120].split()[:2] == ["variant", "blocks"]


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "depthscope", *arguments], stderr=subprocess.PIPE, check=False, **options
    )


@pytest.mark.parametrize(
    "settings", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "cp1252"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}]
)
def test_the_program_in_a_process_of_its_own(settings: dict[str, str]):
    result = run("demo", "--depth", "2", stdout=subprocess.PIPE, env=ENVIRONMENT | {"COLUMNS": "60"} | settings)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"de-escalated" in result.stdout
    assert b"\x1b" not in result.stdout  # no colours into a pipe


@pytest.mark.parametrize("command", [("train", "vit-digits", "--dry-run"), ("reproduce",), ("probe", "--help")])
def test_a_reader_that_has_gone_ends_the_program_without_a_word(command: tuple[str, ...]):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        result = run(*command, stdout=gone, env=ENVIRONMENT)
    assert (result.returncode, result.stderr) == (141, b"")


def test_json_is_the_same_in_every_encoding(shown, computed_once):
    command = ("probe", "encoder", *SMALL, "--json")
    found = {encoding: json.loads(shown(command, encoding, 80)) for encoding in ("ascii", "utf-8")}
    assert not json.dumps(found["utf-8"]["diagnosis"], ensure_ascii=False).isascii()  # "Blocks 3–5"
    assert found["ascii"]["diagnosis"] == found["utf-8"]["diagnosis"]
