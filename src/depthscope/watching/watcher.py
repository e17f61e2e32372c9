"""A `Watch`: depth during training. Every `every` steps, the tokens are measured block by block as they pass."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from depthscope.discovery import Hints, anatomy_with_hints, pieces_of
from depthscope.hooks import Listen, Visit, full_precision
from depthscope.offloading import device_of
from depthscope.probing.finite import in_words
from depthscope.probing.measurement import Measurement
from depthscope.probing.roles import gradient_scalars
from depthscope.safety import undone, unhook
from depthscope.watching import loop
from depthscope.watching.gate import Alarm, DepthAlarm, Gate, Means
from depthscope.watching.gradients import GradientTaps
from depthscope.watching.loop import Counter, End, GuardedMachine, Steps
from depthscope.watching.pictures import heat_map
from depthscope.watching.records import (
    Curves,
    Record,
    append,
    by_block,
    check_appendable,
    curves_of,
    frame_of_records,
    means_of,
)

OnRecord = Callable[[int, dict[str, float]], object]
OnAlarm = Callable[[Alarm], object]


class Watch:
    """Open between `__enter__` and `__exit__` (or `open` and `close`); what was seen stays readable."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        measures: tuple[str, ...],
        stations: frozenset[str],
        hints: Hints,
        gate: Gate,
        *,
        gradients: bool = False,
        on_record: OnRecord | None = None,
        path: str | os.PathLike[str] | None = None,
        on_alarm: OnAlarm | None = None,
    ):
        self.every = every
        self.gate = gate
        self.on_alarm = on_alarm
        self.alarms: list[Alarm] = []  # all that were raised
        # The last good checkpoint of who trains, if that is known: no later than the step.
        self.find_checkpoint: Callable[[int | None], Path | None] | None = None
        self.on_record = on_record
        self.path = None if path is None else Path(path)
        self._entrance = model  # what the training loop calls
        self._model = loop.inside(model)
        device_of(self._model)  # refuses a model without weights
        loop.refuse_compiled_in_place(model)
        self._measures, self._stations = measures, stations
        anatomy = anatomy_with_hints(self._model, hints)
        self._measurement = self._new_measurement()
        self._machine = GuardedMachine(
            self._guarded,
            self._model,
            anatomy,
            Listen(self._measurement.stations_to_hear(), self._see_tokens),
            hears_call=self._entrance is not self._model,
        )
        self._records: list[Record] = []
        self._lasts: dict[str, int] = {}  # by part, the last block that ran
        self._is_open = False
        self._was_opened = False
        self._listens = False  # a watched pass has begun and has not ended
        self._eager = ExitStack()  # what keeps compiled parts from being called during it
        self._gradients = True  # whether there were any when the watch was opened
        self._passes = 0  # training passes so far; unused once steps are announced
        self._steps = Steps(model)  # which a plain loop makes; unused once steps are announced
        self._announced: int | None = None  # the running step, if steps are announced
        self._due = False  # the announced step is to be watched, and has not been yet
        self._complained = False
        self._gave_up = False  # something of ours has failed
        self._is_packed = False  # which was said
        self._is_broken = False  # a sequence was not finite, which was said
        self._taps = GradientTaps(self._machine, self._add_gradients, self._guarded) if gradients else None

    # --- reading ----------------------------------------------------------------------------------

    @property
    def records(self) -> pd.DataFrame:
        """step, block (0 is what enters block 1), station, measure, value (the mean over the batch)."""
        self._flush_gradients(only_if_come=True)
        return frame_of_records(self._records)

    @property
    def last_step(self) -> int | None:
        """The step that was watched last."""
        return self._records[-1].step if self._records else None

    def scalars(self) -> dict[str, float]:
        """The last watched step in a handful of numbers (see `Record.scalars`); empty before the first."""
        self._flush_gradients(only_if_come=True)
        return self._records[-1].scalars() if self._records else {}

    @property
    def should_stop(self) -> bool:
        """Whether a rule of `stop_if` has held for as long as it asks: here, in this process."""
        self._flush_gradients(only_if_come=True)  # a weight without a gradient would keep the rule waiting for a step
        return self.gate.should_stop

    def should_stop_together(self) -> bool:
        """The same, agreed: true in every process of torch.distributed if it is true in one.

        Call it in every process at the same place, e.g. at the end of each step; in one process it is `should_stop`.
        """
        return loop.in_any_process(self.should_stop, device_of(self._model))

    def heat_map(self, measure: str = "token_similarity", station: str = "output") -> Any:
        """A matplotlib figure, block × step."""
        return heat_map(self.records, measure, station)

    # --- watching ---------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        return self.open()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._leave()
        except BaseException:
            self._leave()  # Ctrl-C fell into it
            raise
        if kind is None and self._passes == 0 and self._announced is None:
            warnings.warn("no training pass was seen: was the model in training mode (model.train())?", stacklevel=2)

    def open(self) -> Watch:
        """Begins to count; for loops without a `with`."""
        if self._is_open:
            raise ValueError("this watch is open already")
        if self.path is not None and loop.is_first_process():
            check_appendable(self.path)
        self._gradients = torch.is_grad_enabled()
        try:
            self._is_open = self._was_opened = True
            self._steps.open()
            self._entrance.register_forward_pre_hook(Counter(self, self._before_pass), with_kwargs=True)
            return self
        except BaseException:
            self.close()  # an interrupt: nobody would do it
            raise

    def close(self) -> None:
        """Takes every hook out. May be called more than once."""
        self._end_pass()
        self._flush_gradients()
        self._steps.close()
        unhook([self._entrance], lambda hook: isinstance(hook, Counter) and hook.owner is self)
        self._is_open = False

    def _leave(self) -> None:
        if self._listens:
            torch.set_grad_enabled(self._gradients)  # the pass may have been broken off inside a no_grad of ours
        self.close()

    def step(self, number: int | None = None) -> None:
        """A step begins: the one after the last, or `number`. Call it before each step's first pass, or never."""
        if isinstance(number, float | Tensor):
            raise TypeError(f"expected the number of the step that begins, or nothing, got {number!r}; tell(loss=…)")
        if self._gave_up:
            return
        if not self._was_opened:
            raise ValueError("this watch is not open: write `with depthscope.watch(…) as watch:`, or watch.open()")
        self._flush_gradients()
        if self._passes > 0:
            raise ValueError("step() came after the first training pass: call it at the head of every step, or never")
        if self._due and not self._complained:
            self._complained = True
            warnings.warn(
                f"step {self._announced} was to be watched, and {type(self._entrance).__name__} was not called in "
                "training mode: is it the module that your loop calls, and was model.train() called?",
                stacklevel=2,
            )
        following = 0 if self._announced is None else self._announced + 1
        self._announced = following if number is None else number
        self._due = self._announced % self.every == 0

    def tell(self, *, loss: float | Tensor) -> None:
        """The loss of the step that runs, once per step: the gate says nothing while it falls."""
        if self.gate:
            self.gate.losses.tell(loss)

    def _before_pass(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called with these arguments: its hook calls this."""
        if self._listens:
            self._end_pass()  # the pass before this one failed, or was interrupted
        if not self._model.training or loop.in_backward():
            return
        self._flush_gradients()
        if self._announced is None:
            self._passes += 1
            begins = self._steps.begin_pass()  # with accumulation, later passes are of the same step
            step, due = self._steps.now, begins and self._steps.now % self.every == 0
        else:
            step, due, self._due = self._announced, self._due, False
        if due:
            with self._guarded():
                self._listen(step, args, kwargs)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What of ours fails inside ends the watch with a warning, and never the training step that it is in."""
        try:
            yield
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._gave_up:
            return
        self._gave_up = True
        if self._taps is not None:
            self._taps.close()
        self.close()
        rules = ", and its rules are asked no more" if self.gate else ""
        text = " ".join(str(error).split())
        why = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:200]}"
        warnings.warn(f"the watch ends here{rules}; the training goes on: {why}", stacklevel=2)

    def _listen(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Attaches everything for the pass that has just begun."""
        loop.refuse_compiled_in_place(self._entrance)
        loop.refuse_compiled_code()
        if not self._is_packed and pieces_of(kwargs) is not None:
            self._is_packed = True
            warnings.warn("sequences that are packed into one row (position_ids) are watched as one", stacklevel=2)
        self._measurement = self._new_measurement()
        with undone(self._end_pass, only_after_failure=True):
            self._listens = True
            if loop.has_compiled_parts(self._entrance):
                self._eager.enter_context(torch.compiler.set_stance("force_eager"))
            self._machine.__enter__()
            if self._taps is not None:
                self._taps.open(step)
            if not self._machine.hears_call:
                self._machine.begin_pass(args, kwargs)
            self._entrance.register_forward_hook(End(self, lambda *_: self._record(step)))
            # After a failure. It must leave itself in place: torch iterates over the hooks themselves then.
            self._entrance.register_forward_hook(End(self, lambda *_: self._stop_listening()), always_call=True)

    def _end_pass(self) -> None:
        """May be called again, and begins anew what an interrupt has broken off."""
        self._stop_listening()
        unhook([self._entrance], lambda hook: isinstance(hook, End) and hook.owner is self)
        self._listens = False

    def _stop_listening(self) -> None:
        if self._taps is not None:
            self._taps.end_pass()
        if self._machine.thread is not None:  # which is forgotten last, when it is closed
            self._machine.__exit__()
        self._eager.close()

    def _see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        self._lasts[visit.part] = visit.number
        if station == "input" and self._measurement.has_passed(visit, source):
            return
        with torch.no_grad(), full_precision(tokens):
            self._measurement.see_tokens(visit, station, tokens.detach(), source)

    def _record(self, step: int) -> None:
        found = None
        with self._guarded():
            found = self._measured(step)
        if found is None or self._gave_up:
            return
        record, means, broken = found
        self._records.append(record)
        self._write(record)
        if self.on_record is not None:
            self.on_record(step, record.scalars())
        if broken and not self._is_broken:
            self._is_broken = True
            warnings.warn(f"step {step}: not finite (NaN or infinity), so in no mean: {broken}", stacklevel=2)
        self._ask_gate(step, means)

    def _measured(self, step: int) -> tuple[Record, Means, str]:
        self._stop_listening()
        with torch.no_grad():
            self._measurement.end()
        self._end_pass()
        rows, broken = self._measurement.readings, self._measurement.not_finite
        self._measurement = self._new_measurement()
        if not rows:
            names = [block.name for block in self._machine.anatomy.blocks][:4]
            raise ValueError(
                f"none of the blocks {names} was seen at step {step}: name those that run with blocks=; "
                "of a compiled model, watch what torch.compile returned"
            )
        means = means_of(rows)
        some = 0 < len(broken) < max(len(row.values) for row in rows)  # of all, the means are nan
        return Record(step, curves_of(means)), means, in_words(broken) if some else ""

    def _write(self, record: Record) -> None:
        if self.path is None or not loop.is_first_process():
            return
        try:
            append(self.path, record)
        except OSError as error:  # a full disk: not worth a training
            warnings.warn(f"step {record.step} was watched but not written to {self.path}: {error}", stacklevel=2)

    def _flush_gradients(self, *, only_if_come: bool = False) -> None:
        """Some weights may never get a gradient: what has come is taken, unless a backward pass is still to come."""
        if self._taps is None or self._gave_up or (only_if_come and (loop.in_backward() or not self._taps.has_come)):
            return
        self._taps.flush()

    def _add_gradients(self, step: int, curves: Curves) -> None:
        """What the backward pass of the step that was watched last has given."""
        if not self._records or self._records[-1].step != step:
            return  # its forward pass failed
        self._records[-1] = record = self._records[-1].with_gradients(curves)
        self._write(record)
        if self.on_record is not None:
            self.on_record(step, gradient_scalars(curves))
        self._ask_gate(step, by_block(curves), late=True)

    def _ask_gate(self, step: int, means: Means, *, late: bool = False) -> None:
        alarms: list[Alarm] = []
        with self._guarded():
            alarms = self.gate.see(step, means, list(self._lasts.values()), late=late)
        for alarm in alarms:
            if self.find_checkpoint is not None:
                alarm = replace(alarm, checkpoint=self.find_checkpoint(alarm.good), knows_checkpoints=True)
            self.alarms.append(alarm)
            if self.on_alarm is not None:
                self.on_alarm(alarm)
            else:
                warnings.warn(str(alarm), DepthAlarm, stacklevel=2)

    def _new_measurement(self) -> Measurement:
        # A step passes once: with all care from the beginning, so that no look depends on those before it.
        return Measurement(self._measures, self._stations, outliers=True, wide=True)
