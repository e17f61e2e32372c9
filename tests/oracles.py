"""The definitions, written the slow and obvious way: what the fast forms are held against."""

from fractions import Fraction
from itertools import combinations

import torch
from torch import Tensor


def projections(x: Tensor) -> tuple[Tensor, Tensor]:
    """Π₁X and Π⊥X with the projection matrices themselves, float64."""
    n = x.shape[-2]
    p1 = torch.full((n, n), 1 / n, dtype=torch.float64)
    return p1 @ x.double(), (torch.eye(n, dtype=torch.float64) - p1) @ x.double()


def energy(x: Tensor) -> Tensor:
    return x.double().square().sum(dim=(-2, -1))


def similarity(x: Tensor) -> Tensor:
    return energy(projections(x)[0]) / energy(x)


def exact_diversity(x: Tensor) -> Fraction:
    """t_div of one matrix (n, d) in rational arithmetic on the stored entries."""
    rows = [[Fraction(value) for value in row] for row in x.double().tolist()]
    n = len(rows)
    means = [sum(column) / n for column in zip(*rows, strict=True)]
    deviation = sum((value - mean) ** 2 for row in rows for value, mean in zip(row, means, strict=True))
    return deviation / sum(value**2 for row in rows for value in row)


def pairwise_cosine(x: Tensor) -> float:
    """Mean cosine over all pairs, (n, d)."""
    pairs = list(combinations(x.double(), 2))
    return sum(float(a @ b / (a.norm() * b.norm())) for a, b in pairs) / len(pairs)


def entropy_rank(x: Tensor) -> Tensor:
    """Effective rank from the SVD, (n, d)."""
    sigma = torch.linalg.svdvals(x.double())
    p = (sigma / sigma.sum())[sigma > 0]
    return (-(p * p.log()).sum()).exp()


def composite_norm(x: Tensor) -> Tensor:
    return (torch.linalg.matrix_norm(x, 1) * torch.linalg.matrix_norm(x, torch.inf)).sqrt()


def uniform_matrix(n: int, causal: bool, real: Tensor | None = None) -> Tensor:
    """Uniform attention written out, (n, n) or (batch, n, n): rows of equal weights over the real tokens that may be
    seen; rows of zeros where there are none."""
    seen = torch.ones(n, n, dtype=torch.float64).tril() if causal else torch.ones(n, n, dtype=torch.float64)
    if real is not None:
        seen = seen * real[:, None, :].double()
    return seen / seen.sum(dim=-1, keepdim=True).clamp(min=1)
