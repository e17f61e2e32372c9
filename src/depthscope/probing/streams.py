"""A trunk of several streams (hyper-connections), measured stream by stream.

A stream of a sequence is measured as a sequence of its own, and the number of a sequence is the mean over its streams.
What a branch reads has no streams. Beside it, how alike the streams of one token are: copies of one another are 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.hooks import Head, Visit
from depthscope.measures import Bounded
from depthscope.probing.finish import Seen
from depthscope.probing.measurement import Measurement
from depthscope.probing.readings import Reading, Waiting
from depthscope.probing.windows import means_of_runs

ALIKE = "stream_similarity"
BY_STREAM = ("token_similarity", "direction_similarity", "frobenius_norm")  # in the metadata, for each stream


def stream_similarity(tokens: Tensor, real: Tensor | None) -> Tensor:
    """The cosine between two streams of a token, mean over pairs and over real tokens: (batch, n, s, d) → (batch).

    Σ_{i≠j} cos = ‖Σ_i u_i‖² − s for unit u_i. nan of sequences without real tokens.
    """
    streams = tokens.shape[2]
    total = F.normalize(tokens.double(), dim=-1).sum(dim=2).square().sum(dim=-1)  # (batch, n)
    alike = (total - streams) / (streams * (streams - 1))
    return alike.mean(dim=-1) if real is None else torch.where(real, alike, 0.0).sum(dim=-1) / real.sum(dim=-1)


class StreamedMeasurement(Measurement):
    """A measurement of every stream, with a number for each sequence in the end."""

    def __init__(self, *args: Any, **options: Any):
        self.streams = 1
        self.by_stream: dict[str, dict[int, list[list[float]]]] = {}  # measure → block → batch → one per stream
        self._first_reading = 0  # of the running pass
        super().__init__(*args, **options)

    def see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        self.streams = visit.streams
        is_entrance = station == "input" and visit.number == 1
        if (station == "output" or is_entrance) and source.ndim == 4 and source.shape[2] > 1 and not self.again:
            block = 0 if is_entrance else visit.number
            found = stream_similarity(source, visit.real_of_sequences)
            self._waiting.append(Waiting(Reading(block, "output", -1, ALIKE, self.first_sample, []), found, None))
        super().see_tokens(visit, station, tokens, source)

    def see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], values: Tensor | None) -> None:
        """Of what attention reads there is one for all streams."""
        each, read = visit.streams, self._attention_input
        self._attention_input = None if read is None else read[::each]
        super().see_attention(replace(visit, real=visit.real_of_sequences), kind, heads, values)
        self._attention_input = read

    def _wait_for(
        self, block: int, station: str, name: str, value: Tensor | Bounded, head: int = -1, whole_batch: bool = False
    ) -> None:
        rows, self._batch = self._batch, self._batch // (self.streams if head >= 0 else 1)
        super()._wait_for(block, station, name, value, head, whole_batch)
        self._batch = rows

    def end(self, *, can_look_again: bool = False) -> bool:
        if super().end(can_look_again=can_look_again):
            return True
        self.readings[self._first_reading :] = map(self._of_sequences, self.readings[self._first_reading :])
        self._first_reading = len(self.readings)
        return False

    def _of_sequences(self, reading: Reading) -> Reading:
        """The mean over streams; of what has none the number itself."""
        if reading.first_sample < 0 or reading.head >= 0 or reading.measure == ALIKE:
            return reading
        if reading.station == "output" and reading.measure in BY_STREAM:
            rows = torch.tensor(reading.values, dtype=torch.float64).reshape(-1, self.streams)
            kept = self.by_stream.setdefault(reading.measure, defaultdict(list))
            kept[reading.block].append(rows.nanmean(dim=0).tolist())
        return reading._replace(values=means_of_runs(reading.values, self.streams))

    def _sequence(self, row: int, _rows: int) -> int:
        return row // self.streams

    def _name_outliers(self, block: int, part: str, seen: Seen, ratios: Tensor, places: Tensor | None) -> None:
        named = len(self.sinks)
        super()._name_outliers(block, part, seen, ratios, places)
        for number, sink in enumerate(self.sinks[named:], named):
            sample = self.first_sample + (sink.sample - self.first_sample) // self.streams
            self.sinks[number] = sink._replace(sample=sample)

    @property
    def summary(self) -> dict[str, Any]:
        """For the metadata: how many streams there are, and some measures of each, by block from 0, mean over
        batches."""
        of_each = {
            name: [torch.tensor(blocks[block], dtype=torch.float64).nanmean(dim=0).tolist() for block in sorted(blocks)]
            for name, blocks in self.by_stream.items()
        }
        return {"number": self.streams, **of_each}

    @property
    def note(self) -> str:
        """What a reader of the profile must know."""
        return (
            f"{self.streams} streams (hyper-connections): numbers of the trunk are means over them; "
            f"metadata['streams'] has each, and {ALIKE} says how alike those of a token are (1: copies of one another)"
        )
