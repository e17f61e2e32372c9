"""The mean-coherent share of a writer's gradient against its definition, and its planted ends."""

import pytest
import torch
from torch import Tensor

from depthscope.measures import mean_coherent_share, token_sum
from samples import seeded


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def naive(read: Tensor, gradient: Tensor, mask: Tensor) -> float:
    """Token by token, sequence by sequence."""
    whole = torch.zeros(read.shape[-1], gradient.shape[-1], dtype=torch.float64)
    mean_part = torch.zeros_like(whole)
    for y, d, real in zip(read, gradient, mask, strict=True):
        for token in range(len(y)):
            whole += torch.outer(y[token], d[token])
        n = int(real.sum())
        mean_part += n * torch.outer(y[real].mean(dim=0), d[real].mean(dim=0))
    shared, rest = mean_part.square().sum(), (whole - mean_part).square().sum()
    return float(shared / (shared + rest))


def share(read: Tensor, gradient: Tensor, mask: Tensor | None = None) -> float:
    whole = torch.einsum("bna,bnd->ad", read, gradient)
    return float(mean_coherent_share(whole, token_sum(read, mask), token_sum(gradient, mask)))


@pytest.mark.parametrize("seed", range(5))
def test_it_is_its_definition(seed: int):
    read, gradient = drawn(3, 7, 5, seed=seed) + 0.5, drawn(3, 7, 4, seed=seed + 50) + 0.3
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3, [False] * 2 + [True] * 5])
    gradient = gradient * mask.unsqueeze(-1)  # padding is in no loss
    assert share(read, gradient, mask) == pytest.approx(naive(read, gradient, mask), rel=1e-12)
    assert share(read, gradient, mask) != pytest.approx(share(read, gradient), rel=1e-3)  # the mask matters


def test_one_gradient_for_all_tokens_is_all_mean_and_one_that_cancels_has_none():
    read, gradient = drawn(2, 6, 5), drawn(2, 6, 4, seed=1)
    assert share(read, gradient[:, :1].expand(2, 6, 4)) == pytest.approx(1, abs=1e-15)
    assert share(read[:, :1].expand(2, 6, 5), gradient) == pytest.approx(1, abs=1e-15)
    assert share(read, gradient - gradient.mean(dim=1, keepdim=True)) < 1e-30


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_size_of_the_loss_does_not_matter(scale: float):
    read, gradient = drawn(2, 6, 5).float(), drawn(2, 6, 4, seed=1).float()
    assert share(read, scale * gradient) == pytest.approx(share(read, gradient), rel=1e-5)


def test_without_a_gradient_it_is_undefined():
    assert torch.tensor(share(drawn(2, 6, 5), torch.zeros(2, 6, 4, dtype=torch.float64))).isnan()
