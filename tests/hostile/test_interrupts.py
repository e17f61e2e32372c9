"""Ctrl-C anywhere leaves no trace: no hook, no mode, no patched function, no random number drawn."""

import contextlib
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import depthscope
import zoo
from depthscope import safety
from depthscope.remedies import DeEscalate, LearnableTau, recommend
from depthscope.watching import Watch
from interrupts import LineCounter, Places
from traces import state_of

POINTS = 12  # lines at which each act is interrupted


def watch_a_pass(model: nn.Module, inputs: Any) -> None:
    """The random numbers of its dropout are the pass's own."""
    with torch.random.fork_rng(), depthscope.watch(model, every=1):
        model(**inputs) if isinstance(inputs, dict) else model(inputs)


ACTS: dict[str, Callable[[nn.Module, Any], object]] = {
    "probe": lambda model, inputs: depthscope.probe(model, inputs, measures="spectral", gradients=True),
    "skip_loss": lambda model, inputs: depthscope.skip_loss(model, inputs, loss=lambda output: output[0].sum()),
    "recommend": lambda model, inputs: recommend(model, inputs, weigh_branches=False),
    "apply": lambda model, inputs: depthscope.apply(model, DeEscalate(LearnableTau())),
    "an apply that fails": lambda model, inputs: depthscope.apply(model, DeEscalate(0.3), DeEscalate(0.2)),
    "watch": watch_a_pass,
    "fix": lambda model, inputs: depthscope.fix(model, inputs, tau=0.3),
}


def everything(model: nn.Module) -> tuple[Any, ...]:
    numbers = np.random.get_state()[1].tolist()  # noqa: NPY002
    records = getattr(getattr(model, "config", None), "depthscope_remedies", None)
    modes = len(_get_current_function_mode_stack())
    assert not safety._MEASURING  # else another thread would wait for it for ever
    return state_of(model), torch.get_rng_state().tolist(), random.getstate(), numbers, modes, records


def run(act: Callable[[nn.Module, Any], object], model: nn.Module, inputs: Any, line: int | None) -> LineCounter:
    """Runs it; what it puts in to stay is taken out."""
    counter = LineCounter(line)
    interrupted = False
    with contextlib.suppress(ValueError):  # of an apply that fails
        interrupted = counter.run(lambda: act(model, inputs))
    if not interrupted:
        depthscope.remove(model)
    return counter


@pytest.mark.parametrize("name", ["bert", "torch-tokens-first"])
@pytest.mark.parametrize("act", ACTS)
def test_an_interrupt_leaves_no_trace(act: str, name: str):
    model, inputs = zoo.make(name)
    model.train()
    before = everything(model)
    lines = run(ACTS[act], model, inputs, None).lines
    assert everything(model) == before
    chosen = random.Random(0).sample(range(1, lines + 1), POINTS)
    for line in [*chosen, *range(lines - 10, lines + 1)]:  # the last lines are those of clean-up
        where = run(ACTS[act], model, inputs, line).where
        assert everything(model) == before, where


@pytest.mark.parametrize("name", ["bert", "torch-tokens-first"])
def test_of_a_watch_every_line_that_opens_or_closes_may_be_interrupted(name: str):
    """Except the first of `__exit__`: there Python has not begun to leave, as if the signal had come before it."""
    model, inputs = zoo.make(name)
    model.train()
    before = everything(model)
    lines = inspect.getsourcelines(Watch.__exit__)
    first = f"{inspect.getsourcefile(Watch)}:{lines[1] + 1}"
    places = Places("watcher.py", "safety.py", "machine.py")
    places.run(lambda: watch_a_pass(model, inputs))
    assert any(place == first for place in places.found)
    for place, numbers in places.found.items():
        for number in {numbers[0], numbers[-1]} if place != first else ():
            assert run(watch_a_pass, model, inputs, number).where == place
            assert everything(model) == before, place


def test_an_interrupted_remove_can_be_begun_anew():
    model, _ = zoo.make("bert")
    before = everything(model)
    depthscope.apply(model, DeEscalate(0.3))
    counter = LineCounter()
    counter.run(lambda: depthscope.remove(model))
    assert everything(model) == before
    for line in range(1, counter.lines + 1, counter.lines // 40):
        depthscope.apply(model, DeEscalate(0.3))
        assert LineCounter(line).run(lambda: depthscope.remove(model))
        depthscope.remove(model)
        assert everything(model) == before
