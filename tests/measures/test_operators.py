"""Attention as an operator equals the matrix that it stands for, in one piece or in many."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from depthscope.measures import DenseAttention, ScoredAttention, operators
from samples import seeded

N, M, D = 9, 7, 4


def scored(mask: Tensor | None = None, causal: bool = False, keys: int = M) -> ScoredAttention:
    query, key = (torch.randn(2, n, D, dtype=torch.float64, generator=seeded(n)) for n in (N, keys))
    return ScoredAttention(query, key, D**-0.5, mask, causal)


def oracle(p: ScoredAttention) -> Tensor:
    """PyTorch's own attention, applied to the unit vectors."""
    values = torch.eye(p.key.shape[-2], dtype=torch.float64).expand(2, -1, -1)
    return F.scaled_dot_product_attention(p.query, p.key, values, attn_mask=p.mask, is_causal=p.causal, scale=p.scale)


MASKS = {
    "none": scored(),
    "causal": scored(causal=True, keys=N),
    "boolean": scored(torch.rand(2, N, M, generator=seeded(3)) < 0.7),
    "broadcast": scored((torch.arange(M) < 5)[None, None]),
    "additive": scored(torch.randn(2, N, M, dtype=torch.float64, generator=seeded(4))),
}


@pytest.mark.parametrize("rows", [1, 2, 4, 100])
@pytest.mark.parametrize("kind", MASKS)
def test_the_operator_is_the_matrix(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    p = MASKS[kind]
    matrix = oracle(p)
    monkeypatch.setattr(operators, "TILE", 1)
    monkeypatch.setattr(operators, "_FEWEST", rows)  # how many rows are made at a time
    x = torch.randn(2, p.shape[-1], 3, dtype=torch.float64, generator=seeded(5))
    assert p.shape == matrix.shape
    assert_close(p.dense(), matrix, rtol=0, atol=1e-14)
    assert_close(p @ x, matrix @ x, rtol=0, atol=1e-13)
    dense = DenseAttention(matrix)
    assert_close(dense @ x, matrix @ x, rtol=0, atol=1e-14)
    assert dense.dense() is matrix


def test_vectors_of_another_length_are_refused_and_half_precision_is_widened():
    p = scored()
    with pytest.raises(ValueError, match=f"columns of .*{M}, k.*got shape"):
        p @ torch.ones(2, M + 1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="columns of"):
        p @ torch.ones(M, dtype=torch.float64)
    half = ScoredAttention(p.query.float(), p.key.float(), p.scale)
    values = torch.randn(2, M, 3, generator=seeded(7)).bfloat16()
    assert_close(half @ values, half.dense() @ values.float(), rtol=0, atol=1e-6)


def test_a_row_that_may_look_nowhere_is_nan():
    p = scored(torch.zeros(2, N, M, dtype=torch.bool))
    assert p.dense().isnan().all()
