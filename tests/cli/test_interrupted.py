"""Ctrl-C ends the program in one line and code 130, also while it is being imported and while it exits.

In the middle of several pieces of work Ctrl-C and SIGTERM cost no piece that is finished: it is shown, and saved.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from depthscope import DepthUse
from depthscope.interruption import Interrupted, attempt, is_signal, notes, stoppable, was_stopped

PROGRAM = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {importing!r}:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000): pass  # Python looks for signals here

sys.meta_path.insert(0, Interrupt())
from depthscope.cli import main
sys.argv = ["depthscope", "demo", "--depth", "2"]
main()
"""


@pytest.mark.parametrize("importing", ["typer", "torch"])
def test_while_the_program_or_a_command_is_imported(importing: str):
    code = PROGRAM.format(importing=importing)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "depthscope: interrupted\n")


# --- several pieces of work ---------------------------------------------------------------------------------

SMALL = ("--depth", "3", "--width", "16", "--heads", "2", "--tokens", "8", "--samples", "2")
IN_THE_MIDDLE = """
import os, signal, sys, time
from depthscope.cli import main
from depthscope.usage import driver

def skip(*_, **__):
    os.kill(os.getpid(), {number})
    time.sleep(60)

driver.without_each = skip
sys.argv = ["depthscope", "depth", "encoder", *{small!r}, "--json", "--out", {out!r}]
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_among_skipped_blocks_leaves_the_first_pass(number: signal.Signals, code: int, tmp_path: Path):
    program = IN_THE_MIDDLE.format(number=int(number), small=SMALL, out=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    lacks = "interrupted: without what skipping each block changes"
    assert lacks in found["metadata"]["notes"]
    assert len(found["table"]) == 3  # of the one pass that was finished
    assert DepthUse.load(tmp_path / "out").depth == 3
    said = "depthscope: interrupted, without what skipping each block changes; what was finished is there"
    assert done.stderr.splitlines()[-1] == said


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "broken", "lacks", "there"),
    [
        (("depth", "encoder"), "usage.driver.without_each", "what skipping each block changes", "table"),
        (("fix", "encoder", "--tau", "1"), "diagnosis.fixing.recommend", "the remedy", "before"),
    ],
)
def test_what_was_finished_is_shown(
    command: tuple[str, ...],
    broken: str,
    lacks: str,
    there: str,
    program,
    short_manual,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(f"depthscope.{broken}", interrupt)
    printed = program(*command, *SMALL, "--json", code=130)
    found = json.loads(printed.out)
    assert found[there]
    assert f"interrupted: without {lacks}" in found.get(
        "notes", found["metadata"]["notes"] if there != "before" else []
    )
    assert printed.err.splitlines()[-1] == f"depthscope: interrupted, without {lacks}; what was finished is there"
    assert program(*command, *SMALL, code=130).out


def test_spectra_of_the_blocks_that_were_read(program, monkeypatch: pytest.MonkeyPatch):
    from depthscope.value_spectra import weights as weight_spectra

    read = weight_spectra._of_block
    monkeypatch.setattr(weight_spectra, "_of_block", lambda *a: interrupt() if a[1] == 3 else read(*a))
    printed = program("spectra", "encoder", *SMALL[:6], "--json", code=130)
    assert {record["block"] for record in json.loads(printed.out)["spectra"]} == {1, 2}
    assert "without the eigenvalues of blocks from 3 on" in printed.err


def test_a_batch_of_paths_that_was_not_finished(program, monkeypatch: pytest.MonkeyPatch):
    from depthscope.attention_paths.driver import Following

    follow, seen = Following.run, []

    def run(self, batch):
        seen.append(batch)
        follow(self, batch)
        if len(seen) == 2:
            interrupt()

    monkeypatch.setattr(Following, "run", run)
    printed = program("paths", "encoder", *SMALL, "--batch", "1", "--json", code=130)
    found = json.loads(printed.out)
    assert found["metadata"]["samples"] == 1
    assert "interrupted: without batches from 2 on" in found["metadata"]["notes"]


def test_before_anything_is_finished_there_is_one_line(program, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("depthscope.probing.probe", interrupt)
    printed = program("probe", "encoder", *SMALL, code=130)
    assert (printed.out, printed.err) == ("", "depthscope: interrupted\n")


def test_a_gate_that_is_closed_does_not_hide_the_signal(program, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("depthscope.diagnosis.fixing.best", interrupt)
    deep = ("--depth", "24", *SMALL[2:])  # collapses, so that a remedy is measured
    printed = program("probe", "encoder", *deep, "--fail-on", "token_similarity>0", code=130)
    assert "token_similarity>0 at the last block holds" in printed.err


def test_in_python_a_signal_is_raised_and_handlers_are_put_back():
    with pytest.raises(KeyboardInterrupt):
        attempt("a piece", interrupt)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stoppable() as work:
        assert attempt("first", lambda: 1) == 1
        assert attempt("second", lambda: signal.raise_signal(signal.SIGINT)) is None
        assert attempt("third", lambda: 3) is None
        assert was_stopped()
        assert notes() == ["interrupted: without second, third"]
        assert is_signal(work.stopped)
        assert not is_signal(KeyboardInterrupt())  # of some code's own
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert is_signal(KeyboardInterrupt())
    assert not was_stopped()
