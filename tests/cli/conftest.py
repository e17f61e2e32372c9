"""What the tests of the command line share."""

import sys
from pydoc_data.topics import topics

import pytest

from depthscope.cli.app import main
from depthscope_lab.cli import compare
from processes import train_here


@pytest.fixture
def short_manual(monkeypatch: pytest.MonkeyPatch):
    """A few pages of Python's manual as the default text: its tokenizer is trained in no time."""
    pages = ("with", "try", "import", "class")
    monkeypatch.setattr("pydoc_data.topics.topics", {name: topics[name] for name in pages})


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Calls the program; gives what it printed, after checking its exit code."""

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
    monkeypatch.setattr(compare, "run_cells", compare.run_cells)  # and is put back
    train_here()
