"""On another device: nothing meets a tensor of the CPU, the numbers are the CPU's, and the host waits once per pass."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from pandas.testing import assert_frame_equal
from torch import nn

import depthscope
import pretended_device
from depthscope import remedies
from pretended_device import OTHER, pretended, to_other
from samples import seeded

TOKENS = torch.randn(2, 9, 16, generator=seeded(0))
IDS = {"input_ids": torch.randint(1, 50, (2, 9), generator=seeded(1)), "attention_mask": torch.ones(2, 9).long()}
IDS["attention_mask"][1, 6:] = 0


def encoder(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False).eval()


def gpt(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": blocks, "n_embd": 16, "n_head": 4, "vocab_size": 50, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, attn_implementation="eager")).eval()


MODELS = [(encoder, TOKENS), (gpt, IDS)]
models = pytest.mark.parametrize(("make", "inputs"), MODELS, ids=["encoder", "gpt2"])


def on_both(make: Callable[[int], nn.Module], inputs: Any, blocks: int) -> tuple[depthscope.Scope, depthscope.Scope]:
    """The same model and inputs on the CPU and on the device; the second has been settled."""
    model = make(blocks)
    with pretended():
        other = depthscope.Scope(to_other(copy.deepcopy(model)), to_other(inputs))
        other.causality()
    return depthscope.Scope(model, inputs), other


def same(one: Any, other: Any) -> None:
    free = {"rtol": 1e-4, "atol": 1e-6, "check_exact": False, "check_dtype": False}
    one_frame, other_frame = one.frame, other.frame
    assert_frame_equal(one_frame, other_frame, **free)


def test_tensors_of_two_devices_do_not_meet():
    x = to_other(TOKENS)
    with pretended() as transfers:
        assert (x + 1).device == OTHER
        with pytest.raises(RuntimeError, match="two devices"):
            x + TOKENS
        assert torch.equal((x * 2).cpu(), 2 * TOKENS)
        x[x > 0].sum().item()
    assert sum(transfers.values()) == 3


@models
def test_a_scope_is_settled_with_two_transfers(make: Callable[[int], nn.Module], inputs: Any):
    model, given = to_other(make(3)), to_other(inputs)
    with pretended():
        scope = depthscope.Scope(model, given)
        scope.causality()
        assert pretended_device.ours() <= 2


@models
@pytest.mark.parametrize("blocks", [2, 6])
@pytest.mark.parametrize(
    "options",
    [{}, {"stations": "trunk"}, {"stations": "all", "exclude_tokens": [0]}, {"gradients": True}],
    ids=["light", "trunk", "without outliers", "gradients"],
)
def test_a_device_is_asked_once_for_a_pass_however_deep(
    make: Callable[[int], nn.Module], inputs: Any, blocks: int, options: dict[str, Any]
):
    plain, other = on_both(make, inputs, blocks)
    options = {"measures": "light", **options}  # those of a verdict ask on the way: see the next test
    with pretended() as transfers:
        found = other.probe(**options)
        passes = 2 if "gradients" in options else 1  # a pass of its own
        assert pretended_device.ours() == passes, transfers
    same(plain.probe(**options), found)


@models
@pytest.mark.parametrize("blocks", [2, 6])
@pytest.mark.parametrize("measures", ["verdict", "spectral", "all"])
def test_what_needs_an_answer_on_the_way_is_known(
    make: Callable[[int], nn.Module], inputs: Any, blocks: int, measures: str
):
    """Two measures choose between a cheap way and a costly one: each answer is far cheaper than the costly way."""
    plain, other = on_both(make, inputs, blocks)
    with pretended() as transfers:
        found = other.probe(measures=measures, stations="output")
    counts = {line.split(":")[0]: number for line, number in transfers.items() if not line.startswith("not ours")}
    energy, eigenvalues = "measures/energy.py", "measures/attention.py"  # at each output; of each of four heads
    assert counts.pop(energy, 0) <= blocks + 2
    assert counts.pop(eigenvalues, 0) <= 4 * blocks
    assert counts.pop("probing/measurement.py", 0) <= blocks  # whether a block reads sinks
    assert counts == {"transfers.py": 1}
    same(plain.probe(measures=measures, stations="output"), found)


@models
def test_the_use_of_depth_is_the_same(make: Callable[[int], nn.Module], inputs: Any):
    asked = {}
    for blocks in (3, 6):
        plain, other = on_both(make, inputs, blocks)
        with pretended():
            found = other.depth()
            asked[blocks] = pretended_device.ours()
        same(plain.depth(), found)
    assert asked[6] - asked[3] <= 3 * 2  # a pass without each block: the mask's tokens, and the loss's


@models
@pytest.mark.parametrize("verb", ["fix", "recommend", "capture"])
def test_other_verbs_mix_no_devices(make: Callable[[int], nn.Module], inputs: Any, verb: str):
    _, other = on_both(make, inputs, 3)
    with pretended():
        getattr(other, verb)(*(["output"] if verb == "capture" else []))


def test_spectra_are_the_same():
    plain, other = on_both(gpt, IDS, 3)
    with pretended():
        found = other.spectra()
        assert pretended_device.ours() <= 5 * 3
    same(plain.spectra(), found)


REMEDIES = [
    depthscope.DeEscalate(),
    remedies.ContraNorm(),
    remedies.PairNorm(),
    remedies.MVSplit(),
]


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: type(remedy).__name__)
def test_a_remedy_asks_nothing_in_a_step_of_training(remedy: Any):
    model = gpt(3)
    other = to_other(copy.deepcopy(model))
    plain = depthscope.apply(model, remedy)
    assert plain is not None
    with pretended() as transfers:
        depthscope.apply(other, copy.deepcopy(remedy))
        given = to_other(IDS)
        transfers.clear()
        logits = other(**given).logits
        logits.square().mean().backward()
        assert pretended_device.ours() == 0, transfers
        torch.testing.assert_close(logits.detach().cpu(), model(**IDS).logits.detach(), rtol=1e-4, atol=1e-6)


@models
def test_a_watched_step_asks_once_and_others_never(make: Callable[[int], nn.Module], inputs: Any):
    model, given = to_other(make(3)), to_other(inputs)
    with pretended() as transfers, depthscope.watch(model, every=2):
        optimiser = torch.optim.SGD(model.parameters(), 0.01)
        asked = []
        for _ in range(4):
            transfers.clear()
            model.train()
            returned = model(**given) if isinstance(given, dict) else model(given)
            getattr(returned, "logits", returned).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
            asked.append(pretended_device.ours())
    assert asked == [1, 0, 1, 0]
