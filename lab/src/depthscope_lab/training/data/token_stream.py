"""A text as one long line of token numbers, and the rows in which Transformer-XL reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

END = "<eos>"
UNKNOWN = "<unk>"


def count_words(lines: Iterable[str]) -> Counter[str]:
    """How often every word occurs, and `<eos>`, once at the end of each line."""
    counted: Counter[str] = Counter()
    for line in lines:
        counted.update(line.split())
        counted[END] += 1
    return counted


@dataclass(frozen=True)
class Vocabulary:
    """Words by number, the most frequent first."""

    words: tuple[str, ...]

    @staticmethod
    def of(counted: Counter[str]) -> Vocabulary:
        """As Transformer-XL's authors build it: `<eos>`, then all words of the training text by how often they
        occur, those that occur equally often in the order of their first occurrence; case is kept.
        """
        return Vocabulary((END, *(word for word, _ in counted.most_common() if word != END)))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, lines: Iterable[str], source: str) -> Iterator[list[int]]:
        """The numbers of each line's words and of `<eos>` at its end; a blank line is an `<eos>` alone.

        A word that is not in the vocabulary is `<unk>`, if that is; else it is an error.
        """
        numbers, end, unknown = self.numbers, self.numbers[END], self.numbers.get(UNKNOWN)
        for place, line in enumerate(lines, start=1):
            encoded = [numbers.get(word, unknown) for word in line.split()]
            if None in encoded:
                word = line.split()[encoded.index(None)]
                raise ValueError(
                    f"expected words of the training text in {source}, got {word!r} in line {place}; "
                    f"write {UNKNOWN} for unknown words, there and in the training text"
                )
            yield [*encoded, end]  # type: ignore[list-item]


class TokenRows:
    """Transformer-XL's batch layout: the stream is cut into rows of equal length, and every row is read on.

    Row r is tokens[r·s : (r + 1)·s] with s = len(tokens) // rows; what is left over is not used. Segment k
    of every row continues segment k − 1 of the same row, so that a memory fits. `tokens` may be
    memory-mapped: only the segments that are asked for are read.
    """

    def __init__(self, tokens: np.ndarray, rows: int):
        self.length = len(tokens) // rows if rows > 0 else 0
        if self.length < 2:
            raise ValueError(f"expected at least 2 tokens per row, got {len(tokens)} tokens for {rows} rows")
        self.tokens = tokens[: rows * self.length].reshape(rows, self.length)

    def segments(self, n: int) -> int:
        """How many segments of n tokens a row has, the last one perhaps shorter."""
        if n < 1:
            raise ValueError(f"expected segments of at least 1 token, got {n}")
        return -((1 - self.length) // n)

    def segment(self, number: int, n: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the words after them, of segment 0, 1, …: each (rows, n), int64."""
        if not 0 <= number < self.segments(n):
            raise ValueError(f"expected a segment from 0 to {self.segments(n) - 1}, got {number}")
        both = torch.from_numpy(self.tokens[rows, number * n : (number + 1) * n + 1].astype(np.int64))
        return both[:, :-1], both[:, 1:]
