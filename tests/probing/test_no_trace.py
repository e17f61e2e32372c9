"""Measuring a model changes nothing in it, also after an exception: every family."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from depthscope.probing import probe
from traces import hooks_of, state_of
from zoo import ZOO, make


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Every tensor of what a model returns, however deep it lies in dictionaries, tuples and lists."""
    if isinstance(output, torch.Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def assert_the_same(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Bitwise, tensor by tensor, and there is something to compare."""
    assert len(expected) == len(found) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def call(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    """All tensors that the model returns, without PyTorch's fused fast path."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return tensors_in(output)


@pytest.mark.parametrize("name", ZOO)
def test_nothing_changes(name: str):
    model, inputs = make(name)
    model.eval()
    before = call(model, inputs)
    model.train()
    next(iter(model.children())).eval()  # a mixture of modes, to be restored as it was
    weights, state, random = copy.deepcopy(model.state_dict()), state_of(model), torch.get_rng_state()
    probe(model, inputs, measures="all", stations="all", gradients=name not in {"vit"})
    assert torch.equal(torch.get_rng_state(), random)
    assert state_of(model) == state
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    model.eval()
    assert_the_same(before, call(model, inputs))


@pytest.mark.parametrize("name", ZOO)
def test_the_pass_itself_is_bitwise_the_same(name: str):
    """What the model computes while it is measured is what it computes otherwise."""
    model, inputs = make(name)
    model.eval()
    expected = call(model, inputs)
    returned: list[Any] = []
    handle = model.register_forward_hook(lambda _m, _i, output: returned.append(output))
    probe(model, inputs, measures="all", stations="all")
    handle.remove()
    assert_the_same(expected, tensors_in(returned[-1]))


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("name", ZOO)
def test_nothing_changes_after_an_exception(name: str):
    model, inputs = make(name)
    model.train()
    parts = [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.Linear)]
    calls = 0

    def fail(_module: nn.Module, _args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise Broken

    hooks = hooks_of(model)
    handles = [part.register_forward_pre_hook(fail) for part in parts]
    state, random = state_of(model), torch.get_rng_state()
    with pytest.raises(Broken):
        probe(model, inputs, measures="all", stations="all")
    assert state_of(model) == state
    assert torch.equal(torch.get_rng_state(), random)
    for handle in handles:
        handle.remove()
    assert hooks_of(model) == hooks


def test_a_listener_that_fails_leaves_no_trace():
    model, inputs = make("torch")
    state = state_of(model)

    def fail() -> None:
        raise Broken

    with pytest.raises(Broken):
        probe(model, inputs, measures="spectral", progress=fail)
    assert state_of(model) == state


def test_the_mutant_that_forgets_a_hook_is_seen():
    model, _ = make("bert")
    state = state_of(model)
    model.encoder.layer[0].register_forward_hook(lambda *_: None)
    assert state_of(model) != state
