"""One thread per process, since the tests' tensors are tiny and threads only wait for each other; Ctrl-C that works;
bfloat16 on processors that announce what they do not have; a command line that is built once. It holds for tests/ and
lab/tests/.
"""

import os
import signal
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import typer.main

from depthscope.half_precision import require_half_precision

# What takes a browser, a wheel, a site, processes of its own or thousands of odd inputs: `make test-all` runs it.
LONG = (
    "tests/hostile",
    "tests/report/test_browser.py",
    "tests/test_install.py",
    "tests/test_lock.py",
    "tests/test_plug_in.py",
    "tests/test_site.py",
    "tests/cli/test_interrupted.py",
    "tests/cli/test_terminals.py",
    "lab/tests/training/test_processes.py",
)
ROOT = Path(__file__).parent

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start; this one has read it already


def pytest_configure(config: pytest.Config) -> None:
    """Tried once, before the first test; xdist's processes inherit the environment."""
    if hasattr(config, "workerinput"):
        return
    try:
        require_half_precision()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is long by where it stands."""
    for item in items:
        if any(item.path.is_relative_to(ROOT / place) for place in LONG):
            item.add_marker("long")


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A shell makes what runs in its background ignore SIGINT; the tests send it to themselves and to others."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def commands_built_once():
    """At every call of the program typer builds all commands anew, which takes longer than most calls themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Calls the program; gives what it printed, after checking its exit code."""
    from depthscope.cli.app import main

    def call(*arguments: str, code: int = 0):
        monkeypatch.setattr(sys, "argv", ["depthscope", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        printed = capsys.readouterr()
        assert exit.value.code == code, printed.err
        return printed

    return call


@pytest.fixture
def trained_here(monkeypatch: pytest.MonkeyPatch):
    """`compare` starts no processes."""
    from depthscope_lab.cli import compare
    from processes import train_here

    monkeypatch.setattr(compare, "run_cells", compare.run_cells)  # and is put back
    train_here()
