"""`watch`, and what can be known of its options without a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Unpack

from torch import nn

from depthscope.discovery import Hints, check_hints
from depthscope.measures import MEASURES, choose_measures
from depthscope.probing.roles import OF_GRADIENTS
from depthscope.stations import choose_stations
from depthscope.watching.gate import Gate, Rules, make_gate
from depthscope.watching.watcher import OnAlarm, OnRecord, Watch

_MEASURES, _STATIONS = ("token_similarity", "cosine_similarity"), ("output",)


def watch(
    model: nn.Module,
    every: int = 50,
    *,
    measures: str | Sequence[str] = _MEASURES,
    stations: str | Sequence[str] = _STATIONS,
    on_record: OnRecord | None = None,
    path: str | os.PathLike[str] | None = None,
    gradients: bool = False,
    stop_if: Rules | None = None,
    warn_if: Rules | None = None,
    on_alarm: OnAlarm | None = None,
    **hints: Unpack[Hints],
) -> Watch:
    """Watches a model while it is trained, in any loop:

        with depthscope.watch(model, every=50) as watch:
            for batch in loader: …
        watch.heat_map()

    **Steps.** A step is what an optimizer of PyTorch ends: the first training pass after `optimizer.step()`
    begins the next one. The first is step 0; steps 0, `every`, 2·`every`, … are watched, each in its first
    pass, so that gradient accumulation is one step. Where no optimizer of PyTorch has the model's weights,
    each training pass is a step. Passes in eval mode, and those that activation checkpointing repeats during
    the backward pass, do not count. To continue with the numbers of an earlier run, or where others make the
    steps, say at the head of the loop that a step begins: `watch.step()` or `watch.step(number)`.

    **What is done.** On a watched step hooks reduce the tokens to numbers as they pass, under no_grad;
    there is no second pass, and nothing of the tokens' size is kept. Between watched steps there is one
    hook on the model, which counts. Outputs, gradients, weights and random state are bitwise those of
    training without a watch; after the end, or an exception, no hook is left. Padding is left out by the
    mask that the model is called with. Remedies, whenever they are put in, are seen with their effect.

    **Wrapped models.** Of DistributedDataParallel, and of `torch.compile(model)`, pass the wrapper. A
    watched step of a compiled model, or of one with compiled parts, runs uncompiled; all others run the
    compiled graph, unbroken. Refused: a model compiled in place as a whole (`model.compile()`), and a call
    from compiled code of a model that was given without its wrapper.

    `measures` and `stations` are those of `probe`, and so is what you may say of the model (`hints`: `blocks`, `part`,
    `token_axis`, `causal`, `mask`); measures of attention matrices are refused.
    `on_record(step, scalars)` is called after each watched pass, e.g. with a tracker's log function.
    `path` gets one line of JSON per watched step, appended (by the first process only, if there are several);
    `load_records(path)` reads it.

    **Gradients.** `gradients=True` also takes the backward pass of a watched step: the norm of each block's gradient
    by role (as `probe(gradients=True)`, at station `output`), and at `attention_branch` and `ffn_branch` the
    `mean_coherent_share` of the gradient of the matrix that writes them. They are as autograd makes them, before
    clipping, unscaling and other processes' parts. They come later than the rest: `on_record` is called once more, with
    the step and their scalars, and the line of the step is written again with them (`load_records` reads the last).

    **The gate.** `stop_if` and `warn_if` are rules, or lists of rules: `"token_similarity>0.99 for 3"` holds if half of
    the blocks have that value at three watched steps in a row (`depthscope.conditions` has the language). A rule
    that has held long enough raises an `Alarm`: which blocks, since when, which value, what it means. `on_alarm` is
    called with it; without, it is a warning (`DepthAlarm`). A rule of `stop_if` also sets `should_stop`:

        with depthscope.watch(model, every=50, stop_if="token_similarity>0.99 for 3") as watch:
            for batch in loader:
                …
                watch.tell(loss=loss)
                if watch.should_stop:
                    break

    Tokens that are alike for a while are how a healthy model begins. So a rule says nothing before step 200 (its own
    number: `"… for 3 after 500"`), nor while the loss falls (`losses.Losses` has the definition). The loss is known if
    you tell it at every step.

    It is a flag and no exception, since an exception out of the model's forward pass would tear the step apart:
    half of its gradients, other processes that wait, a loop that does not come to save its work. With several
    processes each watches its own part of the batch: ask `watch.should_stop_together()` in all of them.
    A value that is undefined (nan) counts as one that holds.
    Rules on gradients (`queries_keys_gradient<1e-6`) need `gradients=True`, and are asked when they have come.
    """
    taken, where, gate = settled(
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
    return Watch(
        model, every, taken, where, hints, gate, gradients=gradients, on_record=on_record, path=path, on_alarm=on_alarm
    )


def settled(
    every: object,
    *,
    measures: str | Sequence[str] = _MEASURES,
    stations: str | Sequence[str] = _STATIONS,
    on_record: object = None,
    path: object = None,
    gradients: object = False,
    stop_if: Rules | None = None,
    warn_if: Rules | None = None,
    on_alarm: object = None,
    **hints: object,
) -> tuple[tuple[str, ...], frozenset[str], Gate]:
    """The measures, stations and rules of a watch. What can be known as wrong without the model is refused; what
    `hints` says needs it."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"expected every= to be a whole number of steps, 1 or more, got {every!r}")
    taken, where = choose_measures(measures), choose_stations(stations)
    if of_attention := [name for name in taken if MEASURES[name].of == "attention"]:
        raise ValueError(f"{', '.join(of_attention)}: attention matrices are not watched; use depthscope.probe")
    if not isinstance(gradients, bool):
        raise ValueError(f"expected gradients= to be True or False, got {gradients!r}")
    if on_alarm is not None and not callable(on_alarm):
        raise ValueError(f"expected on_alarm= to be a function of an alarm, got {on_alarm!r}")
    if on_record is not None and not callable(on_record):
        raise ValueError(f"expected on_record= to be a function of (step, scalars), got {on_record!r}")
    if path is not None and (not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path)):
        raise ValueError(f"expected path= to be the path of a file, got {path!r}")
    check_hints(hints)
    return taken, where, make_gate(stop_if, warn_if, (*taken, *(sorted(OF_GRADIENTS) if gradients else ())), where)
