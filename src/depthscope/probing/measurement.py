"""What passes in a model, measured: which tokens are looked at where, and the readings that come of it.

`begin` starts the pass of a batch, `see_tokens` and `see_attention` are called while it runs, `end` makes the readings.
The tokens of a station are looked at in stage one (`station.py`), everything else waits for stage two (`finish.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from depthscope import stations as at
from depthscope.hooks import Head, Visit
from depthscope.inputs import Batch
from depthscope.measures import MEASURES, OF_OUTLIERS, Bounded, HeadInput, Measure, Scratch, TokenMatrix
from depthscope.measures.catalogue import half_turns
from depthscope.measures.tokens import are_outliers
from depthscope.probing.finish import Looks, PlacesOfLooks, Seen, readings_of, without_positions
from depthscope.probing.finite import Place
from depthscope.probing.heads import in_groups, parts_of_head, progress_of
from depthscope.probing.readings import Reading, Sink, Waiting, check_shape, text_of_token
from depthscope.probing.station import Look, look
from depthscope.progress import Tick
from depthscope.transfers import fetched

Excluded = Literal["outliers"] | tuple[int, ...] | None


class Measurement:
    """Collects readings during a pass; `wide` looks in float64 from the beginning."""

    def __init__(
        self,
        measures: tuple[str, ...],
        stations: frozenset[str],
        exclude: Excluded = None,
        only_at_outputs: frozenset[str] = frozenset(),
        *,
        entrances: bool = False,
        wide: bool = False,
        outliers: bool = False,
        progress: Tick | None = None,
    ):
        self.measures = frozenset(measures)
        self.stations = stations
        self.exclude = exclude
        self.only_at_outputs = only_at_outputs
        self.entrances = entrances  # whether what enters a part is reported where that station is not asked for
        self.always_wide = wide
        self.outliers = outliers  # whether there may be some: once they were found, every look is at them too
        self.progress = progress
        chosen = [measure for name, measure in MEASURES.items() if name in self.measures]
        self._of: dict[str, list[Measure]] = {}
        for measure in chosen:
            self._of.setdefault(measure.of, []).append(measure)
        self._wants_outliers = bool({need for measure in chosen for need in measure.needs} & OF_OUTLIERS)
        self.wants_attention = bool(self._kind("attention"))
        self.wants_branches = bool(self._kind("branch"))
        self.values_seen = False
        self.incomplete = False  # whether attention beside a sink that is no token was seen
        self.readings: list[Reading] = []
        self.sinks: list[Sink] = []
        self.error_bounds: dict[str, float] = {}  # by measure: over blocks, stations, heads and sequences
        self.attention_seen: set[tuple[int, str]] = set()
        self.between: set[int] = set()  # blocks whose input is not the output of the block before
        self.not_finite: dict[int, Place] = {}  # by sequence, where it is not finite first
        self.formats: dict[str, None] = {}  # in which looks were computed
        self.also: list[Tensor] = []  # what somebody else asks at the end of this pass,
        self.answers: list[Tensor] = []  # and what the answers are
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

    # --- a pass -----------------------------------------------------------------------------------

    def begin(self, first_sample: int, batch: Batch | None = None, tokenizer: Any = None) -> None:
        """A pass begins; the batch and its tokenizer spell the outlier tokens."""
        self.first_sample = first_sample
        self._ids = {} if batch is None else batch.kwargs
        self._decode = getattr(tokenizer, "decode", None)
        self._waiting: list[Waiting] = []  # what does not come of looks
        self.also, self.answers = [], []
        self.again, self.wide = False, self.always_wide
        self._begin_looks()

    def _look_again(self, *, wide: bool) -> None:
        """The same pass begins once more: its tokens are looked at with more care, and nothing else is done again."""
        self.again, self.wide = True, wide
        self._begin_looks()

    def _begin_looks(self) -> None:
        self._looks: dict[Any, Looks] = {}
        self._entered: Seen | None = None  # what the running block reads, or the one that runs next
        self._trunk: Seen | None = None  # the trunk station that was heard last
        self._newest: tuple[weakref.ref[Tensor], int, Seen] | None = None
        self._attention_input: Tensor | None = None  # of the running block
        self._part = ""  # that runs
        self._batch = 0  # sequences of the tokens that passed last
        self._in_order: list[tuple[Place, Seen]] = []
        self._stations: list[tuple[int, str, Seen]] = []
        self._steps: list[tuple[int, str, Seen, Seen]] = []
        self._branches: list[tuple[int, str, Seen, Seen]] = []  # the trunk, the branch
        self._turns: list[tuple[int, str, Seen]] = []
        self._outliers: list[tuple[int, str, Seen, Tensor | None]] = []  # of a block and a part, and the real tokens
        self._masks: dict[str, Tensor] = {}  # by part, those of its first block
        self._same: list[Tensor] = []  # of each step, whether the same tokens were left out at both ends
        self._real: dict[Any, tuple[Tensor | None, Tensor]] = {}  # by mask: itself, and without excluded positions
        # By part: its last block so far, what stands behind a norm there, and what was computed of that.
        self._final: dict[str, tuple[int, Seen, dict[str, Tensor | Bounded]]] = {}

    def end(self, *, can_look_again: bool = False) -> bool:
        """Turns what was kept of a pass into readings. True: the model must run once more, with more careful looks."""
        for block, seen, taken in self._final.values():
            self._stations.append((block, at.FINAL, seen))
            self._report_taken(taken, block, at.FINAL)
        kinds = list(self._looks.values())
        asked: list[Tensor] = [looks.numbers() for looks in kinds]
        asked += [mask.any() for mask in self._masks.values()] + self._same
        named = self._outliers if self.outliers or self.wide or self.exclude == "outliers" else []
        asked += [seen.look.ratios for _, _, seen, _ in named]
        asked += [real.cumsum(dim=-1) for *_, real in named if real is not None]
        waiting = [] if self.again else self._waiting
        asked += [w.values for w in waiting] + [w.error for w in waiting if w.error is not None]
        found = fetched(asked + self.also)  # the one transfer
        answers, self.answers, self.also = iter(found), self.answers or found[len(asked) :], []
        for looks in kinds:
            looks.read(next(answers))
        for mask in self._masks.values():
            if not next(answers):
                raise ValueError(
                    f"the mask hides all {tuple(mask.shape)} tokens: expected true, or 1, for real ones; mask= "
                    'says which argument marks them ("~name": true for padding)'
                )
        same = [bool(next(answers)) for _ in self._same]
        ratios = [next(answers) for _ in named]
        places = [None if real is None else next(answers) - 1 for *_, real in named]
        self._report_waiting(waiting, answers)
        doubtful = not self.wide and any(bool(looks.fields["doubt"].any()) for looks in kinds)
        unexpected = any(bool(looks.fields["unexpected"].any()) for looks in kinds)
        self.outliers |= unexpected
        if (doubtful or unexpected) and can_look_again:
            self._look_again(wide=doubtful)
            return True
        self.formats |= {str(seen.look.token_norms.dtype).removeprefix("torch."): None for _, seen in self._in_order}
        for (block, part, seen, _), ratio, place in zip(named, ratios, places, strict=True):
            if seen.looks.fields["outliers"][seen.number].any():
                self._name_outliers(block, part, seen, ratio, place)
        self._find_not_finite()
        where = PlacesOfLooks(self._stations, self._turns, self._steps, self._branches, same)
        self.readings += readings_of(kinds, where, self._of, self.first_sample)
        self._begin_looks()  # which lets go of the looks
        return False

    def _report_waiting(self, waiting: list[Waiting], answers: Iterator[Tensor]) -> None:
        values = [next(answers) for _ in waiting]
        for item, found in zip(waiting, values, strict=True):
            self.readings.append(item.reading._replace(values=found.reshape(-1).tolist()))
            if item.error is not None:  # where there is no value there is no error
                errors = next(answers)[found.isfinite()]
                largest = errors.max().item() if errors.numel() else 0.0
                name = item.reading.measure
                self.error_bounds[name] = max(self.error_bounds.get(name, 0.0), largest)

    def _find_not_finite(self) -> None:
        bad = {}
        for looks in self._looks.values():
            norms = looks.norms(list(range(len(looks.fields["doubt"]))))
            bad[looks] = ((norms.count > 0) & norms.norm.isnan()).numpy()  # (looks, batch)
        for place, seen in self._in_order:
            for row in bad[seen.looks][seen.number].nonzero()[0].tolist():
                self.not_finite.setdefault(self.first_sample + self._sequence(row, seen.batch), place)

    def _sequence(self, row: int, _rows: int) -> int:
        return row  # of tokens: the sequence of the batch that it belongs to

    # --- tokens -----------------------------------------------------------------------------------

    def has_passed(self, visit: Visit, source: Tensor) -> bool:
        """Whether what enters a block is what has left the one before, and nobody asks for it a second time."""
        within = visit.number != 1 and visit.part == self._part
        return within and "input" not in self.stations and self._known(source) is not None

    def see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        """Tokens (batch, n, d) pass a station; `source` is the tensor that the model passes."""
        self._batch = tokens.shape[0]
        asked = station in self.stations
        if station == "attention_input" and self.wants_attention:
            self._attention_input = tokens
        if station == "input":
            begins, self._part = visit.number == 1 or visit.part != self._part, visit.part
            if begins and visit.real is not None:
                self._masks.setdefault(visit.part, visit.real)
            if begins or self._known(source) is None:
                seen = self._look(tokens, source, visit, station)
                self._entered = self._trunk = seen
                self._report_entrance(seen, tokens, visit, begins=begins)
        if station in at.BRANCHES:
            self._see_branch(visit, station, tokens, source)
            return
        moves = station != "input" and station in visit.block.trunk
        if not asked and not moves:
            return
        seen = self._look(tokens, source, visit, station)
        if asked:
            self._report(seen, tokens, visit, station)
        if moves:
            before = self._entered if station == "output" else self._trunk  # at the output: the whole block
            if asked and before is not None and self._kind("step"):
                self._steps.append((visit.number, station, before, seen))
                if self.exclude == "outliers":
                    self._same.append(_same_outliers(before.look, seen.look))
            self._trunk = seen
        if station == "output":
            self._report_turn(seen, visit.number)
            self._report_outliers(seen, visit.number, visit)
            self._entered = seen
            self._attention_input = None
            self._final.pop(visit.part, None)  # what stood behind a block before

    def see_final_norm(self, visit: Visit, tokens: Tensor, source: Tensor) -> None:
        """What a norm outside the blocks makes of a block's output: the final norm, if no block of the part follows."""
        if visit.part not in self._final:
            seen = self._look(tokens, source, visit, at.FINAL)
            self._final[visit.part] = visit.number, seen, self._taken_of_tokens(seen, tokens, visit, at.FINAL)

    def _see_branch(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        asked = station in self.stations
        if asked or self.wants_branches:
            seen = self._look(tokens, source, visit, station)
            if asked:
                self._report(seen, tokens, visit, station)
            if self._trunk is not None and self.wants_branches:
                self._branches.append((visit.number, station, self._trunk, seen))

    def _known(self, source: Tensor) -> Seen | None:
        """What was seen of this very tensor, if it was looked at last and has not been written to since."""
        if self._newest is None or self._newest[0]() is not source or self._newest[1] != source._version:
            return None
        return self._newest[2]

    def _look(self, tokens: Tensor, source: Tensor, visit: Visit, station: str) -> Seen:
        """The same tensor seen again (a block's output is the next one's input) is not looked at again."""
        turns = bool(self._kind("block")) and _is_output(visit, station)
        if (known := self._known(source)) is not None and (known.look.unit is not None or not turns):
            return known
        enters = station == "input"
        found = look(
            tokens,
            self._without_excluded(tokens, visit.real),
            self._scratch,
            # A block's output is compared with its input: they stand in two buffers in turn.
            keep=f"unit {(visit.number - enters) % 2}" if turns else "",
            before=self._entered.look if turns and not enters and self._entered is not None else None,
            outliers=self.outliers,
            without_outliers=self.exclude == "outliers",
            wide=self.wide,
        )
        looks = self._looks.get(found.kind)
        if looks is None:
            looks = self._looks[found.kind] = Looks(found)
        seen = Seen(found, looks, looks.add(found), {})
        self._in_order.append(((0, "output") if enters and visit.number == 1 else (visit.number, station), seen))
        if station != at.FINAL:  # the next block may still be given what the block before it returned
            self._newest = None if source.is_inference() else (weakref.ref(source), source._version, seen)
        return seen

    def _without_excluded(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask without the excluded positions."""
        if not isinstance(self.exclude, tuple):
            return mask
        key = tokens.shape[:2] if mask is None else id(mask)
        if key not in self._real:
            self._real[key] = mask, without_positions(self.exclude, tokens, mask)
        return self._real[key][1]

    def _report(self, seen: Seen, tokens: Tensor, visit: Visit, station: str, block: int | None = None) -> None:
        block = visit.number if block is None else block
        self._stations.append((block, station, seen))
        self._report_taken(self._taken_of_tokens(seen, tokens, visit, station), block, station)

    def _taken_of_tokens(self, seen: Seen, tokens: Tensor, visit: Visit, station: str) -> dict[str, Tensor | Bounded]:
        """The measures of these tokens that need more of them than a look."""
        if not self.again and not seen.of_tokens:
            wanted = self.measures if _is_output(visit, station) else self.measures - self.only_at_outputs
            if chosen := [m for m in (*self._kind("tokens"), *self._kind("batch")) if m.name in wanted]:
                real = self._without_excluded(tokens, visit.real)
                if (outliers := seen.look.outliers) is not None:
                    real = ~outliers if real is None else real.to(outliers.device) & ~outliers
                x = TokenMatrix(tokens, real)
                seen.of_tokens.update({measure.name: measure.take(x) for measure in chosen})
        return seen.of_tokens

    def _report_taken(self, taken: dict[str, Tensor | Bounded], block: int, station: str) -> None:
        for name, value in taken.items():
            self._wait_for(block, station, name, value, whole_batch=MEASURES[name].of == "batch")

    def _report_entrance(self, seen: Seen, tokens: Tensor, visit: Visit, *, begins: bool) -> None:
        """What enters the model is block 0's; what enters another part stands at the `input` of its first block."""
        if visit.number == 1:
            self._report(seen, tokens, visit, "output", block=0)
            self._report_outliers(seen, 0, visit)
        elif not begins:
            self.between.add(visit.number)
        elif self.entrances and "input" not in self.stations:
            self._report(seen, tokens, visit, "input")

    def _report_turn(self, seen: Seen, block: int) -> None:
        if self._entered is None:
            return
        before, after = self._entered.look, seen.look
        if before.unit is None or after.unit is None or before.shape != after.shape:
            return
        for measure in self._kind("block"):
            if measure.compute is half_turns and after.compared == id(before):
                self._turns.append((block, "output", seen))
            elif not self.again:
                masks = [mask for mask in (before.directed, after.directed) if mask is not None]
                real = masks[0] & masks[-1] if masks else None
                value = measure.compute(before.unit, after.unit, real, self._scratch)
                self._wait_for(block, "output", measure.name, value)

    def _report_outliers(self, seen: Seen, block: int, visit: Visit) -> None:
        if self._wants_outliers:
            self._outliers.append((block, visit.block.part, seen, visit.real))

    def _name_outliers(self, block: int, part: str, seen: Seen, ratios: Tensor, places: Tensor | None) -> None:
        """`ratios` to the median and `places` among the real tokens (None: as they stand), both (batch, n)."""
        for sample, place in are_outliers(ratios).nonzero().tolist():
            token = place if places is None else int(places[sample, place])
            text = text_of_token(self._decode, self._ids, part, ratios.shape, sample, place)
            self.sinks.append(Sink(block, self.first_sample + sample, token, ratios[sample, place].item(), text))

    # --- attention --------------------------------------------------------------------------------

    def see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], values: Tensor | None) -> None:
        """The heads of one block, one after the other; values (batch, groups, m, d_v), None if they were not seen."""
        if self.again:
            return
        self.attention_seen.add((visit.number, kind))
        self.values_seen |= values is not None
        of_block: dict[str, Any] = {"real": lambda: visit.real}
        if kind == "attention" and self._attention_input is not None:
            tokens = TokenMatrix(self._attention_input, visit.real)
            of_block["tokens"] = lambda: tokens
        if kind == "attention" and self._entered is not None and self._wants_outliers:
            sinks = are_outliers(self._entered.look.ratios)
            if bool(sinks.any()):  # what attention is asked for is worth a question
                of_block["sinks"] = lambda: sinks
        for head in in_groups(heads):
            given = HeadInput(of_block | parts_of_head(head, values))
            self.incomplete |= not head.complete
            with progress_of(head, self.progress):
                for measure in self._kind("attention"):
                    fits = (kind == "attention" or measure.crosses) and (head.complete or measure.incomplete)
                    if fits and given.has(measure.needs):
                        value = measure.take(given.only(measure.needs))
                        self._wait_for(visit.number, kind, measure.name, value, head.number)

    def _wait_for(
        self, block: int, station: str, name: str, value: Tensor | Bounded, head: int = -1, whole_batch: bool = False
    ) -> None:
        value, error = value if isinstance(value, Bounded) else (value, None)
        check_shape(name, value, () if whole_batch else (self._batch,))
        first_sample = -1 if whole_batch else self.first_sample
        self._waiting.append(Waiting(Reading(block, station, head, name, first_sample, []), value, error))


def _same_outliers(before: Look, after: Look) -> Tensor:
    """Whether the same tokens are left out at both ends of a step: one number."""
    if before.shape[:2] != after.shape[:2]:
        return torch.zeros(())
    a, b = are_outliers(before.ratios), are_outliers(after.ratios)
    return (a == b.to(a.device)).all()


def _is_output(visit: Visit, station: str) -> bool:
    """Whether a station has what leaves a block: a block's input left the one before."""
    return station in ("input", "output") or (station == "after_ffn" and at.trunk_is_a_sum(visit.block.placement))
