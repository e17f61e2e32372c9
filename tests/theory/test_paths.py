"""The paths of Dong et al. 2021, Thm 2.1: how many, of which length, and each by itself."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from depthscope.theory import path_counts, path_length_shares, recomputed_paths
from samples import seeded


def test_counts_and_shares():
    assert path_counts(12, 12) == tuple(math.comb(12, k) * 12**k for k in range(13))
    assert sum(path_counts(12, 12)) == 13**12 == 23_298_085_122_481
    assert path_counts(3, [1, 2, 3]) == (1, 6, 11, 6)
    assert path_counts(0, 5) == (1,)
    for depth, heads in ((6, 2), (12, 12), (96, 96)):
        exact = [count / (heads + 1) ** depth for count in path_counts(depth, heads)]  # of integers, rounded once
        assert_close(path_length_shares(depth, heads), torch.tensor(exact, dtype=torch.float64), rtol=1e-13, atol=0)
    assert_close(path_length_shares(3, [1, 2, 3]), torch.tensor([1, 6, 11, 6], dtype=torch.float64) / 24)


def test_counts_are_those_of_all_paths():
    lengths = [sum(head > 0 for head in path) for path in product(range(3), range(2), range(3))]
    assert tuple(lengths.count(k) for k in range(4)) == path_counts(3, [2, 1, 2])


TOKENS = torch.randn(2, 5, 4, generator=seeded(1), dtype=torch.float64)


def anew(depth: int) -> list[list]:
    """Two heads a layer that compute their attention from the tokens that they are given."""

    def head(weight: Tensor):
        return lambda x: torch.softmax(x @ x.mT, dim=-1) @ x @ weight

    drawn = torch.randn(depth, 2, 4, 4, generator=seeded(0), dtype=torch.float64) / 2
    return [[head(weight) for weight in layer] for layer in drawn]


def test_recomputed_paths_share_their_beginnings():
    x, layers = TOKENS, anew(3)
    calls = 0

    def counting(function):
        def counted(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return function(x)

        return counted

    found = dict(recomputed_paths(x, [[counting(head) for head in layer] for layer in layers]))
    assert len(found) == 27
    assert calls == 2 + 2 * 3 + 2 * 9
    for path, made in found.items():
        expected = x
        for layer, head in zip(layers, path, strict=True):
            expected = layer[head - 1](expected) if head else expected
        assert torch.equal(made, expected)


def test_too_many_paths_are_refused_with_their_number():
    with pytest.raises(ValueError, match=r"2\.3e\+13 paths are more than the limit of 65536"):
        recomputed_paths(TOKENS, [anew(1)[0] * 6] * 12)
    with pytest.raises(ValueError, match="more than 1e"):
        recomputed_paths(TOKENS, [anew(1)[0] * 6] * 1000)
    with pytest.raises(ValueError, match="27 paths are more than the limit of 26"):
        recomputed_paths(TOKENS, anew(3), limit=26)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="number of heads of each of 3 layers"):
        path_counts(3, [1, 2])
    for depth, heads in ((3, 2.0), (3.0, 2), (2, [2, 1.5]), (0, 2.0)):
        with pytest.raises(ValueError, match="expected a depth and numbers of heads that are whole"):
            path_counts(depth, heads)
    assert path_counts(0, []) == path_counts(0, 2) == (1,)
    with pytest.raises(ValueError, match="at least 0"):
        path_counts(3, -1)
