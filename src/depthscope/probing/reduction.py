"""Turns tokens and attention matrices into numbers while they pass; nothing of their size is kept, but
for the unit tokens of one block's input, which its output is compared with.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from depthscope import measures as m
from depthscope.measures import Scratch, TokenMatrix, TokenNorms
from depthscope.probing.attention import Head
from depthscope.probing.catalogue import (
    ATTENTION,
    BATCH,
    BLOCK,
    BRANCH,
    FROM_SUMMARY,
    FROM_TOKENS,
    STEP,
    Summary,
)
from depthscope.probing.ledger import Ledger
from depthscope.probing.taps import Visit

Excluded = Literal["outliers"] | tuple[int, ...] | None


class Row(NamedTuple):
    """One measure at one place for all sequences of a batch."""

    block: int
    station: str
    head: int  # -1: no head
    measure: str
    first_sample: int  # -1: the whole batch
    values: list[float]  # one per sequence, or one for the whole batch


class SinkRow(NamedTuple):
    """One outlier token in one block."""

    block: int
    sample: int
    token: int
    norm_ratio: float


@dataclass
class Seen:
    """What is kept of a token matrix after it has passed."""

    norms: TokenNorms
    place: tuple[int, int]  # its batch size and its row in that ledger
    numbers: dict[str, Tensor] = field(default_factory=dict)
    unit: Tensor | None = None  # (batch, n, d)
    has_direction: Tensor | None = None  # (batch, n); None: every token has one
    outliers: Tensor | None = None  # (batch, n), if there are any
    left_out: Tensor | None = None  # (batch, n), outliers that are not measured
    norm_ratios: Tensor | None = None  # (batch, n), norm of each token over the median


class Reduction:
    """Collects rows during a pass; `begin` starts the pass of a batch."""

    def __init__(
        self,
        measures: tuple[str, ...],
        stations: frozenset[str],
        exclude: Excluded,
        only_at_outputs: frozenset[str] = frozenset(),
    ):
        self.measures = frozenset(measures)
        self.stations = stations
        self.exclude = exclude
        self.only_at_outputs = only_at_outputs
        self.wants_attention = bool(self.measures & set(ATTENTION))
        self.wants_branches = bool(self.measures & set(BRANCH))
        self.wants_values = "sink_value_norm" in self.measures
        self.values_seen = False
        self._wants_directions = bool(
            self.measures & {"cosine_similarity", "direction_similarity", "outliers", "largest_token_share"}
        )
        self.rows: list[Row] = []
        self.sinks: list[SinkRow] = []
        self.attention_seen: set[tuple[int, str]] = set()
        self._scratch = Scratch()
        self.begin(0)

    def begin(self, first_sample: int) -> None:
        self.first_sample = first_sample
        self._trunk: Seen | None = None  # the trunk station heard last
        self._input: Seen | None = None  # what entered the running block
        self._attention_input: Tensor | None = None
        self._last: tuple[weakref.ref[Tensor], int, Seen] | None = None
        self._ledgers: dict[int, Ledger] = {}  # by batch size: the towers of a model may differ
        self._stations: list[tuple[int, str, tuple[int, int]]] = []
        self._steps: list[tuple[int, str, tuple[int, int], tuple[int, int]]] = []

    def end(self) -> None:
        """Turns the summaries of a pass into rows: one call per measure, not one per station."""
        for batch, ledger in self._ledgers.items():
            stations = [item for item in self._stations if item[2][0] == batch]
            summary = ledger.read([row for _, _, (_, row) in stations])
            for name, measure in FROM_SUMMARY.items():
                if name in self.measures:
                    self._add_all(stations, name, measure(summary))
            steps = [item for item in self._steps if item[3][0] == batch]
            if steps:
                before = ledger.read([row for _, _, (_, row), _ in steps]).norms
                after = ledger.read([row for _, _, _, (_, row) in steps]).norms
                found = (*m.growth(before, after), m.escalation_rate(before, after))
                for name, values in zip(STEP, found, strict=True):
                    if name in self.measures:
                        self._add_all(steps, name, values)
        self._ledgers.clear()

    def _add_all(self, places: Sequence[tuple[Any, ...]], name: str, values: Tensor) -> None:
        for (block, station, *_), row in zip(places, values.tolist(), strict=True):
            self.rows.append(Row(block, station, -1, name, self.first_sample, row))

    # --- tokens -----------------------------------------------------------------------------------

    def see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        if station == "attention_input" and self.wants_attention:
            self._attention_input = tokens
        if station == "input" and (visit.number == 1 or not self._is_last(source)):
            # The first block, or something has happened between two blocks: the step begins here.
            seen = self._look(tokens, source, visit, station)
            self._trunk = self._input = seen
            if visit.number == 1:
                self._report(seen, 0, "output")
                self._report_outliers(seen, 0)
        if station not in self.stations and station != "output":
            if station.endswith("_branch"):
                self._report_branch(TokenMatrix(tokens, self._real(tokens, visit.mask)), visit.number, station)
            elif station in visit.block.trunk and station != "input":
                self._trunk = self._look(tokens, source, visit, station)
            return
        seen = self._look(tokens, source, visit, station)
        if station in self.stations:
            self._report(seen, visit.number, station)
        if station.endswith("_branch"):
            self._report_branch(seen.norms, visit.number, station)
        elif station in visit.block.trunk and station != "input":
            self._report_step(seen, visit.number, station)
            self._trunk = seen
        if station == "output":
            self._report_turn(seen, visit.number)
            self._report_outliers(seen, visit.number)
            self._input = seen
            self._attention_input = None

    def _look(self, tokens: Tensor, source: Tensor, visit: Visit, station: str) -> Seen:
        """All numbers of a token matrix. The same tensor seen again (a block's output is the next one's
        input) is not computed again."""
        if self._is_last(source):
            assert self._last is not None
            return self._last[2]
        x = TokenMatrix(tokens, self._real(tokens, visit.mask), self._scratch, self._unit_buffer(station, visit))
        found, left_out = x, None
        if self.exclude == "outliers" and x.has_outliers:
            left_out = x.outliers
            x = TokenMatrix(tokens, x.real & ~x.outliers, self._scratch, self._unit_buffer(station, visit))
        summary = self._summary(x, found)
        batch = tokens.shape[0]
        row = self._ledgers.setdefault(batch, Ledger()).write(summary)
        wanted = self.measures if _is_output(visit, station) else self.measures - self.only_at_outputs
        numbers = {name: FROM_TOKENS[name](x) for name in FROM_TOKENS if name in wanted}
        seen = Seen(summary.norms, (batch, row), numbers)
        seen.left_out = left_out
        if wanted & set(BATCH):
            split = zip(BATCH, m.energy_split(x), strict=True)
            seen.numbers |= {name: value for name, value in split if name in wanted}
        if self.measures & set(BLOCK):
            seen.unit, seen.has_direction = x.directions.values, x.directions.mask
        if self._wants_outliers() and found.has_outliers:
            seen.outliers, seen.norm_ratios = found.outliers, found.norm_ratios
        self._last = None if source.is_inference() else (weakref.ref(source), source._version, seen)
        return seen

    def _is_last(self, source: Tensor) -> bool:
        """Whether this very tensor was looked at last, and has not been written to since."""
        return self._last is not None and self._last[0]() is source and self._last[1] == source._version

    def _summary(self, x: TokenMatrix, found: TokenMatrix) -> Summary:
        """Of the tokens x that are measured; outliers are counted among all that were found."""
        norms = x.norms
        if not self._wants_directions:
            return Summary(norms, norms, norms, norms.mean_norm, norms.mean_norm)
        outliers = found.outliers.sum(dim=-1).double() if found.has_outliers else torch.zeros_like(norms.mean_norm)
        return Summary(norms, x.directions.norms, m.directions_without_outliers(x), x.largest_norm, outliers)

    def _unit_buffer(self, station: str, visit: Visit) -> str:
        """A block's output is compared with its input: their unit tokens stand in two buffers in turn."""
        if station in ("input", "output", "after_ffn"):
            return f"unit of {'input' if station == 'input' else 'output'} {visit.number % 2}"
        return "unit"

    def _wants_outliers(self) -> bool:
        return bool(self.measures & {"direction_similarity", "outliers", "sink_attention", "sink_value_norm"})

    def _real(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask without the excluded positions, which are counted among the real tokens of each sequence."""
        if not isinstance(self.exclude, tuple):
            return mask
        real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask
        real = real.to(tokens.device)
        from_start, length = real.cumsum(dim=-1) - 1, real.sum(dim=-1, keepdim=True)  # (batch, n), (batch, 1)
        most = int(length.max())
        for index in self.exclude:
            if not -most <= index < most:
                raise ValueError(f"cannot exclude token {index}: the sequences have {most} tokens at most")
            real = real & (from_start != (index if index >= 0 else length + index))
        return real

    def _report(self, seen: Seen, block: int, station: str) -> None:
        self._stations.append((block, station, seen.place))
        for name, value in seen.numbers.items():
            self._add(block, station, name, value, whole_batch=name in BATCH)

    def _report_step(self, seen: Seen, block: int, station: str) -> None:
        wanted = [name for name in STEP if name in self.measures]
        before = self._input if station == "output" else self._trunk  # at the output: the whole block
        if not wanted or before is None or station not in self.stations:
            return
        if _same_tokens(before, seen):
            self._steps.append((block, station, before.place, seen.place))
        else:  # an outlier was left out at one end only: the two are not the same tokens
            for name in wanted:
                self._add(block, station, name, torch.full_like(seen.norms.norm, torch.nan))

    def _report_branch(self, branch: TokenMatrix | TokenNorms, block: int, station: str) -> None:
        if self.wants_branches and self._trunk is not None:
            self._add(block, station, "branch_ratio", branch.norm / self._trunk.norms.norm)

    def _report_turn(self, seen: Seen, block: int) -> None:
        before = self._input
        if before is None or before.unit is None or seen.unit is None or before.unit.shape != seen.unit.shape:
            return
        masks = [mask for mask in (before.has_direction, seen.has_direction) if mask is not None]
        real = masks[0] & masks[-1] if masks else None
        angle = m.mean_angle(before.unit, seen.unit, real, self._scratch)
        self._add(block, "output", "angular_distance", angle / torch.pi)

    def _report_outliers(self, seen: Seen, block: int) -> None:
        if seen.outliers is None or seen.norm_ratios is None:
            return
        for sample, token in seen.outliers.nonzero().tolist():
            ratio = seen.norm_ratios[sample, token].item()
            self.sinks.append(SinkRow(block, self.first_sample + sample, token, ratio))

    # --- attention --------------------------------------------------------------------------------

    def see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], values: Tensor | None) -> None:
        self.attention_seen.add((visit.number, kind))
        x = None
        if self._attention_input is not None and self.measures & {"omega", "mu_mean", "mu_diversity"}:
            x = TokenMatrix(self._attention_input, visit.mask)
        for head in heads:
            numbers = self._mixing(head.matrix, x, visit.mask) if kind == "attention" else {}
            if "attention_entropy" in self.measures:
                numbers["attention_entropy"] = m.attention_entropy(head.matrix, visit.mask)
            if kind == "attention" and self._input is not None and self._input.outliers is not None:
                numbers |= self._sinks_of(head, values, visit.mask)
            for name, value in numbers.items():
                self._add(visit.number, kind, name, value, head.number)

    def _mixing(self, p: Tensor, x: TokenMatrix | None, mask: Tensor | None) -> dict[str, Tensor]:
        """What one head does to mean and diversity."""
        found: dict[str, Tensor] = {}
        if "delta" in self.measures:
            found["delta"] = m.delta(p, mask)
        if "second_eigenvalue" in self.measures:
            found["second_eigenvalue"] = m.second_eigenvalue(p, mask)
        if x is not None:
            if "omega" in self.measures:
                found["omega"] = m.omega(p, x)
            if self.measures & {"mu_mean", "mu_diversity"}:
                found |= {f"mu_{part}": value for part, value in m.mu(p, x)._asdict().items()}
        return {name: value for name, value in found.items() if name in self.measures}

    def _sinks_of(self, head: Head, values: Tensor | None, mask: Tensor | None) -> dict[str, Tensor]:
        """The attention that outlier tokens draw (mean over queries), and their values' size over the median."""
        assert self._input is not None
        assert self._input.outliers is not None
        sinks = self._input.outliers  # (batch, n)
        real = torch.ones_like(sinks) if mask is None else mask.to(sinks.device)
        found: dict[str, Tensor] = {}
        if "sink_attention" in self.measures:
            drawn = torch.where(sinks[:, None, :] & real[:, :, None], head.matrix, 0.0).sum(dim=(-2, -1))
            found["sink_attention"] = torch.where(sinks.any(dim=-1), drawn.double() / real.sum(dim=-1), torch.nan)
        if "sink_value_norm" in self.measures and values is not None:
            self.values_seen = True
            ratios = TokenMatrix(values[:, head.group], mask).norm_ratios
            found["sink_value_norm"] = ratios.masked_fill(~sinks, torch.nan).nanmean(dim=-1)
        return found

    def _add(
        self, block: int, station: str, name: str, value: Tensor, head: int = -1, whole_batch: bool = False
    ) -> None:
        first_sample = -1 if whole_batch else self.first_sample
        self.rows.append(Row(block, station, head, name, first_sample, value.reshape(-1).tolist()))


def _is_output(visit: Visit, station: str) -> bool:
    """Whether a station has what leaves a block: a block's input left the one before."""
    return station in ("input", "output") or (station == "after_ffn" and visit.block.placement == "pre")


def _same_tokens(before: Seen, after: Seen) -> bool:
    if before.left_out is None or after.left_out is None:
        return before.left_out is after.left_out
    return torch.equal(before.left_out, after.left_out)
