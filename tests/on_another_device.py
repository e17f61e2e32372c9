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
    [{}, {"stations": "trunk"}, {"stations": "all", "exclude_tokens": "outliers"}, {"gradients": True}],
    ids=["default", "trunk", "without outliers", "gradients"],
)
def test_a_device_is_asked_once_for_a_pass_however_deep(
    make: Callable[[int], nn.Module], inputs: Any, blocks: int, options: dict[str, Any]
):
    plain, other = on_both(make, inputs, blocks)
    with pretended() as transfers:
        found = other.probe(**options)
        passes = 2 if "gradients" in options else 1  # a pass of its own
        assert pretended_device.ours() == passes, transfers
    same(plain.probe(**options), found)
