"""The sum over paths (Dong et al. 2021, Thm 2.1): against enumeration, with mutants that must fail."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from depthscope.theory import (
    FrozenAttention,
    enumerate_paths,
    path_counts,
    path_length_shares,
    path_term,
    path_terms,
    recomputed_paths,
)
from samples import seeded

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64, sums of at most 4096 terms


def network(
    depth: int, heads: int, seed: int = 0, *, bias: bool = True, skip: bool = True, n: int = 5, d: int = 4
) -> list[FrozenAttention]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    generator = seeded(seed)
    return [
        FrozenAttention(
            torch.softmax(2 * draw(2, heads, n, n), dim=-1),
            draw(heads, d, 3) / 2,
            draw(heads, 3, d) / 2,
            draw(heads, 3) if bias else None,
            draw(d) if bias else None,
            skip=skip,
        )
        for _ in range(depth)
    ]


def tokens(seed: int = 1, n: int = 5, d: int = 4) -> Tensor:
    return torch.randn(2, n, d, generator=seeded(seed), dtype=torch.float64)


def forward(x: Tensor, layers: list[FrozenAttention]) -> Tensor:
    """The network, head by head, as its definition says."""
    for layer in layers:
        y = x if layer.skip else torch.zeros_like(x)
        for h in range(layer.heads):
            values = x @ layer.value[h] + (0 if layer.value_bias is None else layer.value_bias[h])
            y = y + layer.attention[:, h] @ values @ layer.output[h]
        x = y if layer.output_bias is None else y + layer.output_bias
    return x


def by_enumeration(x: Tensor, layers: list[FrozenAttention]) -> Tensor:
    """The oracle: every path one by one; the constant part is what a network makes of zeros."""
    terms = torch.zeros(len(layers) + 2, *x.shape, dtype=x.dtype)
    choices = [range(0 if layer.skip else 1, layer.heads + 1) for layer in layers]
    for path in product(*choices):
        mixing, weights = torch.eye(x.shape[-2], dtype=x.dtype), torch.eye(x.shape[-1], dtype=x.dtype)
        for layer, head in zip(layers, path, strict=True):
            if head:
                mixing = layer.attention[:, head - 1] @ mixing
                weights = weights @ layer.value[head - 1] @ layer.output[head - 1]
        terms[sum(head > 0 for head in path)] += mixing @ x @ weights
    terms[-1] = forward(torch.zeros_like(x), layers)
    return terms


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("depth", "heads"), [(0, 1), (1, 3), (3, 2), (6, 3)])  # up to 4096 paths
def test_terms_are_the_sums_of_their_paths(depth: int, heads: int, bias: bool):
    x, layers = tokens(), network(depth, heads, bias=bias)
    found = path_terms(x, layers)
    assert found.shape == (depth + 2, *x.shape)
    assert_close(found, by_enumeration(x, layers), **EXACT)
    assert_close(found.sum(dim=0), forward(x, layers), **EXACT)


def test_layers_without_skips_have_only_the_longest_paths():
    x, layers = tokens(), network(3, 2, skip=False)
    found = path_terms(x, layers)
    assert_close(found, by_enumeration(x, layers), **EXACT)
    assert not found[:3].any()
    mixed = [layers[0], replace(layers[1], skip=True), layers[2]]
    assert_close(path_terms(x, mixed), by_enumeration(x, mixed), **EXACT)


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3))
def test_terms_add_up_to_the_output(seed: int, depth: int, heads: int):
    x, layers = tokens(seed), network(depth, heads, seed)
    assert_close(path_terms(x, layers).sum(dim=0), forward(x, layers), **EXACT)


def test_incomplete_rows_are_no_obstacle():
    """Attention beside a sink that is no token: rows sum to less than 1."""
    x, layers = tokens(), [replace(layer, attention=0.7 * layer.attention) for layer in network(3, 2)]
    assert_close(path_terms(x, layers).sum(dim=0), forward(x, layers), **EXACT)


def without_bias(x: Tensor, layers: list[FrozenAttention]) -> Tensor:
    return path_terms(x, [replace(layer, value_bias=None) for layer in layers])


def heads_in_another_order(x: Tensor, layers: list[FrozenAttention]) -> Tensor:
    return path_terms(x, [replace(layer, attention=layer.attention.flip(1)) for layer in layers])


def layers_in_another_order(x: Tensor, layers: list[FrozenAttention]) -> Tensor:
    return path_terms(x, layers[::-1])


def without_a_skip(x: Tensor, layers: list[FrozenAttention]) -> Tensor:
    return path_terms(x, [*layers[:-1], replace(layers[-1], skip=False)])


@pytest.mark.parametrize("mutant", [without_bias, heads_in_another_order, layers_in_another_order, without_a_skip])
def test_mutants_are_seen(mutant):
    x, layers = tokens(), network(3, 2)
    with pytest.raises(AssertionError):
        assert_close(mutant(x, layers), by_enumeration(x, layers), **EXACT)


def test_one_path():
    x, layers = tokens(), network(3, 2)
    expected = layers[2].attention[:, 0] @ layers[0].attention[:, 1] @ x
    expected = expected @ layers[0].value[1] @ layers[0].output[1] @ layers[2].value[0] @ layers[2].output[0]
    assert_close(path_term(x, layers, (2, 0, 1)), expected, **EXACT)
    assert_close(path_term(x, layers, (2, None, 1)), expected, **EXACT)
    assert torch.equal(path_term(x, layers, (0, 0, 0)), x)
    whole = sum(path_term(x, layers, path) for path in enumerate_paths(3, 2))
    assert_close(whole, path_terms(x, layers)[:-1].sum(dim=0), **EXACT)


def test_counts_and_shares():
    assert path_counts(12, 12) == tuple(math.comb(12, k) * 12**k for k in range(13))
    assert sum(path_counts(12, 12)) == 13**12 == 23_298_085_122_481
    assert path_counts(3, [1, 2, 3]) == (1, 6, 11, 6)
    assert path_counts(0, 5) == (1,)
    for depth, heads in ((6, 2), (12, 12), (96, 96)):
        exact = [count / (heads + 1) ** depth for count in path_counts(depth, heads)]  # of integers, rounded once
        assert_close(path_length_shares(depth, heads), torch.tensor(exact, dtype=torch.float64), rtol=1e-13, atol=0)
    assert_close(path_length_shares(3, [1, 2, 3]), torch.tensor([1, 6, 11, 6], dtype=torch.float64) / 24)


def test_enumeration_is_complete():
    found = list(enumerate_paths(3, [2, 1, 2]))
    assert len(found) == len(set(found)) == 3 * 2 * 3
    lengths = [sum(head > 0 for head in path) for path in found]
    assert tuple(lengths.count(k) for k in range(4)) == path_counts(3, [2, 1, 2])
    assert list(enumerate_paths(2, 2, skip=False)) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def anew(layers: list[FrozenAttention]) -> list[list]:
    """Heads that compute their attention from the tokens that they are given."""

    def head(layer: FrozenAttention, h: int):
        return lambda x: torch.softmax(x @ x.mT, dim=-1) @ x @ layer.value[h] @ layer.output[h]

    return [[head(layer, h) for h in range(layer.heads)] for layer in layers]


def test_recomputed_paths_share_their_beginnings():
    x, layers = tokens(), anew(network(3, 2))
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


def test_recomputed_paths_with_norms_on_the_skips():
    x, layers = tokens(), anew(network(2, 2))
    norm = torch.nn.functional.normalize
    found = dict(recomputed_paths(x, layers, skips=[norm, None]))
    assert torch.equal(found[0, 0], norm(x))
    assert torch.equal(found[0, 1], layers[1][0](norm(x)))
    assert set(dict(recomputed_paths(x, layers, skips=False))) == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_too_many_paths_are_refused_with_their_number():
    with pytest.raises(ValueError, match=r"2\.3e\+13 paths are more than the limit of 65536: path_terms sums"):
        enumerate_paths(12, 12)
    with pytest.raises(ValueError, match="more than 1e"):
        enumerate_paths(1000, 12)
    with pytest.raises(ValueError, match="27 paths are more than the limit of 26"):
        recomputed_paths(tokens(), anew(network(3, 2)), limit=26)


def test_bad_input_is_refused():
    x, layers = tokens(), network(2, 2)
    with pytest.raises(ValueError, match=r"layer 1 takes tokens \(…, 5, 4\), got \(2, 5, 3\)"):
        path_terms(x[..., :3], layers)
    with pytest.raises(ValueError, match="not finite"):
        path_terms(x.fill_(math.nan), layers)
    with pytest.raises(ValueError, match="a head for each of 2 layers"):
        path_term(tokens(), layers, (1,))
    with pytest.raises(ValueError, match="from 1 to 2, or 0 for the skip, got 3"):
        path_term(tokens(), layers, (1, 3))
    with pytest.raises(ValueError, match="layer 2 has no skip"):
        path_term(tokens(), [layers[0], replace(layers[1], skip=False)], (1, 0))
    with pytest.raises(ValueError, match="attention"):
        replace(layers[0], attention=layers[0].attention[:, :1])
    with pytest.raises(ValueError, match="value_bias"):
        replace(layers[0], value_bias=torch.zeros(3))
    with pytest.raises(ValueError, match="number of heads of each of 3 layers"):
        path_counts(3, [1, 2])
    for depth, heads in ((3, 2.0), (3.0, 2), (2, [2, 1.5]), (0, 2.0)):
        with pytest.raises(ValueError, match="expected a depth and numbers of heads that are whole"):
            path_counts(depth, heads)
    assert path_counts(0, []) == path_counts(0, 2) == (1,)
    weights = torch.ones(1, 4, 4)
    with pytest.raises(ValueError, match=r"layer 1 has the attention of sequences \(2,\), .* got \(5, 4\): expand"):
        path_terms(torch.zeros(5, 4), [FrozenAttention(torch.ones(2, 1, 5, 5), weights, weights)])
    with pytest.raises(ValueError, match="at least 0"):
        path_counts(3, -1)
    with pytest.raises(ValueError, match="the skip of each of 2 layers"):
        recomputed_paths(tokens(), anew(layers), skips=[None])
