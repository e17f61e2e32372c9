"""Every row of the table in docs/exit-codes.md, as a script meets it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from depthscope.exit_codes import ExitCode, Terminated, code_of
from depthscope_lab.papers.study import judge
from depthscope_lab.training.display import Terminal
from processes import ENVIRONMENT

TABLE = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text(encoding="utf-8")
TINY = ("encoder", "--depth", "2", "--width", "16", "--heads", "2", "--tokens", "8", "--samples", "2")
DIGITS = ("train", "vit-digits", "--depth", "1", "--width", "8", "--set", "heads=1", "--set", "ffn_width=8", "--cpu")
DIGITS += ("--set", "tracker=none")


def test_the_table_has_every_code_once():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", TABLE, flags=re.MULTILINE)
    assert rows == [(str(int(code)), code.name) for code in ExitCode]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (ExitCode.DONE, ("probe", *TINY), ""),
        (ExitCode.DONE, ("probe", *TINY, "--fail-on", "token_similarity>1"), ""),
        (ExitCode.MISTAKE, ("probe", "bart-simpson"), "unknown model 'bart-simpson'"),
        (ExitCode.MISTAKE, ("probe", *TINY, "--dpeth", "3"), "No such option"),
        (ExitCode.MISTAKE, (), ""),
        (
            ExitCode.GATE,
            ("probe", *TINY, "--fail-on", "token_similarity>0"),
            "token_similarity>0 at the last block holds",
        ),
        (ExitCode.MISTAKE, (*DIGITS, "--stop-if", "token_simlarity>1"), "did you mean 'token_similarity'"),
        (ExitCode.NOT_FINITE, (*DIGITS, "--steps", "1", "--lr", "1e37"), "is not finite at step 1"),
    ],
)
def test_a_command_ends_with_its_code(code: ExitCode, arguments: tuple[str, ...], said: str, program):
    err = program(*arguments, code=code).err
    assert said in err
    assert (err == "") == (said == "")


@pytest.mark.parametrize(("strict", "code"), [((), ExitCode.DONE), (("--strict",), ExitCode.GATE)])
def test_a_gate_of_claims(strict: tuple[str, ...], code: ExitCode, program, monkeypatch: pytest.MonkeyPatch):
    claim = judge("a claim", paper="", ours="", tolerance="", holds=False)
    monkeypatch.setattr("depthscope_lab.cli.reproduce._run", lambda *_: [claim])
    monkeypatch.setattr("depthscope_lab.cli.reproduce._write_pages", lambda *_: None)  # of a study that was not run
    program("reproduce", "yu2024-fig4", "--quick", *strict, code=code)


def test_a_defect_is_not_hidden():
    code = (
        "import sys; sys.argv = ['depthscope', 'schema']\n"
        "from depthscope.cli import documents, main\n"
        "documents.commands_with_schemas = lambda: 1 / 0\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == ExitCode.DEFECT
    assert "ZeroDivisionError" in result.stderr


def test_a_reader_that_has_gone():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        command = [sys.executable, "-m", "depthscope", "schema", "probe"]
        result = subprocess.run(command, env=ENVIRONMENT, stdout=gone, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (ExitCode.READER_GONE, b"")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_a_training_that_is_told_to_stop(
    number: signal.Signals, code: ExitCode, program, monkeypatch: pytest.MonkeyPatch
):
    def stop(_self, step: int, *_a, **_k) -> None:
        if step == 1:  # a second signal would not wait
            signal.raise_signal(number)

    monkeypatch.setattr(Terminal, "logged", stop)
    err = program(*DIGITS, "--steps", "9", "--set", "log_every=1", code=code).err
    assert "the same command with --resume goes on" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("interrupt", "code"), [(KeyboardInterrupt, ExitCode.INTERRUPTED), (Terminated, ExitCode.TERMINATED)]
)
def test_a_comparison_tells_ctrl_c_from_sigterm(
    interrupt: type[KeyboardInterrupt], code: ExitCode, program, monkeypatch: pytest.MonkeyPatch
):
    def stop(*_a, **_k):
        raise interrupt

    monkeypatch.setattr("depthscope_lab.cli.compare.run_cells", stop)
    assert "the same command goes on" in program("compare", "vit-digits", "--depths", "1", "--cpu", code=code).err


def test_codes_of_signals_are_those_of_a_shell():
    assert code_of(KeyboardInterrupt()) == ExitCode.INTERRUPTED == 128 + signal.SIGINT
    assert code_of(Terminated()) == ExitCode.TERMINATED == 128 + signal.SIGTERM
    assert ExitCode.READER_GONE == 128 + signal.SIGPIPE
