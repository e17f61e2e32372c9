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
from depthscope.probing.finish import Seen
from depthscope.probing.measurement import Measurement
from depthscope.probing.readings import Reading


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


class WindowedMeasurement(Measurement):
    """A measurement of the windows of every sequence, with a number for each sequence in the end."""

    def __init__(self, window: int, *args: Any, **options: Any):
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"expected window= a number of tokens, 1 or more, got {window!r}")
        self.window = window
        self._windows: dict[int, int] = {}  # values in a reading → windows of a sequence
        self._first_reading = 0  # of the running pass
        super().__init__(*args, **options)

    def see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        windows, mask = self._cut(tokens, super()._without_excluded(tokens, visit.real))
        super().see_tokens(replace(visit, real=mask), station, windows, source)

    def see_final_norm(self, visit: Visit, tokens: Tensor, source: Tensor) -> None:
        windows, mask = self._cut(tokens, super()._without_excluded(tokens, visit.real))
        super().see_final_norm(replace(visit, real=mask), windows, source)

    def end(self, *, can_look_again: bool = False) -> bool:
        if super().end(can_look_again=can_look_again):
            return True
        self.readings[self._first_reading :] = [
            reading if reading.first_sample < 0 else self._of_sequences(reading)
            for reading in self.readings[self._first_reading :]
        ]
        self._first_reading = len(self.readings)
        self._windows.clear()
        return False

    def _of_sequences(self, reading: Reading) -> Reading:
        """The means over the windows; a sequence of which a window is not finite has none from there on."""
        values = means_of_runs(reading.values, self._windows[len(reading.values)])
        for number in range(len(values)):
            block, station = self.not_finite.get(reading.first_sample + number, (math.inf, ""))
            if reading.block > block or (reading.block, reading.station) == (block, station):
                values[number] = math.nan
        return reading._replace(values=values)

    def _sequence(self, row: int, rows: int) -> int:
        return row // self._windows[rows]

    def _cut(self, tokens: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        windows, mask = cut(tokens, real, self.window)
        each = len(windows) // len(tokens)
        if self._windows.setdefault(len(windows), each) != each:
            raise ValueError(f"the parts of this model have batches that window={self.window} cannot tell apart: part=")
        return windows, mask

    def _without_excluded(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """Positions were excluded before the sequence was cut."""
        return mask

    def _name_outliers(self, block: int, part: str, seen: Seen, ratios: Tensor, places: Tensor | None) -> None:
        """With the place of each in its whole sequence, of `each` windows, and among the real tokens there."""
        each, window = self._windows[seen.batch], ratios.shape[-1]
        start = torch.arange(len(ratios)) % each * window
        if places is None:
            places = torch.arange(window).expand(ratios.shape)
        else:  # each window has counted from its own beginning
            counted = (places[:, -1] + 1).reshape(-1, each)
            start = (counted.cumsum(dim=-1) - counted).flatten()
        named = len(self.sinks)
        super()._name_outliers(block, part, seen, ratios, places + start[:, None])
        for number, sink in enumerate(self.sinks[named:], named):
            sample = self.first_sample + (sink.sample - self.first_sample) // each
            self.sinks[number] = sink._replace(sample=sample)


def means_of_runs(values: list[float], each: int) -> list[float]:
    """The mean of each run of so many values, without those that are nan."""
    runs = [[v for v in values[i : i + each] if not math.isnan(v)] for i in range(0, len(values), each)]
    return [math.fsum(run) / len(run) if run else math.nan for run in runs]
