"""The two exponents: against whole Jacobians, in cases that are known, and without a trace."""

import math

import pytest
import torch
from torch import Tensor

from depthscope.models import BlockConfig, Encoder
from exponents import gradient_exponents, token_exponents
from samples import seeded

N, D = 4, 6


@pytest.fixture(scope="module")
def blocks():
    encoder = Encoder(3, BlockConfig(D, 2, 8), generator=seeded(0)).double()
    return list(encoder.blocks)


def jacobian(block, x: Tensor) -> Tensor:
    """(n·d, n·d), the naive way."""
    found = torch.autograd.functional.jacobian(lambda flat: block(flat.view(1, N, D)).flatten(), x.flatten())
    return found.detach()


def naive_token_exponent(blocks, x: Tensor, delta: Tensor) -> list[float]:
    """One difference through all blocks, of whatever length it then has."""
    mean = x.mean(dim=1)
    mean = mean * x.norm() / (N**0.5 * mean.norm())
    delta = delta - delta.mean(dim=1, keepdim=True)
    found = []
    for block in blocks:
        equal = mean.expand(1, N, D).contiguous()
        moved = (jacobian(block, equal) @ delta.flatten()).view(1, N, D)
        moved = moved - moved.mean(dim=1, keepdim=True)
        after = block(equal).detach()
        found.append(math.log(moved.norm() / delta.norm()) - math.log(after.norm() / equal.norm()))
        mean, delta = after.mean(dim=1), moved
    return found


def test_tokens_grow_alike_as_the_whole_jacobian_says(blocks):
    x = torch.randn(1, N, D, generator=seeded(1), dtype=torch.float64)
    noise = torch.randn(1, N, D, generator=seeded(2), dtype=torch.float64)
    assert token_exponents(blocks, x, generator=seeded(2)) == pytest.approx(naive_token_exponent(blocks, x, noise))


def test_the_gradient_goes_back_as_the_whole_jacobian_says(blocks):
    x = torch.randn(1, N, D, generator=seeded(1), dtype=torch.float64)
    inputs = [x]
    for block in blocks:
        inputs.append(block(inputs[-1]).detach())
    gradient = torch.randn(1, N, D, generator=seeded(2), dtype=torch.float64).flatten()
    found = []
    for block, entered in zip(reversed(blocks), reversed(inputs[:-1]), strict=True):
        back = jacobian(block, entered).T @ gradient
        found.append(math.log(back.norm() / gradient.norm()))
        gradient = back
    assert gradient_exponents(blocks, x, generator=seeded(2)) == pytest.approx(found[::-1])


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.9])
def test_de_escalation_alone_undoes_a_collapse_by_its_own_factor(tau: float):
    x = torch.randn(2, 5, 3, generator=seeded(0), dtype=torch.float64) + 1
    block = lambda y: y - tau * y.mean(dim=-2, keepdim=True)  # noqa: E731
    assert token_exponents([block], x, generator=seeded(0)) == pytest.approx([-math.log(1 - tau)])


def test_where_no_mean_is_left_nothing_can_collapse():
    x = torch.randn(2, 5, 3, generator=seeded(0)) + 1
    assert math.isnan(token_exponents([lambda y: y - y.mean(dim=-2, keepdim=True)], x)[0])


def test_measuring_leaves_no_trace_and_no_float_overflows(blocks):
    x = torch.randn(1, N, D, generator=seeded(1), dtype=torch.float64)
    before = blocks[0](x)
    assert gradient_exponents([lambda y: 1e30 * y] * 30, x.float()) == pytest.approx([math.log(1e30)] * 30)
    gradient_exponents(blocks, x)
    token_exponents(blocks, x)
    assert all(parameter.grad is None for block in blocks for parameter in block.parameters())
    assert not x.requires_grad
    assert torch.equal(blocks[0](x), before)
