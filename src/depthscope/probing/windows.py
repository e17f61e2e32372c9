"""Sequences measured in windows of some tokens: are neighbours more alike than tokens that stand far apart?

The model still reads the whole sequence. Only what is measured is cut: tokens 0 … w − 1, w … 2w − 1, and so on, each
window by itself, the last one with what is left. A sequence's number is the mean over its windows that have one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.hooks import Visit
from depthscope.measures import MEASURES
from depthscope.probing.reduction import Reduction, Row, SinkRow
from depthscope.probing.trail import Seen


def cut(tokens: Tensor, real: Tensor | None, window: int) -> tuple[Tensor, Tensor | None]:
    """(batch, n, d) → (batch · windows, w, d), and the mask likewise: what fills up the last window is not real.

    A window longer than the sequence is the sequence.
    """
    batch, n, width = tokens.shape
    window = min(window, n)
    missing = -n % window
    if missing and real is None:
        real = torch.ones(batch, n, dtype=torch.bool, device=tokens.device)
    windows = F.pad(tokens, (0, 0, 0, missing)).reshape(-1, window, width)
    return windows, None if real is None else F.pad(real.to(tokens.device), (0, missing)).reshape(-1, window)


def without_attention(names: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """The measures that a window can have, and a note on the others: attention crosses the windows."""
    kept = tuple(name for name in names if MEASURES[name].of != "attention")
    left_out = [name for name in names if name not in kept]
    if not kept:
        raise ValueError(f"{', '.join(left_out)}: attention crosses the windows; leave window= out, or name others")
    return kept, [f"not measured in windows, which attention crosses: {', '.join(left_out)}"] if left_out else []


class WindowedReduction(Reduction):
    """A reduction of the windows of every sequence, with a number for each sequence in the end."""

    def __init__(self, window: int, *args: Any, **options: Any):
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"expected window= a number of tokens, 1 or more, got {window!r}")
        self.window = window
        self._windows: dict[int, int] = {}  # values in a row → windows of a sequence
        self._first_row = 0  # of the running pass
        super().__init__(*args, **options)

    def see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        windows, mask = self._cut(tokens, super()._real(tokens, visit.real))
        super().see_tokens(replace(visit, real=mask), station, windows, source)

    def see_final_norm(self, visit: Visit, tokens: Tensor, source: Tensor) -> None:
        windows, mask = self._cut(tokens, super()._real(tokens, visit.real))
        super().see_final_norm(replace(visit, real=mask), windows, source)

    def end(self) -> None:
        super().end()
        self.rows[self._first_row :] = [
            row if row.first_sample < 0 else self._of_sequences(row) for row in self.rows[self._first_row :]
        ]
        self._first_row = len(self.rows)
        self._windows.clear()

    def _of_sequences(self, row: Row) -> Row:
        """The means over the windows; a sequence of which a window is not finite has none from there on."""
        values = _means(row.values, self._windows[len(row.values)])
        for number in range(len(values)):
            block, station = self.not_finite.get(row.first_sample + number, (math.inf, ""))
            if row.block > block or (row.block, row.station) == (block, station):
                values[number] = math.nan
        return row._replace(values=values)

    def _sequence(self, row: int, rows: int) -> int:
        return row // self._windows[rows]

    def _cut(self, tokens: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        windows, mask = cut(tokens, real, self.window)
        each = len(windows) // len(tokens)
        if self._windows.setdefault(len(windows), each) != each:
            raise ValueError(f"the parts of this model have batches that window={self.window} cannot tell apart: part=")
        return windows, mask

    def _real(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """Positions were excluded before the sequence was cut."""
        return mask

    def _name_outliers(self, block: int, part: str, seen: Seen, real: Tensor | None) -> None:
        named = len(self.sinks)
        super()._name_outliers(block, part, seen, real)
        each = self._windows[seen.kind.batch]
        self.sinks[named:] = [self._in_sequence(sink, each, real) for sink in self.sinks[named:]]

    def _in_sequence(self, sink: SinkRow, each: int, real: Tensor | None) -> SinkRow:
        """The outlier of a window with its sequence, of `each` windows, and its place among the real tokens there."""
        sample, window = divmod(sink.sample - self.first_sample, each)
        start = window * self.window
        before = start if real is None else int(real.reshape(-1, each * real.shape[-1])[sample, :start].sum())
        return sink._replace(sample=self.first_sample + sample, token=before + sink.token)


def _means(values: list[float], each: int) -> list[float]:
    """The mean of each run of so many values, without those that are nan."""
    runs = [[v for v in values[i : i + each] if not math.isnan(v)] for i in range(0, len(values), each)]
    return [math.fsum(run) / len(run) if run else math.nan for run in runs]
