"""Where the energy sits: against regression on explicit dummy variables, and on planted cases."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from depthscope.measures import (
    effective_rank,
    energy_split,
    frobenius_norm,
    largest_feature,
    largest_token_share,
    ordinary_rank,
)
from samples import seeded


def split_by_regression(x: Tensor, mask: Tensor) -> list[float]:
    """Sequential sums of squares with lstsq on dummy variables: intercept, then sequences, then positions."""
    s, n, _ = x.shape
    sequence, position = (index[mask] for index in torch.meshgrid(torch.arange(s), torch.arange(n), indexing="ij"))
    u = torch.nn.functional.normalize(x[mask].double(), dim=-1)
    design = torch.ones(len(u), 1, dtype=torch.float64)
    parts, left = [], u.square().sum()
    for groups in (None, torch.nn.functional.one_hot(sequence, s), torch.nn.functional.one_hot(position, n)):
        if groups is not None:
            design = torch.cat([design, groups.double()], dim=1)
        fitted = design @ torch.linalg.lstsq(design, u, driver="gelsd").solution
        rest = (u - fitted).square().sum()
        parts.append(float((left - rest) / len(u)))
        left = rest
    return [*parts, float(left / len(u))]


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 3, 1], [2, 0, 5]])
def test_split_equals_regression(lengths: list[int]):
    x = torch.randn(3, 5, 4, generator=seeded(0), dtype=torch.float64) + torch.randn(3, 1, 4, generator=seeded(1))
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    parts = energy_split(x, mask)
    assert_close([part.item() for part in parts], split_by_regression(x, mask), rtol=1e-10, atol=1e-12)
    assert_close(sum(parts), torch.tensor(1.0, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("part", "shape"),
    [("shared", (1, 1, 32)), ("sequence", (6, 1, 32)), ("position", (1, 10, 32)), ("token", (6, 10, 32))],
)
def test_planted_parts_are_found(part: str, shape: tuple[int, int, int]):
    """One kind of common vector and no other: its share is what chance leaves to the others, or 1."""
    x = torch.randn(shape, generator=seeded(0)).expand(6, 10, 32)
    parts = energy_split(x)._asdict()
    assert max(parts, key=lambda name: parts[name].item()) == part
    assert parts[part] > 0.7


def test_one_sequence_cannot_be_split():
    x = torch.randn(2, 5, 4, generator=seeded(0))
    assert all(part.isnan() for part in energy_split(x[:1]))
    assert all(part.isnan() for part in energy_split(x, torch.tensor([[1] * 5, [0] * 5])))
    x[0, 0, 0] = torch.nan
    assert all(part.isnan() for part in energy_split(x))


def test_split_takes_leading_axes():
    x = torch.randn(2, 3, 5, 4, generator=seeded(0))
    whole = energy_split(x)
    assert_close(whole.sequence[1], energy_split(x[1]).sequence)


def test_norm_and_largest_share():
    x = torch.randn(3, 8, 4, generator=seeded(0))
    assert_close(frobenius_norm(x), torch.linalg.matrix_norm(x.double()), rtol=1e-6, atol=0)
    x[1] *= 1e-3
    x[1, 2] *= 1e6
    energy = x.double().square().sum(dim=-1)
    assert_close(largest_token_share(x), energy.amax(dim=-1) / energy.sum(dim=-1), rtol=1e-6, atol=0)
    assert largest_token_share(x)[1] > 0.999


def test_the_largest_feature_and_its_index():
    x = torch.randn(2, 8, 4, generator=seeded(0))
    x[1, :, 3] += 20
    energy = x.double().square().sum(dim=-2)
    found = largest_feature(x)
    assert_close(found.share, energy.amax(dim=-1) / energy.sum(dim=-1), rtol=1e-6, atol=0)
    assert found.feature.tolist() == [energy[0].argmax().item(), 3]
    assert found.share[1] > 0.95


def test_an_outlier_token_decides_neither_the_largest_feature_nor_the_ordinary_rank():
    x = torch.randn(2, 12, 6, generator=seeded(0))
    huge = x.clone()
    huge[0, 5] = torch.tensor([0.0, 0, 1e4, 0, 0, 0])
    rest = torch.arange(12) != 5
    assert effective_rank(huge)[0] < 1.1
    assert_close(ordinary_rank(huge)[0], effective_rank(huge[0, rest]), rtol=1e-9, atol=0)
    assert_close(largest_feature(huge)[0][0], largest_feature(huge[0, rest]).share)
    assert_close(ordinary_rank(huge)[1], effective_rank(x[1]), rtol=1e-9, atol=0)
    assert_close(ordinary_rank(x), effective_rank(x), rtol=0, atol=0)
