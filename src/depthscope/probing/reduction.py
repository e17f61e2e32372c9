"""Turns tokens and attention into numbers while they pass; nothing of their size is kept, but for the unit tokens of
one block's input, which its output is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from depthscope import stations as at
from depthscope.hooks import Head, Visit
from depthscope.measures import (
    MEASURES,
    OF_OUTLIERS,
    Bounded,
    HeadInput,
    Measure,
    Scratch,
    TokenMatrix,
    TokenNorms,
)
from depthscope.measures.catalogue import half_turns
from depthscope.measures.heads import scored
from depthscope.probing.bounds import Bounds, in_groups
from depthscope.probing.finite_sequences import Place
from depthscope.probing.ledger import Kind, Ledger
from depthscope.probing.pace import Pace
from depthscope.probing.spelling import Spelling
from depthscope.probing.sweep import FIELDS, Sweeper, Swept
from depthscope.probing.trail import Seen, Trail, same_tokens
from depthscope.stations import trunk_is_a_sum

_OUTLIERS = FIELDS.index("outliers")

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
    token: int  # its position among the real tokens of the sequence
    norm_ratio: float
    text: str  # "" if it is not known


class Reduction:
    """Collects rows during a pass; `begin` starts the pass of a batch, `end` turns what was kept into rows."""

    def __init__(
        self,
        measures: tuple[str, ...],
        stations: frozenset[str],
        exclude: Excluded,
        only_at_outputs: frozenset[str] = frozenset(),
        *,
        entrances: bool = False,
    ):
        self.measures = frozenset(measures)
        self.stations = stations
        self.exclude = exclude
        self.only_at_outputs = only_at_outputs
        self.entrances = entrances  # whether what enters a part is reported where that station is not asked for
        chosen = [measure for name, measure in MEASURES.items() if name in self.measures]
        self._of: dict[str, list[Measure]] = {}
        for measure in chosen:
            self._of.setdefault(measure.of, []).append(measure)
        needs = {need for measure in chosen for need in measure.needs}
        self._wants_outliers = bool(needs & OF_OUTLIERS)
        self.wants_attention = bool(self._kind("attention"))
        self.wants_branches = bool(self._kind("branch"))
        self.values_seen = False
        self.incomplete = False  # whether attention beside a sink that is no token was seen
        self.rows: list[Row] = []
        self.bounds = Bounds()
        self.sinks: list[SinkRow] = []
        self.attention_seen: set[tuple[int, str]] = set()
        self.between: set[int] = set()  # blocks whose input is not the output of the block before
        self.not_finite: dict[int, Place] = {}  # by sequence, where it is not finite first
        self.sweeper = Sweeper()
        self.pace = Pace(None)
        self._scratch = Scratch()
        self.begin(0)

    def _kind(self, of: str) -> list[Measure]:
        return self._of.get(of, [])

    def stations_to_hear(self) -> frozenset[str]:
        """Where the machine must listen: a step needs its beginning, a branch the trunk that it is compared with."""
        heard = {"input", "output"} | self.stations
        if self.wants_branches:
            heard |= set(at.BRANCHES)
        if heard & set(at.BRANCHES):
            heard |= set(at.WHOLE_TRUNK)
        if self.wants_attention:
            heard.add("attention_input")
        return frozenset(heard)

    def begin(self, first_sample: int, spelling: Spelling | None = None) -> None:
        self.first_sample = first_sample
        self._spelling = spelling or Spelling()
        self._trail = Trail()
        self._batch = 0  # sequences of the tokens that passed last
        self._attention_input: Tensor | None = None  # of the running block
        self._part = ""  # that runs
        self._ledgers: dict[Kind, Ledger] = {}
        self._looked: list[tuple[Place, Kind, int]] = []  # every sweep, in the order of the pass, and its row
        self._stations: list[tuple[int, str, Seen]] = []
        self._steps: list[tuple[int, str, Seen, Seen]] = []
        self._turns: list[tuple[int, str, Seen]] = []
        self._outliers: list[tuple[int, str, Seen, Tensor | None]] = []  # of a block and a part
        self._final: dict[str, tuple[int, Seen]] = {}  # by part: its last block so far, and that behind a norm

    def end(self) -> None:
        """Turns the summaries of a pass into rows: one call per measure, not one per station."""
        for block, seen in self._final.values():
            self._batch = seen.kind.batch
            self._report(seen, block, at.FINAL)
        for place in self._outliers:
            self._name_outliers(*place)
        self._find_not_finite()
        for kind, ledger in self._ledgers.items():
            turns = [item for item in self._turns if item[2].kind == kind]
            if turns:
                angles = ledger.rows([seen.row for _, _, seen in turns])[:, FIELDS.index("turn")]
                self._add_all(turns, "angular_distance", angles / torch.pi)
            stations = [item for item in self._stations if item[2].kind == kind]
            if stations:
                summary = ledger.read([seen.row for _, _, seen in stations])
                for measure in self._kind("station"):
                    self._add_all(stations, measure.name, measure.compute(summary.only(measure.needs)))
        for before, after in dict.fromkeys((step[2].kind, step[3].kind) for step in self._steps):
            steps = [step for step in self._steps if (step[2].kind, step[3].kind) == (before, after)]
            starts = self._ledgers[before].read([seen.row for _, _, seen, _ in steps]).norms
            ends = self._ledgers[after].read([seen.row for _, _, _, seen in steps]).norms
            for measure in self._kind("step"):
                self._add_all(steps, measure.name, measure.compute(starts, ends))
        self._ledgers.clear()

    def _find_not_finite(self) -> None:
        bad = {}
        for kind, ledger in self._ledgers.items():
            norms = ledger.read(list(range(sum(looked[1] == kind for looked in self._looked)))).norms
            bad[kind] = ((norms.count > 0) & norms.norm.isnan()).numpy()  # (sweeps, batch), on the host
        if not any(found.any() for found in bad.values()):
            return
        for place, kind, number in self._looked:
            for row in bad[kind][number].nonzero()[0].tolist():
                self.not_finite.setdefault(self.first_sample + self._sequence(row, kind.batch), place)

    def _sequence(self, row: int, _rows: int) -> int:
        """The sequence of the batch that a row of tokens belongs to."""
        return row

    def _add_all(self, places: Sequence[tuple[Any, ...]], name: str, values: Tensor) -> None:
        _check_shape(name, values, (len(places), places[0][-1].kind.batch))
        for (block, station, *_), row in zip(places, values.tolist(), strict=True):
            self.rows.append(Row(block, station, -1, name, self.first_sample, row))

    # --- tokens -----------------------------------------------------------------------------------

    def has_passed(self, visit: Visit, source: Tensor) -> bool:
        """Whether what enters a block is what has left the one before, and nobody asks for it a second time."""
        within = visit.number != 1 and visit.part == self._part
        return within and "input" not in self.stations and self._trail.known(source) is not None

    def see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        """Tokens (batch, n, d) pass a station; `source` is the tensor that the model passes."""
        self._batch = tokens.shape[0]
        asked, trail = station in self.stations, self._trail
        if station == "attention_input" and self.wants_attention:
            self._attention_input = tokens
        if station == "input":
            begins, self._part = visit.number == 1 or visit.part != self._part, visit.part
            if begins or trail.known(source) is None:
                seen = self._look(tokens, source, visit, station)
                trail.enter(seen)
                self._report_entrance(seen, visit, begins=begins)
        if station in at.BRANCHES:
            self._see_branch(visit, station, tokens, source)
            return
        moves = station != "input" and station in visit.block.trunk
        if not asked and not moves:
            return
        seen = self._look(tokens, source, visit, station)
        if asked:
            self._report(seen, visit.number, station)
        if moves:
            self._report_step(seen, visit.number, station)
            trail.move(seen)
        if station == "output":
            self._report_turn(seen, visit.number)
            self._report_outliers(seen, visit.number, visit)
            trail.enter(seen)
            self._attention_input = None
            self._final.pop(visit.part, None)  # what stood behind a block before

    def see_final_norm(self, visit: Visit, tokens: Tensor, source: Tensor) -> None:
        """What a norm outside the blocks makes of a block's output: the final norm, if no block of the part follows."""
        self._final.setdefault(visit.part, (visit.number, self._look(tokens, source, visit, at.FINAL)))

    def _see_branch(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        branch: TokenMatrix | TokenNorms
        if station in self.stations:
            seen = self._look(tokens, source, visit, station)
            self._report(seen, visit.number, station)
            branch = seen.norms
        else:
            branch = TokenMatrix(tokens, self._real(tokens, visit.real))
        if self._trail.trunk is not None:
            for measure in self._kind("branch"):
                self._add(visit.number, station, measure.name, measure.compute(self._trail.trunk.norms, branch))

    def _look(self, tokens: Tensor, source: Tensor, visit: Visit, station: str) -> Seen:
        """All numbers of a token matrix. The same tensor seen again (a block's output is the next one's
        input) is not computed again."""
        turns = bool(self._kind("block")) and station in ("input", "output", "after_ffn")
        if (known := self._trail.known(source)) is not None and (known.kept is not None or not turns):
            return known
        real, entered = self._real(tokens, visit.real), self._trail.entered
        device = torch.device("cpu") if tokens.device.type == "mps" else tokens.device
        kind = Kind(tokens.shape[0], tokens.shape[1], tokens.dtype, device)
        ledger = self._ledgers.setdefault(kind, Ledger(kind))
        seen = Seen(ledger, ledger.new_row())
        begins = station == "input" and visit.number == 1
        self._looked.append(((0, "output") if begins else (visit.number, station), kind, seen.row))
        out = ledger.row(seen.row)
        keep = self._buffer(station, visit) if turns else ""
        before = entered.kept if turns and station != "input" and entered is not None else None
        swept = self.sweeper.sweep(tokens, real, out, keep=keep, before=before)
        if self._wants_outliers or self.exclude == "outliers":
            self._look_for_outliers(seen, swept, real, out)
        if self.exclude == "outliers" and seen.outliers is not None:
            seen.left_out, outliers = seen.outliers, out[_OUTLIERS].clone()
            real = ~seen.outliers if real is None else real.to(seen.outliers.device) & ~seen.outliers
            swept = self.sweeper.sweep(tokens, real, out, keep=keep, before=before)
            out[_OUTLIERS] = outliers
        seen.kept, seen.compared = swept.kept, swept.compared
        wanted = self.measures if _is_output(visit, station) else self.measures - self.only_at_outputs
        if of_tokens := [m for m in (*self._kind("tokens"), *self._kind("batch")) if m.name in wanted]:
            x = TokenMatrix(tokens, real)
            seen.numbers = {measure.name: measure.take(x) for measure in of_tokens}
        if station != at.FINAL:  # the next block may still be given what the block before it returned
            self._trail.keep(source, seen)
        return seen

    def _look_for_outliers(self, seen: Seen, swept: Swept, real: Tensor | None, out: Tensor) -> None:
        on_cpu = out.device.type == "cpu"
        if not on_cpu and self.exclude != "outliers" and not self.wants_attention:
            seen.unasked = swept, real
        elif out.numpy()[_OUTLIERS].any() if on_cpu else out[_OUTLIERS].any():
            seen.outliers, seen.norm_ratios = swept.outliers(real)

    def _buffer(self, station: str, visit: Visit) -> str:
        """A block's output is compared with its input: they stand in two buffers in turn."""
        return f"{'input' if station == 'input' else 'output'} {visit.number % 2}"

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
        self._stations.append((block, station, seen))
        for name, value in seen.numbers.items():
            self._add(block, station, name, value, whole_batch=MEASURES[name].of == "batch")

    def _report_entrance(self, seen: Seen, visit: Visit, *, begins: bool) -> None:
        """What enters the model is block 0's; what enters another part stands at the `input` of its first block."""
        if visit.number == 1:
            self._report(seen, 0, "output")
            self._report_outliers(seen, 0, visit)
        elif not begins:
            self.between.add(visit.number)
        elif self.entrances and "input" not in self.stations:
            self._report(seen, visit.number, "input")

    def _report_step(self, seen: Seen, block: int, station: str) -> None:
        before = self._trail.entered if station == "output" else self._trail.trunk  # at the output: the whole block
        if not self._kind("step") or before is None or station not in self.stations:
            return
        if same_tokens(before, seen) and before.kind[:2] == seen.kind[:2]:
            self._steps.append((block, station, before, seen))
        else:  # an outlier was left out at one end only: the two are not the same tokens
            for measure in self._kind("step"):
                self._add(block, station, measure.name, torch.full_like(seen.norms.norm, torch.nan))

    def _report_turn(self, seen: Seen, block: int) -> None:
        before, after = self._trail.entered, seen.kept
        if before is None or before.kept is None or after is None or before.kept.tokens.shape != after.tokens.shape:
            return
        for measure in self._kind("block"):
            if measure.compute is half_turns and seen.compared is before.kept:
                self._turns.append((block, "output", seen))
                continue
            masks = [mask for mask in (before.kept.has_direction, after.has_direction) if mask is not None]
            real = masks[0] & masks[-1] if masks else None
            value = measure.compute(before.kept.unit, after.unit, real, self._scratch)
            self._add(block, "output", measure.name, value)

    def _report_outliers(self, seen: Seen, block: int, visit: Visit) -> None:
        if self._wants_outliers and (seen.outliers is not None or seen.unasked is not None):
            self._outliers.append((block, visit.block.part, seen, visit.real))

    def _name_outliers(self, block: int, part: str, seen: Seen, real: Tensor | None) -> None:
        if seen.unasked is not None:
            if not bool(seen.ledger.rows([seen.row])[:, _OUTLIERS].any()):
                return
            swept, counted_as_real = seen.unasked
            seen.outliers, seen.norm_ratios = swept.outliers(counted_as_real)
        assert seen.outliers is not None
        assert seen.norm_ratios is not None
        shape = (seen.outliers.shape[0], seen.outliers.shape[1])
        counted = None if real is None else (real.cumsum(dim=-1) - 1).tolist()  # among the real tokens
        for sample, place in seen.outliers.nonzero().tolist():
            token = place if counted is None else counted[sample][place]
            text = self._spelling.text(part, shape, sample, place)
            ratio = seen.norm_ratios[sample, place].item()
            self.sinks.append(SinkRow(block, self.first_sample + sample, token, ratio, text))

    # --- attention --------------------------------------------------------------------------------

    def see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], values: Tensor | None) -> None:
        """The heads of one block, one after the other; values (batch, groups, m, d_v), None if they were not seen."""
        self.attention_seen.add((visit.number, kind))
        self.values_seen |= values is not None
        of_block: dict[str, Any] = {"real": lambda: visit.real}
        if kind == "attention" and self._attention_input is not None:
            tokens = TokenMatrix(self._attention_input, visit.real)
            of_block["tokens"] = lambda: tokens
        entered = self._trail.entered
        if kind == "attention" and entered is not None and entered.outliers is not None:
            of_block["sinks"] = lambda: entered.outliers
        for head in in_groups(heads):
            given = HeadInput(of_block | _parts_of_head(head, values))
            self.incomplete |= not head.complete
            with self.pace.of(head):
                for measure in self._kind("attention"):
                    fits = (kind == "attention" or measure.crosses) and (head.complete or measure.incomplete)
                    if fits and given.has(measure.needs):
                        value = measure.take(given.only(measure.needs))
                        self._add(visit.number, kind, measure.name, value, head.number)

    def _add(
        self, block: int, station: str, name: str, value: Tensor | Bounded, head: int = -1, whole_batch: bool = False
    ) -> None:
        value = self.bounds.note(name, value)
        _check_shape(name, value, () if whole_batch else (self._batch,))
        first_sample = -1 if whole_batch else self.first_sample
        self.rows.append(Row(block, station, head, name, first_sample, value.reshape(-1).tolist()))


def _check_shape(name: str, values: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(values.shape) != expected and not (expected == () and values.numel() == 1):
        raise ValueError(f"the measure {name!r} must return shape {expected} here, got {tuple(values.shape)}")


def _parts_of_head(head: Head, values: Tensor | None) -> dict[str, Any]:
    parts = {"attention": lambda: head.attention, "matrix": head.attention.dense}
    if head.scores is not None or scored(head.attention) is not None:
        parts |= {"scores": lambda: head.scores}
    return parts if values is None else parts | {"values": lambda: values[:, head.group]}


def _is_output(visit: Visit, station: str) -> bool:
    """Whether a station has what leaves a block: a block's input left the one before."""
    return station in ("input", "output") or (station == "after_ffn" and trunk_is_a_sum(visit.block.placement))
