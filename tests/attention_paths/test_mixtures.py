"""Hugging Face's mixtures of experts as they are by default, and models whose numbers or parts are not the usual."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoModel, GptOssConfig, LlamaConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

import depthscope
from attention_paths.test_paths import ready
from depthscope.attention_paths import paths
from depthscope.remedies import ResidualWeight

IDS = torch.arange(1, 13).view(2, 6)
SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MIXTURES = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "qwen2": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 8}),
    "qwen3": (Qwen3MoeConfig, {**EXPERTS, "head_dim": 4}),
    "gpt-oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}),
}


def made(config: Any, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModel.from_config(config(**{**SMALL, **options})).eval()


@pytest.mark.parametrize("name", MIXTURES)
def test_grouped_experts_are_as_one_by_one(name: str):
    config, options = MIXTURES[name]
    model = made(config, **options)
    found = paths(model, {"input_ids": IDS, "use_cache": False}, keep_terms=True)
    model.set_experts_implementation("eager")
    one_by_one = paths(model, {"input_ids": IDS, "use_cache": False}, keep_terms=True)
    assert found.terms is not None
    assert found.metadata["heads"] == [4, 4, 4]
    assert_close(found.terms, one_by_one.terms, rtol=1e-4, atol=1e-5)  # float32, other orders of sums


def test_numbers_that_are_not_finite_are_the_model_s():
    model = made(LlamaConfig, attn_implementation="eager").double()
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match=r"block 1 \(layers.0\): the model itself gives .* not finite .* padding"):
        paths(model, {"input_ids": IDS, "attention_mask": mask})


def test_parts_that_are_left_out_are_refused_and_remedies_named():
    model, inputs = ready("bert")
    with depthscope.ablate(model, "skips"), pytest.raises(ValueError, match="without its skips now: close"):
        paths(model, inputs)
    depthscope.apply(model, ResidualWeight(0.5))
    notes = paths(model, inputs).metadata["notes"]
    assert "the model has remedies (ResidualWeight): the paths are those of the changed model" in notes
