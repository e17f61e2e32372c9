"""The attention that is recomputed head by head is the one that the fused kernel applies."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from depthscope.anatomy import anatomy_of
from depthscope.hooks import Head, ListenToAttention, Machine, Visit
from depthscope.hooks.attention import attention_by_head
from samples import seeded
from zoo import ZOO, make

LEFT_OUT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)[:, None, None, :]  # (batch, 1, 1, m)
BIAS = torch.randn(1, 6, 5, 5, generator=seeded(9), dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "masked": {"attn_mask": LEFT_OUT},
    "biased": {"attn_mask": BIAS},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_every_head_reads_the_keys_and_values_of_its_group(groups: int, options: str):
    q = torch.randn(2, 6, 5, 4, generator=seeded(0), dtype=torch.float64)
    k, v = (torch.randn(2, groups, 5, 4, generator=seeded(seed), dtype=torch.float64) for seed in (1, 2))
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=groups < 6, **OPTIONS[options])
    heads = list(attention_by_head(q, k, enable_gqa=groups < 6, **OPTIONS[options]))
    assert [head.number for head in heads] == list(range(6))
    found = torch.stack([head.attention @ v[:, head.group] for head in heads], dim=1)
    assert_close(found, expected, rtol=0, atol=1e-12)


# Falcon's attention cannot be exchanged, and says other weights than it uses.
ATTENDING = [
    name for name, s in ZOO.items() if s.causal and s.hidden_states and s.attending is None and "falcon" not in name
]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ATTENDING)
def test_what_is_heard_is_what_the_model_says(name: str, implementation: str):
    """The weights of `output_attentions=True`: with sliding windows, capped scores, a sink that takes its share."""
    model, inputs = make(name)
    model = model.double().eval()
    if implementation == "sdpa" and (name == "gemma2" or not model._supports_sdpa):
        pytest.skip("transformers has no such attention, or leaves Gemma 2's cap out of it")
    heard: list[Tensor] = []

    def keep(_visit: Visit, _kind: str, heads: Iterator[Head], _values: Tensor | None) -> None:
        heard.append(torch.stack([head.attention.dense() for head in heads], dim=1))

    model.set_attn_implementation(implementation)
    with torch.no_grad(), Machine(model, anatomy_of(model), ListenToAttention(keep)):
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        said = model(**inputs, output_attentions=True).attentions
    assert len(heard) == len(said) == ZOO[name].blocks
    for ours, theirs in zip(heard, said, strict=True):
        assert_close(ours[0].to(theirs), theirs[0], rtol=0, atol=1e-6)  # many make their softmax in float32
        assert_close(ours[1, :, :4].to(theirs), theirs[1, :, :4], rtol=0, atol=1e-6)  # the rest is padding
    if name == "gpt-oss":
        assert (heard[0].sum(dim=-1) < 1 - 1e-9).all()
