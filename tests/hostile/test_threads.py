"""Several threads: measurements of different models come one after the other, of one model they are refused; a model
that has a remedy can be called from all of them."""

import copy
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import depthscope
import zoo
from depthscope import safety
from depthscope.remedies import DeEscalate
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


def test_who_waits_long_for_another_thread_says_so_and_waits_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch):
    """A hook that waits for a thread which measures would wait for ever, as with any lock: this one gives up."""
    monkeypatch.setattr(safety, "PATIENCE", 0.2)
    model, inputs = zoo.make("gpt2")
    other, others = zoo.make("bert")
    expected, found = frame(other, others), []
    thread = threading.Thread(target=lambda: found.append(frame(other, others)))

    def wait_for_it(*_: object) -> None:
        if not thread.ident:
            thread.start()
        thread.join(1.0)

    handle = model.register_forward_hook(wait_for_it)
    said = "this BertModel waits to be measured until another thread has measured a GPT2LMHeadModel"
    with pytest.warns(UserWarning, match=said):
        frame(model, inputs)
    handle.remove()
    thread.join()
    assert found[0].equals(expected)


FORKED = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
import depthscope, torch, zoo
from torch.nn import functional as F

(slow, inputs), (other, others) = zoo.make("bert"), zoo.make("gpt2")
slow.train()
functions, fast = (F.softmax, F.scaled_dot_product_attention), torch.backends.mha.get_fastpath_enabled()
inside, forked = threading.Event(), threading.Event()
slow.encoder.layer[0].register_forward_hook(lambda *_: (inside.set(), forked.wait(60)) and None)
thread = threading.Thread(target=depthscope.probe, args=(slow, inputs))
thread.start()
assert inside.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(40)
    forked.set()
    code = 1
    try:
        assert (F.softmax, F.scaled_dot_product_attention) == functions
        assert torch.backends.mha.get_fastpath_enabled() == fast
        assert slow.training and torch.is_grad_enabled()
        depthscope.probe(other, others)
        depthscope.probe(slow, inputs)  # which is measured in the parent only
        code = 0
    finally:
        os._exit(code)
forked.set()
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_is_forked_while_another_thread_measures_can_measure():
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


# --- models with remedies -----------------------------------------------------------------------------


def padded(lengths: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Two sequences of ids, each real up to its length."""
    mask = (torch.arange(zoo.IDS.shape[1]) < torch.tensor(lengths).unsqueeze(-1)).long()
    return {"input_ids": zoo.IDS, "attention_mask": mask}


@pytest.mark.parametrize(("name", "station"), [("bert", "input"), ("llama", "after_attention"), ("gpt2", "ffn_input")])
def test_a_model_with_a_remedy_is_called_from_several_threads(name: str, station: str):
    model, _ = zoo.make(name)
    depthscope.apply(model.eval(), DeEscalate(0.9, at=station))
    calls = [padded(lengths) for lengths in ((2, 5), (5, 3), (4, 4))]

    def outputs(call: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(**call)[0] for _ in range(40)]

    alone = [outputs(call)[0] for call in calls]
    assert not torch.equal(alone[0], alone[1])
    found = in_threads(*((lambda c=call: outputs(c)) for call in calls))
    for mine, expected in zip(found, alone, strict=True):
        assert not isinstance(mine, BaseException), mine
        assert all(torch.equal(output, expected) for output in mine)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_finds_the_mask_of_its_pass_in_another_thread(reentrant: bool):
    """Of a model on a GPU the backward pass runs in a thread of autograd's own."""

    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        model, _ = zoo.make("bert")
        depthscope.apply(model, DeEscalate(0.7))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        loss = sum(model(**padded(lengths))[0].square().sum() for lengths in ((2, 5), (5, 3)))
        (failed,) = in_threads(loss.backward)
        assert failed is None
        return [p.grad for p in model.encoder.parameters()]

    for recomputed, plain in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-5)


def test_what_a_thread_knows_of_its_pass_is_neither_copied_nor_pickled():
    model, _ = zoo.make("bert")
    depthscope.apply(model.eval(), DeEscalate(0.9))
    expected = model(**padded((2, 5)))[0]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        running = next(hook.running for m in twin.modules() for hook in m._forward_pre_hooks.values())
        assert running.now.real is None
        assert running.now.block == ""
        assert torch.equal(twin(**padded((2, 5)))[0], expected)
