"""What the tests of the command line share."""

from pydoc_data.topics import topics

import pytest


@pytest.fixture
def short_manual(monkeypatch: pytest.MonkeyPatch):
    """A few pages of Python's manual as the default text: its tokenizer is trained in no time."""
    pages = ("with", "try", "import", "class")
    monkeypatch.setattr("pydoc_data.topics.topics", {name: topics[name] for name in pages})
