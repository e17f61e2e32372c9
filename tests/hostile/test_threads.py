"""Measurements in several threads: of different models one after the other, of one model refused."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import depthscope
import zoo
from traces import state_of


def in_threads(*acts: Any) -> list[Any]:
    """What each of them returned or raised, all begun at once."""
    found: list[Any] = [None] * len(acts)
    together = threading.Barrier(len(acts))

    def run(place: int) -> None:
        together.wait()
        try:
            found[place] = acts[place]()
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def frame(model: torch.nn.Module, inputs: Any) -> Any:
    return depthscope.probe(model, inputs, measures="spectral", stations="trunk").frame


def test_probes_of_different_models_give_the_numbers_of_each_alone():
    names = ["torch", "torch-tokens-first", "bert", "gpt2"]
    models = [zoo.make(name) for name in names]
    alone = [frame(model, inputs) for model, inputs in models]
    before = [state_of(model) for model, _ in models]
    functions, fast = (F.softmax, F.scaled_dot_product_attention), torch.backends.mha.get_fastpath_enabled()
    for _ in range(3):
        found = in_threads(*((lambda m=model, i=inputs: frame(m, i)) for model, inputs in models))
        for name, mine, expected in zip(names, found, alone, strict=True):
            assert not isinstance(mine, BaseException), (name, mine)
            assert mine.equals(expected), name
    assert (F.softmax, F.scaled_dot_product_attention) == functions
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert [state_of(model) for model, _ in models] == before


def test_a_second_probe_of_a_model_from_another_thread_is_refused_or_right():
    model, inputs = zoo.make("bert")
    expected = frame(model, inputs)
    refused = 0
    for _ in range(4):
        for found in in_threads(*[lambda: frame(model, inputs)] * 3):
            if isinstance(found, ValueError):
                assert "being measured already, in another thread" in str(found)
                refused += 1
            else:
                assert found.equals(expected)
    assert refused


def test_a_probe_from_a_hook_of_the_model_is_refused_and_of_a_copy_works():
    model, inputs = zoo.make("gpt2")
    expected = frame(model, inputs)
    twin, found = copy.deepcopy(model), []

    def measure_twin(*_: object) -> None:
        found.append(frame(twin, inputs))

    handle = model.register_forward_hook(measure_twin)
    assert frame(model, inputs).equals(expected)
    assert all(each.equals(expected) for each in found)
    handle.remove()
    handle = model.register_forward_hook(lambda *_: frame(model, inputs))
    before = state_of(model)
    with pytest.raises(ValueError, match="being measured already, in this thread"):
        frame(model, inputs)
    assert state_of(model) == before
    handle.remove()
    assert frame(model, inputs).equals(expected)


def test_what_another_thread_runs_is_not_heard():
    model, inputs = zoo.make("torch")
    other = {"src": torch.randn(2, 7, 16)}
    expected = frame(model, inputs)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            with torch.no_grad():
                model(**other)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for _ in range(5):
            assert frame(model, inputs).equals(expected)
    finally:
        stop.set()
        thread.join()
