"""What passes in a model, measured: which tokens are looked at where, and the readings that come of it.

`begin` starts the pass of a batch, `see_tokens` and `see_attention` are called while it runs, `end` makes the readings.
The tokens of a station are looked at in stage one (`station.py`), everything else waits for stage two (`finish.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from depthscope import stations as at
from depthscope.hooks import Head, Visit
from depthscope.inputs import Batch
from depthscope.measures import (
    MEASURES,
    OF_OUTLIERS,
    Bounded,
    HeadInput,
    Measure,
    ScoredAttention,
    Scratch,
    TokenMatrix,
)
from depthscope.measures.catalogue import half_turns
from depthscope.measures.tokens import are_outliers
from depthscope.probing.finish import Looks, PlacesOfLooks, Seen, readings_of, without_positions
from depthscope.probing.finite import Place
from depthscope.probing.readings import Reading, Sink, check_shape
from depthscope.probing.station import look
from depthscope.probing.streams import ALIKE, Streams, stream_similarity
from depthscope.transfers import fetched

# The argument with the ids that the blocks of a part read; of other parts (images) no token has a text.
_IDS = {"": "input_ids", "encoder": "input_ids", "text": "input_ids", "decoder": "decoder_input_ids"}


class Measurement:
    """Collects readings during a pass; `wide` looks in float64 from the beginning."""

    def __init__(
        self,
        measures: tuple[str, ...],
        stations: frozenset[str],
        exclude: tuple[int, ...] = (),
        only_at_outputs: frozenset[str] = frozenset(),
        *,
        entrances: bool = False,
        wide: bool = False,
        outliers: bool = False,
    ):
        self.measures = frozenset(measures)
        self.stations = stations
        self.exclude = exclude
        self.entrances = entrances  # whether what enters a part is reported where that station is not asked for
        self.always_wide = wide
        self.outliers = outliers  # whether there may be some: once they were found, every look is at them too
        chosen = [measure for name, measure in MEASURES.items() if name in self.measures]
        self._of: dict[str, list[Measure]] = {}
        for measure in chosen:
            self._of.setdefault(measure.of, []).append(measure)
        self._of_tokens = [*self._of.get("tokens", []), *self._of.get("batch", [])]
        self._inside = [measure for measure in self._of_tokens if measure.name not in only_at_outputs]
        self._turns_wanted, self._steps_wanted = "block" in self._of, "step" in self._of
        self._wants_outliers = bool({need for measure in chosen for need in measure.needs} & OF_OUTLIERS)
        self.wants_attention, self.wants_branches = "attention" in self._of, "branch" in self._of
        self.values_seen = False
        self.incomplete = False  # whether attention beside a sink that is no token was seen
        self.streams = Streams()
        self.readings: list[Reading] = []
        self.sinks: list[Sink] = []
        self.error_bounds: dict[str, float] = {}  # by measure: over blocks, stations, heads and sequences
        self.attention_seen: set[tuple[int, str]] = set()
        self.between: set[int] = set()  # blocks whose input is not the output of the block before
        self.not_finite: dict[int, Place] = {}  # by sequence, where it is not finite first
        self.formats: dict[str, None] = {}  # in which looks were computed
        self._scratch = Scratch()
        self.begin(0)

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
        self._waiting: list[tuple[Reading, Tensor, Tensor | None]] = []  # numbers where they were computed, and errors
        self._new: list[Reading] = []  # of this pass
        self.also: list[Tensor] = []  # what somebody else asks at the end of this pass,
        self.answers: list[Tensor] = []  # and what the answers are
        self.again, self.wide = False, self.always_wide
        self._begin_looks()

    def _begin_looks(self) -> None:
        self._looks: dict[Any, Looks] = {}
        self._entered: Seen | None = None  # what the running block reads, or the one that runs next
        self._trunk: Seen | None = None  # the trunk station that was heard last
        self._newest: tuple[weakref.ref[Tensor], int, Seen] | None = None
        self._attention_input: Tensor | None = None  # of the running block
        self._part = ""  # that runs
        self._rows = 0  # sequences of the tokens that passed last, each stream one
        self._in_order: list[tuple[Place, Seen]] = []
        self._stations: list[tuple[int, str, Seen]] = []
        self._steps: list[tuple[int, str, Seen, Seen]] = []
        self._branches: list[tuple[int, str, Seen, Seen]] = []  # the trunk, the branch
        self._turns: list[tuple[int, str, Seen]] = []
        self._outliers: list[tuple[int, str, Seen, Tensor | None]] = []  # of a block and a part, and the real tokens
        self._masks: dict[str, Tensor] = {}  # by part, those of its first block
        # By mask: itself, the mask without excluded positions, and the most real tokens of a sequence.
        self._real: dict[Any, tuple[Tensor | None, Tensor, Tensor]] = {}
        # By part: its last block so far, what stands behind a norm there, and what was computed of that.
        self._final: dict[str, tuple[int, Seen, dict[str, Tensor | Bounded]]] = {}

    def end(self, *, can_look_again: bool = False) -> bool:
        """Turns what was kept of a pass into readings. True: the model must run once more, with more careful looks."""
        for block, seen, taken in self._final.values():
            self._stations.append((block, at.FINAL, seen))
            self._report_taken(taken, block, at.FINAL)
        kinds = list(self._looks.values())
        named = self._outliers if self.outliers or self.wide else []
        waiting = [] if self.again else self._waiting
        asked = [looks.numbers() for looks in kinds] + [mask.any() for mask in self._masks.values()]
        asked += [longest for *_, longest in self._real.values()]
        asked += [seen.look.ratios for _, _, seen, _ in named]
        asked += [real.cumsum(dim=-1) for *_, real in named if real is not None]
        asked += [values for _, values, _ in waiting] + [error for *_, error in waiting if error is not None]
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
        for most in [int(next(answers)) for _ in self._real]:
            if strange := [index for index in self.exclude if not -most <= index < most]:
                raise ValueError(f"cannot exclude token {strange[0]}: the sequences have {most} tokens at most")
        ratios = [next(answers) for _ in named]
        places = [None if real is None else next(answers) - 1 for *_, real in named]
        of_waiting = [reading._replace(values=next(answers).reshape(-1).tolist()) for reading, *_ in waiting]
        for reading, (_, values, error) in zip(of_waiting, waiting, strict=True):
            if error is not None:  # where there is no value there is no error
                errors = next(answers)[torch.tensor(reading.values).reshape(values.shape).isfinite()]
                largest = errors.max().item() if errors.numel() else 0.0
                self.error_bounds[reading.measure] = max(self.error_bounds.get(reading.measure, 0.0), largest)
        doubtful = not self.wide and any(bool(looks.fields["doubt"].any()) for looks in kinds)
        unexpected = any(bool(looks.fields["unexpected"].any()) for looks in kinds)
        self.outliers |= unexpected
        self._new += of_waiting
        if (doubtful or unexpected) and can_look_again:  # tokens are looked at with more care, and nothing else is done
            self.again, self.wide = True, doubtful
            self._begin_looks()
            return True
        self.formats |= {str(seen.look.token_norms.dtype).removeprefix("torch."): None for _, seen in self._in_order}
        for (block, part, seen, _), ratio, place in zip(named, ratios, places, strict=True):
            if seen.looks.fields["outliers"][seen.number].any():
                self._name_outliers(block, part, ratio, place)
        bad = {looks: looks.not_finite() for looks in kinds}
        for where, seen in self._in_order:
            for row in bad[seen.looks].get(seen.number, ()):
                self.not_finite.setdefault(self.first_sample + row // self.streams.number, where)
        there = PlacesOfLooks(self._stations, self._turns, self._steps, self._branches)
        self._new += readings_of(kinds, there, self._of, self.first_sample)
        self.readings += self._new if self.streams.number == 1 else map(self.streams.of_sequences, self._new)
        self._begin_looks()  # which lets go of the looks
        return False

    def _name_outliers(self, block: int, part: str, ratios: Tensor, places: Tensor | None) -> None:
        """`ratios` to the median and `places` among the real tokens (None: as they stand), both (rows, n)."""
        ids = self._ids.get(_IDS.get(part, ""))
        spelled = self._decode is not None and isinstance(ids, Tensor) and ids.shape == ratios.shape
        for row, place in are_outliers(ratios).nonzero().tolist():
            token = place if places is None else int(places[row, place])
            text = str(self._decode([int(ids[row, place])])) if spelled else ""  # type: ignore[misc,index]
            sample = self.first_sample + row // self.streams.number
            self.sinks.append(Sink(block, sample, token, ratios[row, place].item(), text))

    # --- tokens -----------------------------------------------------------------------------------

    def has_passed(self, visit: Visit, source: Tensor) -> bool:
        """Whether what enters a block is what has left the one before, and nobody asks for it a second time."""
        within = visit.number != 1 and visit.part == self._part
        return within and "input" not in self.stations and self._known(source) is not None

    def see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        """Tokens (batch, n, d) pass a station; `source` is the tensor that the model passes."""
        self._rows, self.streams.number = tokens.shape[0], visit.streams
        asked = station in self.stations
        if station == "attention_input" and self.wants_attention:
            self._attention_input = tokens
        elif station == "input":
            begins, self._part = visit.number == 1 or visit.part != self._part, visit.part
            if begins and visit.real is not None:
                self._masks.setdefault(visit.part, visit.real)
            if begins or self._known(source) is None:
                self._entered = self._trunk = self._look(tokens, source, visit, station)
                self._report_entrance(self._entered, tokens, source, visit, begins=begins)
        branch = station in at.BRANCHES
        moves = station != "input" and station in visit.block.trunk
        if not (asked or moves or (branch and self.wants_branches)):
            return
        seen = self._look(tokens, source, visit, station)
        if asked:
            self._report(seen, tokens, visit, visit.number, station)
        if branch and self.wants_branches and self._trunk is not None:
            self._branches.append((visit.number, station, self._trunk, seen))
        if moves:
            before = self._entered if station == "output" else self._trunk  # at the output: the whole block
            if asked and before is not None and self._steps_wanted:
                self._steps.append((visit.number, station, before, seen))
            self._trunk = seen
        if station == "output":
            if self._turns_wanted and self._entered is not None:
                self._report_turn(self._entered, seen, visit.number)
            self._report_outside_of_looks(seen, visit.number, visit, source)
            self._entered, self._attention_input = seen, None
            self._final.pop(visit.part, None)  # what stood behind a block before

    def see_final_norm(self, visit: Visit, tokens: Tensor, source: Tensor) -> None:
        """What a norm outside the blocks makes of a block's output: the final norm, if no block of the part follows."""
        if visit.part not in self._final:
            seen = self._look(tokens, source, visit, at.FINAL)
            self._final[visit.part] = visit.number, seen, self._taken_of_tokens(seen, tokens, visit, at.FINAL)

    def _known(self, source: Tensor) -> Seen | None:
        """What was seen of this very tensor, if it was looked at last and has not been written to since."""
        if self._newest is None or self._newest[0]() is not source or self._newest[1] != source._version:
            return None
        return self._newest[2]

    def _look(self, tokens: Tensor, source: Tensor, visit: Visit, station: str) -> Seen:
        """The same tensor seen again (a block's output is the next one's input) is not looked at again."""
        turns = self._turns_wanted and _is_output(visit, station)
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
            wide=self.wide,
        )
        # Looks of one kind are finished together.
        norms, masked = found.token_norms, (found.measured is not None, found.directed is not None)
        kind = found.shape, norms.dtype, norms.device, found.epsilon, found.finds_outliers, masked
        if (looks := self._looks.get(kind)) is None:
            looks = self._looks[kind] = Looks(found)
        seen = Seen(found, looks, looks.add(found), {})
        self._in_order.append(((0, "output") if enters and visit.number == 1 else (visit.number, station), seen))
        if station != at.FINAL:  # the next block may still be given what the block before it returned
            self._newest = None if source.is_inference() else (weakref.ref(source), source._version, seen)
        return seen

    def _without_excluded(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask without the excluded positions."""
        if not self.exclude:
            return mask
        key = tokens.shape[:2] if mask is None else id(mask)
        if key not in self._real:
            self._real[key] = mask, *without_positions(self.exclude, tokens, mask)
        return self._real[key][1]

    def _report(self, seen: Seen, tokens: Tensor, visit: Visit, block: int, station: str) -> None:
        self._stations.append((block, station, seen))
        if self._of_tokens:
            self._report_taken(self._taken_of_tokens(seen, tokens, visit, station), block, station)

    def _taken_of_tokens(self, seen: Seen, tokens: Tensor, visit: Visit, station: str) -> dict[str, Tensor | Bounded]:
        """The measures of these tokens that need more of them than a look."""
        chosen = self._of_tokens if _is_output(visit, station) else self._inside
        if chosen and not self.again and not seen.of_tokens:
            x = TokenMatrix(tokens, self._without_excluded(tokens, visit.real))
            seen.of_tokens.update({measure.name: measure.compute(x) for measure in chosen})
        return seen.of_tokens

    def _report_taken(self, taken: dict[str, Tensor | Bounded], block: int, station: str) -> None:
        for name, value in taken.items():
            self._wait_for(block, station, name, value, whole_batch=MEASURES[name].of == "batch")

    def _report_entrance(self, seen: Seen, tokens: Tensor, source: Tensor, visit: Visit, *, begins: bool) -> None:
        """What enters the model is block 0's; what enters another part stands at the `input` of its first block."""
        if visit.number == 1:
            self._report(seen, tokens, visit, 0, "output")
            self._report_outside_of_looks(seen, 0, visit, source)
        elif not begins:
            self.between.add(visit.number)
        elif self.entrances and "input" not in self.stations:
            self._report(seen, tokens, visit, visit.number, "input")

    def _report_outside_of_looks(self, seen: Seen, block: int, visit: Visit, source: Tensor) -> None:
        """Of what leaves a block: which outliers to name, and how alike its streams are."""
        if self._wants_outliers:
            self._outliers.append((block, visit.block.part, seen, visit.real))
        tokens = visit.with_streams(source)
        if visit.streams > 1 and tokens.ndim == 4 and not self.again:
            found = stream_similarity(tokens, visit.real_of_sequences)
            self._waiting.append((Reading(block, "output", -1, ALIKE, self.first_sample, []), found, None))

    def _report_turn(self, entered: Seen, seen: Seen, block: int) -> None:
        before, after = entered.look, seen.look
        if before.unit is None or after.unit is None or before.shape != after.shape:
            return
        for measure in self._of["block"]:
            if measure.compute is half_turns and after.turns is not None:
                self._turns.append((block, "output", seen))
            elif not self.again:
                masks = [mask for mask in (before.directed, after.directed) if mask is not None]
                real = masks[0] & masks[-1] if masks else None
                value = measure.compute(before.unit, after.unit, real, self._scratch)
                self._wait_for(block, "output", measure.name, value)

    # --- attention --------------------------------------------------------------------------------

    def see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], values: Tensor | None) -> None:
        """The heads of one block, one after the other; values (batch, groups, m, d_v), None if they were not seen.

        Of several streams attention reads one.
        """
        if self.again:
            return
        self.attention_seen.add((visit.number, kind))
        self.values_seen |= values is not None
        real = visit.real_of_sequences
        of_block: dict[str, Any] = {"real": lambda: real}
        if kind == "attention" and self._attention_input is not None:
            tokens = TokenMatrix(self._attention_input[:: visit.streams], real)
            of_block["tokens"] = lambda: tokens
        if kind == "attention" and self._entered is not None and self._wants_outliers:
            sinks = are_outliers(self._entered.look.ratios).unflatten(0, (-1, visit.streams)).any(dim=1)
            if bool(sinks.any()):  # what attention is asked for is worth a question
                of_block["sinks"] = lambda: sinks
        for head in heads:
            given = HeadInput(of_block | _parts_of_head(head, values))
            self.incomplete |= not head.complete
            for measure in self._of["attention"]:
                fits = (kind == "attention" or measure.crosses) and (head.complete or measure.incomplete)
                if fits and given.has(measure.needs):
                    value = measure.compute(given.only(measure.needs))
                    self._wait_for(visit.number, kind, measure.name, value, head.number)

    def _wait_for(
        self, block: int, station: str, name: str, value: Tensor | Bounded, head: int = -1, whole_batch: bool = False
    ) -> None:
        value, error = value if isinstance(value, Bounded) else (value, None)
        rows = self._rows // (self.streams.number if head >= 0 else 1)
        check_shape(name, value, () if whole_batch else (rows,))
        first_sample = -1 if whole_batch else self.first_sample
        self._waiting.append((Reading(block, station, head, name, first_sample, []), value, error))


def _is_output(visit: Visit, station: str) -> bool:
    """Whether a station has what leaves a block: a block's input left the one before."""
    return station in ("input", "output") or (station == "after_ffn" and at.trunk_is_a_sum(visit.block.placement))


def _parts_of_head(head: Head, values: Tensor | None) -> dict[str, Any]:
    """What a measure may be given of one head, by name."""
    parts: dict[str, Any] = {"attention": lambda: head.attention, "matrix": head.attention.dense}
    if head.scores is not None or isinstance(head.attention, ScoredAttention):
        parts["scores"] = lambda: head.scores
    if values is not None:
        parts["values"] = lambda: values[:, head.group]
    return parts
