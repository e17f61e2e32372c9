"""The causal mean is no projection: what is left of a token, against the remedy itself and the closed form."""

import pytest
import torch

from depthscope.remedies.deescalation import deescalate
from depthscope.theory.causal_means import own_token_share


@pytest.mark.parametrize("tau", [0.3, 1.0])
def test_it_is_the_remedy_done_again_and_again(tau: float):
    rows = torch.eye(6, dtype=torch.float64)  # unrelated tokens of one size
    for _ in range(5):
        rows = torch.nn.functional.normalize(deescalate(rows, tau, mixing="prefix"), dim=-1)
    assert torch.allclose(rows.diagonal() ** 2, own_token_share(6, tau, 5), atol=1e-12)


def test_without_norms_a_token_keeps_the_power_of_its_own_weight():
    n, tau, blocks = 5, 0.4, 7
    plain = torch.eye(n, dtype=torch.float64)
    for _ in range(blocks):
        plain = deescalate(plain, tau, mixing="prefix")
    expected = torch.tensor([1.0, *((1 - tau / i) ** blocks for i in range(2, n + 1))], dtype=torch.float64)
    assert torch.allclose(plain.diagonal(), expected)


def test_depth_loses_tokens_and_the_full_mean_loses_none():
    kept = [own_token_share(32, 0.42, blocks).mean().item() for blocks in (1, 10, 100, 1000)]
    assert kept == sorted(kept, reverse=True)
    assert kept[1] > 0.7
    assert kept[2] < 0.2
    once = again = deescalate(torch.eye(32, dtype=torch.float64), 1.0)
    for _ in range(100):
        again = deescalate(again, 1.0)
    assert torch.allclose(once, again, atol=1e-12)  # a projection


def test_without_a_remedy_or_blocks_all_is_kept():
    assert torch.equal(own_token_share(4, 0.0, 9), torch.ones(4, dtype=torch.float64))
    assert torch.equal(own_token_share(4, 1.0, 0), torch.ones(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="τ in"):
        own_token_share(4, 1.5, 1)
