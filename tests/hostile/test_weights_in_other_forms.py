"""Weights that are not plain numbers in one place: integers, parts of several processes, adapters that are saved alone.

What can be measured is measured; what cannot is refused in one sentence that says why.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import depthscope
from depthscope.models import BlockConfig, Encoder
from zoo import GROUPED, IDS

MESSAGE = "PEFT's save_pretrained writes adapters alone, and no record of remedies"


class Integers(Tensor):
    """As torchao's: it is a weight that linear layers can use, and that can be made into numbers, and nothing else."""

    kept: Tensor

    @staticmethod
    def __new__(cls, kept: Tensor) -> "Integers":
        return Tensor._make_wrapper_subclass(cls, kept.shape, dtype=kept.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, kept: Tensor):
        self.kept = kept

    def dequantize(self) -> Tensor:
        return self.kept

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "detach" in name or "aten.t.default" in name:
            return cls(function(args[0].kept))
        if "mm" in name or "linear" in name:
            return function(*(x.kept if isinstance(x, cls) else x for x in args), **(kwargs or {}))
        raise NotImplementedError(f"{cls.__name__} dispatch: attempting to run unimplemented operator {name}")


def llama() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)).eval()


def in_integers() -> nn.Module:
    model = llama()
    for layer in [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]:
        layer.weight = nn.Parameter(Integers(layer.weight.detach()), requires_grad=False)
    return model


def test_weights_of_a_class_of_their_own_are_measured():
    plain, ours = (depthscope.probe(model, IDS, measures="all") for model in (llama(), in_integers()))
    for name in plain.names():
        np.testing.assert_allclose(ours.curve(name), plain.curve(name), rtol=1e-6, equal_nan=True)
    found, expected = (depthscope.spectra(model, whole=False).by_block for model in (in_integers(), llama()))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert depthscope.fix(in_integers(), IDS, tau=0.3).after.depth == 3


@pytest.mark.filterwarnings("ignore")
def test_quantized_layers_name_the_cause():
    model = torch.ao.quantization.quantize_dynamic(llama(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"no gradient passes through quantized layers.*as it was before"):
        depthscope.probe(model, IDS, gradients=True)
    with pytest.raises(ValueError, match="got a quantized Linear: take the model as it was before it was quantized"):
        depthscope.spectra(model)


def test_spectra_refuse_weights_of_several_processes(monkeypatch: pytest.MonkeyPatch):
    model = llama()
    monkeypatch.setattr(nn.Parameter, "device_mesh", None, raising=False)  # as a DTensor has, under fully_shard
    with pytest.raises(ValueError, match=r"block 1: its weights are spread over processes \(fully_shard"):
        depthscope.spectra(model)


class Adapted(Encoder):
    """What PEFT puts around a model looks like this to us."""

    peft_config: Any = {"default": None}  # noqa: RUF012
    config: Any = type("Config", (), {})()

    def save_pretrained(self) -> None: ...


def test_adapters_that_are_saved_alone_lose_the_record():
    model = Adapted(2, BlockConfig(16, 4))
    with pytest.warns(UserWarning, match=f"{MESSAGE}: apply these again after loading"):
        depthscope.apply(model, depthscope.DeEscalate(0.3))
    with pytest.raises(ValueError, match=f"records no remedies: {MESSAGE}; apply them again"):
        depthscope.restore(depthscope.remove(model))
