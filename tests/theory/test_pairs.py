"""All differences of tokens against 700 digits, where the differences from one shared token are not enough."""

import pytest
import torch

import exact_layers as exact
from depthscope.measures import composite_norm
from depthscope.theory import Heads, SplitTokens, attend, feed_forward, normalise
from depthscope.theory.residuals import (
    Mlp,
    around_each,
    around_mean,
    attend_pairs,
    feed_forward_uncentred,
    normalise_uncentred,
)
from samples import seeded

F64 = torch.float64


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=F64)


def error(found: SplitTokens, expected: exact.Matrix) -> float:
    wanted = torch.tensor(exact.deviations(expected), dtype=F64)
    return (composite_norm(found.residual.reshape(wanted.shape) - wanted) / composite_norm(wanted)).item()


def test_groups_of_tokens_keep_what_tells_them_apart():
    """Two groups of width 1e-40: all rows attend to one of them, and are then as equal as its tokens allow."""
    generator = seeded(1)
    centres, inside = normal(generator, 2, 3), 1e-40 * normal(generator, 6, 3)
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    apart = (centres[group][None] - centres[group][:, None]) + (inside[None] - inside[:, None])
    pairs = SplitTokens(centres[group] + inside, apart)
    query, value = normal(generator, 2, 2, 3, 3)
    asked = 200 * (centres[0] - centres[1]) / (centres[0] - centres[1]).square().sum()
    heads = Heads(query, torch.eye(3, dtype=F64).expand(2, 3, 3), value, query_bias=asked.expand(2, 3) * 3**0.5)
    found = around_mean(attend_pairs(pairs, Heads(*(None if part is None else part[None] for part in heads))))
    with exact.workdps(exact.DIGITS):
        whole = exact.plus(exact.exact(centres[group]), exact.exact(inside))
        expected = exact.attention(whole, heads)
        assert error(found, expected) < 1e-10
        assert error(attend(SplitTokens.of(pairs.shared), heads), expected) > 0.9  # the mutant: one shared token


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh", "sine"])
def test_pairs_and_tokens_are_the_same_network(activation: str):
    generator = seeded(2)
    tokens = SplitTokens.of(normal(generator, 7, 5, 4))
    heads = Heads(*normal(generator, 3, 2, 4, 4), query_bias=normal(generator, 2, 4), bias=normal(generator, 4))
    mlp = Mlp(normal(generator, 4, 6), normal(generator, 6, 4), normal(generator, 6), normal(generator, 4), activation)
    wanted = normalise(feed_forward(attend(tokens, heads), mlp))
    found = around_mean(normalise_uncentred(feed_forward_uncentred(attend_pairs(around_each(tokens), heads), mlp)))
    torch.testing.assert_close(found.tokens, wanted.tokens, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.residual, wanted.residual, rtol=1e-10, atol=1e-10)
