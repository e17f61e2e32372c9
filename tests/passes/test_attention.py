"""The attention that is recomputed head by head is the one that the fused kernel applies."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from depthscope.passes.attention import attention_by_head
from samples import seeded

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
