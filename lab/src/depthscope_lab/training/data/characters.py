"""Python's manual letter by letter: a text that every Python has, for a language model of a hundred symbols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthscope.text import read_text

UNKNOWN = 0  # the number of letters that the training part does not have
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Characters:
    """Three streams of numbers (int64), and the letters that they stand for; number 0 is any other letter."""

    name: str
    letters: str
    train: Tensor
    valid: Tensor
    test: Tensor
    fingerprint: str

    @property
    def symbols(self) -> int:
        """How many different numbers there are."""
        return len(self.letters) + 1

    def describe(self) -> dict[str, Any]:
        """As JSON: a run is continued only on the same."""
        counts = {f"{split} characters": len(getattr(self, split)) for split in SPLITS}
        return {"name": self.name, "symbols": self.symbols, **counts, "fingerprint": self.fingerprint}


def load_characters() -> Characters:
    """The manual from its beginning to its end: 8/10 to train, then 1/10 each to validate and to test."""
    text = read_text(None)
    tenth = len(text.content) // 10
    parts = {
        "train": text.content[: -2 * tenth],
        "valid": text.content[-2 * tenth : -tenth],
        "test": text.content[-tenth:],
    }
    letters = "".join(sorted(set(parts["train"])))
    numbers = {letter: number for number, letter in enumerate(letters, start=1)}
    streams = {
        split: torch.tensor([numbers.get(letter, UNKNOWN) for letter in part], dtype=torch.int64)
        for split, part in parts.items()
    }
    return Characters("Python's manual, in letters", letters, **streams, fingerprint=text.sha256[:16])
