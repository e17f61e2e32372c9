"""The law of queries and keys: their gradient vanishes like t_div, at a rate that is known; with a mutant."""

import math

import pytest
import torch
from torch import Tensor

from depthscope.measures import token_diversity
from depthscope.theory import expected_gradient_ratio
from samples import seeded

F64 = torch.float64


def draw(seed: int, n: int = 6, d: int = 8, k: int = 4, apart: float = 1.0) -> tuple[Tensor, ...]:
    """Tokens that differ by `apart` from one vector, W_Q, W_K, W_V and G."""
    generator = seeded(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    tokens = normal(1, d) + apart * normal(n, d)
    return tokens, *(normal(d, k) / math.sqrt(d) for _ in range(3)), normal(n, k)


def by_autograd(x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, turns: Tensor | None = None) -> list[Tensor]:
    """Attention as it is written down; `turns` (n, k, k) rotates queries and keys by their positions."""
    q, k = (weight.clone().requires_grad_() for weight in (q, k))
    queries, keys = x @ q, x @ k
    if turns is not None:
        queries, keys = (torch.einsum("nk,nkl->nl", part, turns) for part in (queries, keys))
    attention = torch.softmax(queries @ keys.mT / math.sqrt(k.shape[-1]), dim=-1)
    return list(torch.autograd.grad((g * (attention @ (x @ v))).sum(), [q, k]))


def size(gradients: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


def exponent_of(turns: Tensor | None = None, distances: tuple[float, float] = (1e-3, 1e-2)) -> float:
    """The slope of log ‖∂W_Q,K‖ against log t_div."""
    sizes, diversities = [], []
    for apart in distances:
        x, q, k, v, g = draw(5, apart=apart)
        sizes.append(size(by_autograd(x, q, k, v, g, turns)).log())
        diversities.append(token_diversity(x).log())
    return float((sizes[1] - sizes[0]) / (diversities[1] - diversities[0]))


def rotations(n: int, k: int) -> Tensor:
    turns = torch.zeros(n, k, k, dtype=F64)
    for pair in range(k // 2):
        angle = torch.arange(n, dtype=F64) * 10 ** (-pair)
        rows = [torch.stack([angle.cos(), angle.sin()], -1), torch.stack([-angle.sin(), angle.cos()], -1)]
        turns[:, 2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = torch.stack(rows, dim=1)
    return turns


def test_the_gradient_goes_like_diversity_and_with_rotated_keys_like_its_root():
    assert exponent_of() == pytest.approx(1, abs=0.01)
    assert exponent_of(rotations(6, 4)) == pytest.approx(0.5, abs=0.01)


def of_scores(tokens: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """∂W_Q and ∂W_K by the formula of the module, for alike tokens, whose attention is even."""
    apart = tokens - tokens.mean(dim=-2, keepdim=True)
    covariance = apart.mT @ apart / tokens.shape[-2]
    to_values, scale = g.sum(dim=-2, keepdim=True) @ v.mT, k.shape[-1] ** -0.5
    shared = tokens.mean(dim=-2, keepdim=True)
    return scale * shared.mT @ to_values @ covariance @ k, scale * covariance @ to_values.mT @ shared @ q


def test_the_formula_is_the_gradient_of_alike_tokens():
    x, q, k, v, g = draw(5, apart=1e-5)
    for found, expected in zip(of_scores(x, q, k, v, g), by_autograd(x, q, k, v, g), strict=True):
        assert (found - expected).norm() < 1e-3 * expected.norm()


def monte_carlo(spread: int, sigmas: tuple[float, ...], draws: int = 600) -> tuple[float, float]:
    """Root of the mean squares' ratio over drawn weights, and the participation r of the tokens' covariance."""
    n, d, h, k = 12, 24, 3, 8
    generator = seeded(9)
    basis = torch.randn(n, spread, generator=generator, dtype=F64) @ torch.randn(
        spread, d, generator=generator, dtype=F64
    )
    tokens = torch.randn(1, d, generator=generator, dtype=F64) + 1e-4 * basis
    tokens = tokens * math.sqrt(d * n) / tokens.norm()
    apart = tokens - tokens.mean(dim=0)
    covariance = apart.mT @ apart
    participation = float(covariance.trace().square() / covariance.square().sum())
    delta = torch.randn(n, d, generator=generator, dtype=F64) + 3 * torch.randn(1, d, generator=generator, dtype=F64)
    weights = [s * torch.randn(draws, h, d, k, generator=generator, dtype=F64) for s in sigmas[:3]]
    output = sigmas[3] * torch.randn(draws, h, k, d, generator=generator, dtype=F64)
    context = delta @ output.mT  # (draws, h, n, k)
    by_scores = of_scores(tokens, *weights, context)
    of_value = tokens.mT @ context.mean(dim=-2, keepdim=True).expand(context.shape)  # even attention
    of_output = (tokens @ weights[2]).mean(dim=-2, keepdim=True).expand(context.shape).mT @ delta
    squares = [sum(part.square().sum() for part in parts) for parts in (by_scores, (of_value, of_output))]
    return float((squares[0] / squares[1]).sqrt() / token_diversity(tokens)), participation


@pytest.mark.parametrize("spread", [1, 3, 24])
@pytest.mark.parametrize("sigmas", [(24**-0.5,) * 4, (0.3, 0.1, 0.2, 0.4)])
def test_expected_ratio_agrees_with_monte_carlo(spread: int, sigmas: tuple[float, float, float, float]):
    found, participation = monte_carlo(spread, sigmas)
    expected = float(expected_gradient_ratio(1.0, participation, 24, sigmas))
    assert found == pytest.approx(expected, rel=0.15)  # 600 draws of heavy-tailed squares: their error is about 5 %
    if spread == 24:
        mutant = float(expected_gradient_ratio(1.0, 1.0, 24, sigmas))  # as if all differences were along one line
        assert found < 0.7 * mutant


def test_the_constant_behind_a_norm_is_the_root_of_the_directions():
    assert float(expected_gradient_ratio(0.01, 4.0, 512, (512**-0.5,) * 4)) == pytest.approx(0.005)
    assert math.isnan(expected_gradient_ratio(0.1, 4.0, 8, (1.0, 1.0, 0.0, 0.0)))
    assert expected_gradient_ratio(0.0, 4.0, 8, (1.0,) * 4) == 0
