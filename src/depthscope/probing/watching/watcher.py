"""`watch`: depth during training. Every `every` steps, the tokens are measured block by block as they pass."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

import pandas as pd
import torch
from torch import Tensor, nn

from depthscope.measures import choose_measures
from depthscope.passes import (
    Listen,
    Machine,
    Told,
    Visit,
    anatomy_as_told,
    device_of,
    full_precision,
    pieces_of,
)
from depthscope.passes.undoing import undone, unhook_one
from depthscope.probing.finite_sequences import in_words
from depthscope.probing.reduction import Reduction
from depthscope.probing.roles import OF_GRADIENTS, gradient_scalars
from depthscope.probing.watching import wrapped
from depthscope.probing.watching.gate import Alarm, DepthAlarm, Gate, Means, Rules, at_checkpoint, make_gate
from depthscope.probing.watching.gradients import GradientTaps
from depthscope.probing.watching.heat_map import heat_map
from depthscope.probing.watching.hooks import Counter, End
from depthscope.probing.watching.options import check_options
from depthscope.probing.watching.records import (
    Curves,
    Record,
    append_or_warn,
    by_block,
    check_appendable,
    curves_of,
    frame_of_records,
    means_of,
)
from depthscope.stations import choose_stations

OnRecord = Callable[[int, dict[str, float]], object]
OnAlarm = Callable[[Alarm], object]


def watch(
    model: nn.Module,
    every: int = 50,
    *,
    measures: str | Sequence[str] = ("token_similarity", "cosine_similarity"),
    stations: str | Sequence[str] = ("output",),
    on_record: OnRecord | None = None,
    path: str | os.PathLike[str] | None = None,
    gradients: bool = False,
    stop_if: Rules | None = None,
    warn_if: Rules | None = None,
    on_alarm: OnAlarm | None = None,
    **told: Unpack[Told],
) -> Watch:
    """Watches a model while it is trained, in any loop:

        with depthscope.watch(model, every=50) as watch:
            for batch in loader: …
        watch.heat_map()

    **Steps.** Each forward pass in training mode is a step; the first is step 0, and steps 0, `every`,
    2·`every`, … are watched. Passes in eval mode, and those that activation checkpointing repeats during
    the backward pass, do not count. If a step is more than one pass (gradient accumulation, two views of
    an image), or to continue with the numbers of an earlier run, say at the head of the loop that a step
    begins: `watch.step()` or `watch.step(number)`. Then the first training pass of a watched step is
    measured.

    **What is done.** On a watched step hooks reduce the tokens to numbers as they pass, under no_grad;
    there is no second pass, and nothing of the tokens' size is kept. Between watched steps there is one
    hook on the model, which counts. Outputs, gradients, weights and random state are bitwise those of
    training without a watch; after the end, or an exception, no hook is left. Padding is left out by the
    mask that the model is called with. Remedies, whenever they are put in, are seen with their effect.

    **Wrapped models.** Of DistributedDataParallel, and of `torch.compile(model)`, pass the wrapper. A
    watched step of a compiled model, or of one with compiled parts, runs uncompiled; all others run the
    compiled graph, unbroken. Refused: a model compiled in place as a whole (`model.compile()`), and a call
    from compiled code of a model that was given without its wrapper.

    `measures` and `stations` are those of `probe`, and so is what you may say of the model (`told`: `blocks`, `part`,
    `token_axis`, `causal`, `mask`); measures of attention matrices are refused.
    `on_record(step, scalars)` is called after each watched pass, e.g. with a tracker's log function.
    `path` gets one line of JSON per watched step, appended (by the first process only, if there are several);
    `load_records(path)` reads it.

    **Gradients.** `gradients=True` also takes the backward pass of a watched step: the norm of each block's gradient
    by role (as `probe(gradients=True)`, at station `output`), and at `attention_branch` and `ffn_branch` the
    `mean_coherent_share` of the gradient of the matrix that writes them. They are as autograd makes them, before
    clipping, unscaling and other processes' parts. They come later than the rest: `on_record` is called once more, with
    the step and their scalars, and the line of the step is written again with them (`load_records` reads the last).

    **The gate.** `stop_if` and `warn_if` are rules, or lists of rules: `"token_similarity>0.99 for 3"` holds if the
    last block has that value at three watched steps in a row (`depthscope.conditions` has the language). A rule
    that has held long enough raises an `Alarm`: which block, since when, which value, what it means. `on_alarm` is
    called with it; without, it is a warning (`DepthAlarm`). A rule of `stop_if` also sets `should_stop`:

        with depthscope.watch(model, every=50, stop_if="token_similarity>0.99 for 3") as watch:
            for batch in loader:
                …
                if watch.should_stop:
                    break

    It is a flag and no exception, since an exception out of the model's forward pass would tear the step apart:
    half of its gradients, other processes that wait, a loop that does not come to save its work. With several
    processes each watches its own part of the batch: ask `watch.should_stop_together()` in all of them.
    A value that is undefined (nan) counts as one that holds.
    Rules on gradients (`queries_keys_gradient<1e-6`) need `gradients=True`, and are asked when they have come.
    """
    check_options(
        every,
        measures=measures,
        stations=stations,
        on_record=on_record,
        path=path,
        gradients=gradients,
        stop_if=stop_if,
        warn_if=warn_if,
        on_alarm=on_alarm,
    )
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model, a torch.nn.Module, to watch, got {model!r}")
    chosen, where = choose_measures(measures), choose_stations(stations)
    gate = make_gate(stop_if, warn_if, (*chosen, *(sorted(OF_GRADIENTS) if gradients else ())), where)
    found = Watch(model, every, chosen, where, told, on_record, path, gate, on_alarm)
    if gradients:
        found.take_gradients()
    return found


class Watch:
    """Open between `__enter__` and `__exit__` (or `open` and `close`); what was seen stays readable."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        measures: tuple[str, ...],
        stations: frozenset[str],
        told: Told,
        on_record: OnRecord | None,
        path: str | os.PathLike[str] | None,
        gate: Gate,
        on_alarm: OnAlarm | None,
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
        self._model = wrapped.inside(model)
        device_of(self._model)  # refuses a model without weights
        wrapped.refuse_compiled_in_place(model)
        self._measures, self._stations = measures, stations
        self._reduction = self._new_reduction()
        self._machine = Machine(
            self._model,
            anatomy_as_told(self._model, told),
            Listen(self._reduction.stations_to_hear(), self._see_tokens),
            hears_call=self._entrance is not self._model,
        )
        self._records: list[Record] = []
        self._lasts: dict[str, int] = {}  # by part, the last block that ran
        self._is_open = False
        self._listens = False  # a watched pass has begun and has not ended
        self._eager = ExitStack()  # what keeps compiled parts from being called during it
        self._gradients = True  # whether there were any when the watch was opened
        self._passes = 0  # training passes so far; unused once steps are announced
        self._announced: int | None = None  # the running step, if steps are announced
        self._due = False  # the announced step is to be watched, and has not been yet
        self._complained = False
        self._is_packed = False  # which was said
        self._is_broken = False  # a sequence was not finite, which was said
        self._taps: GradientTaps | None = None  # where gradients are asked for

    def take_gradients(self) -> None:
        """From the next watched step on, its backward pass is watched too."""
        self._taps = GradientTaps(self._machine, self._add_gradients)

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
        return wrapped.in_any_process(self.should_stop, device_of(self._model))

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
        if self.path is not None and wrapped.is_first_process():
            check_appendable(self.path)
        self._gradients = torch.is_grad_enabled()
        try:
            self._is_open = True
            self._entrance.register_forward_pre_hook(Counter(self), with_kwargs=True)
            return self
        except BaseException:
            self.close()  # an interrupt: nobody would do it
            raise

    def close(self) -> None:
        """Takes every hook out. May be called more than once."""
        self._end_pass()
        self._flush_gradients()
        unhook_one(self._entrance, lambda hook: isinstance(hook, Counter) and hook.watch is self)
        self._is_open = False

    def _leave(self) -> None:
        if self._listens:
            torch.set_grad_enabled(self._gradients)  # the pass may have been broken off inside a no_grad of ours
        self.close()

    def step(self, number: int | None = None) -> None:
        """A step begins: the one after the last, or `number`. Call it before each step's first pass, or never."""
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

    def before_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called with these: told by its hook."""
        if self._listens:
            self._end_pass()  # the pass before this one failed, or was interrupted
        if not self._model.training or wrapped.in_backward():
            return
        self._flush_gradients()
        if self._announced is None:
            step, due = self._passes, self._passes % self.every == 0
            self._passes += 1
        else:
            step, due, self._due = self._announced, self._due, False
        if due:
            self._listen(step, args, kwargs)

    def _listen(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Attaches everything for the pass that has just begun."""
        wrapped.refuse_compiled_in_place(self._entrance)
        wrapped.refuse_compiled_code()
        if not self._is_packed and pieces_of(kwargs) is not None:
            self._is_packed = True
            warnings.warn("sequences that are packed into one row (position_ids) are watched as one", stacklevel=2)
        self._reduction = self._new_reduction()
        with undone(self._end_pass, only_after_failure=True):
            self._listens = True
            if wrapped.has_compiled_parts(self._entrance):
                self._eager.enter_context(torch.compiler.set_stance("force_eager"))
            self._machine.__enter__()
            if self._taps is not None:
                self._taps.open(step)
            if not self._machine.hears_call:
                self._machine.begin_pass(args, kwargs)
            self._entrance.register_forward_hook(End(self, lambda: self._record(step)))
            # After a failure. It must leave itself in place: torch iterates over the hooks themselves then.
            self._entrance.register_forward_hook(End(self, self._stop_listening), always_call=True)

    def _end_pass(self) -> None:
        """May be called again, and begins anew what an interrupt has broken off."""
        self._stop_listening()
        unhook_one(self._entrance, lambda hook: isinstance(hook, End) and hook.watch is self)
        self._listens = False

    def _stop_listening(self) -> None:
        if self._taps is not None:
            self._taps.end_pass()
        if self._machine.thread is not None:  # which is forgotten last, when it is closed
            self._machine.__exit__()
        self._eager.close()

    def _see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        self._lasts[visit.part] = visit.number
        if station == "input" and self._reduction.has_passed(visit, source):
            return
        with torch.no_grad(), full_precision(tokens):
            self._reduction.see_tokens(visit, station, tokens.detach(), source)

    def _record(self, step: int) -> None:
        self._stop_listening()
        with torch.no_grad():
            self._reduction.end()
        self._end_pass()
        rows, broken = self._reduction.rows, self._reduction.not_finite
        self._reduction = self._new_reduction()
        if not rows:
            names = [block.name for block in self._machine.anatomy.blocks][:4]
            raise ValueError(
                f"none of the blocks {names} was seen at step {step}: name those that run with blocks=; "
                "of a compiled model, watch what torch.compile returned"
            )
        means = means_of(rows)
        record = Record(step, curves_of(means))
        self._records.append(record)
        self._write(record)
        if self.on_record is not None:
            self.on_record(step, record.scalars())
        if not self._is_broken and 0 < len(broken) < max(len(row.values) for row in rows):  # of all, the means are nan
            self._is_broken = True
            warnings.warn(f"step {step}: not finite (NaN or infinity), so in no mean: {in_words(broken)}", stacklevel=2)
        self._ask_gate(step, means)

    def _write(self, record: Record) -> None:
        if self.path is not None and wrapped.is_first_process():
            append_or_warn(self.path, record)

    def _flush_gradients(self, *, only_if_come: bool = False) -> None:
        """Some weights may never get a gradient: what has come is taken, unless a backward pass is still to come."""
        if self._taps is None or (only_if_come and (wrapped.in_backward() or not self._taps.has_come)):
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
        for alarm in self.gate.see(step, means, list(self._lasts.values()), late=late):
            self._raise(alarm)

    def _raise(self, alarm: Alarm) -> None:
        if self.find_checkpoint is not None:
            alarm = at_checkpoint(alarm, self.find_checkpoint(alarm.good))
        self.alarms.append(alarm)
        if self.on_alarm is not None:
            self.on_alarm(alarm)
        else:
            warnings.warn(str(alarm), DepthAlarm, stacklevel=2)

    def _new_reduction(self) -> Reduction:
        return Reduction(self._measures, self._stations, exclude=None)
