"""Y = (I − τ 11ᵀ/n) X: the definition, masks, precision, degenerate sequences."""

import pytest
import torch
from torch.testing import assert_close

from depthscope.measures import token_diversity, token_similarity
from depthscope.remedies import deescalate
from samples import seeded


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_equals_the_matrix_and_multiplies_the_odds(tau: float):
    x = torch.randn(2, 7, 5, generator=seeded(0), dtype=torch.float64) + 1
    projection = torch.full((7, 7), 1 / 7, dtype=torch.float64)
    y = deescalate(x, tau)
    assert_close(y, (torch.eye(7, dtype=torch.float64) - tau * projection) @ x, rtol=0, atol=1e-13)
    odds_before, odds_after = (token_similarity(z) / token_diversity(z) for z in (x, y))
    assert_close(odds_after, (1 - tau) ** 2 * odds_before, rtol=1e-10, atol=1e-25)


def test_masked_equals_cropped_and_padding_is_left_alone():
    x = torch.randn(2, 9, 5, generator=seeded(0))
    x[:, 6:] = torch.nan
    y = deescalate(x, 0.5, torch.arange(9).expand(2, 9) < 6)
    assert_close(y[:, :6], deescalate(x[:, :6], 0.5))
    assert y[:, 6:].isnan().all()


def test_degenerate_sequences():
    x = torch.randn(2, 4, 3, generator=seeded(0))
    assert torch.equal(deescalate(x, mask=torch.zeros(2, 4)), x)
    assert_close(deescalate(x[:, :1], 0.25), 0.75 * x[:, :1])


def test_half_precision_keeps_its_type_and_accumulates_better():
    x = torch.full((5000, 2), 0.1, dtype=torch.bfloat16)
    y = deescalate(x)
    assert y.dtype == torch.bfloat16
    assert (y == 0).all()
    naive = sum(x.unbind(), torch.zeros(2, dtype=torch.bfloat16)) / 5000  # stalls at 32
    assert (x - naive > 0.05).all()
