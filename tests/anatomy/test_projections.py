"""Projections per head are the model's own linear layers, cut up: heads, groups, biases; and no part of a graph."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from depthscope.anatomy import anatomy_of
from depthscope.anatomy.projections import fused_projections, fused_values, linear_projections
from depthscope.anatomy.structure import Projections
from samples import seeded
from zoo import ZOO, make

WIDTH, HEADS = 12, 4
X = torch.randn(2, 5, WIDTH, generator=seeded(0), dtype=torch.float64)


def linear(outputs: int, seed: int) -> nn.Linear:
    """Weights and biases drawn: none can stand for another."""
    layer = nn.Linear(WIDTH, outputs).double()
    for number, parameter in enumerate(layer.parameters()):
        nn.init.normal_(parameter, generator=seeded(10 * seed + number))
    return layer


def by_head(tokens: Tensor, heads: int) -> Tensor:
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)  # (batch, h, n, k)


def projected(weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    return X.unsqueeze(1) @ weight + bias.unsqueeze(1)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_separate_layers(groups: int):
    width = WIDTH // HEADS * groups
    query, key, value, output = linear(WIDTH, 1), linear(width, 2), linear(width, 3), linear(WIDTH, 4)
    found = linear_projections(query, key, value, output, HEADS, groups)
    assert_close(projected(found.query, found.query_bias), by_head(query(X), HEADS))
    for name, layer in (("key", key), ("value", value)):
        expected = by_head(layer(X), groups).repeat_interleave(HEADS // groups, dim=1)
        assert_close(projected(getattr(found, name), getattr(found, f"{name}_bias")), expected)
    assert found.output is not None
    assert_close((by_head(X, HEADS) @ found.output).sum(dim=1) + found.output_bias, output(X))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_layer_for_all_three(groups: int, columns: bool):
    """All queries, keys and values one after the other, or group by group."""
    width = WIDTH // HEADS
    layer, output = linear((HEADS + 2 * groups) * width, 1), linear(WIDTH, 2)
    made = layer(X).unflatten(-1, (-1, width)).transpose(1, 2)  # (batch, h + 2g, n, k)
    grouped = made.unflatten(1, (groups, -1))  # (batch, g, h/g + 2, n, k)
    by_group = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    weights = [weight.T if columns else weight for weight in (layer.weight, output.weight)]
    for order, expected in (("stacked", made.split([HEADS, groups, groups], dim=1)), ("interleaved", by_group)):
        found = fused_projections(
            weights[0], layer.bias, weights[1], output.bias, HEADS, groups, order, columns=columns
        )
        assert_close(projected(found.query, found.query_bias), expected[0])
        for name, part in zip(("key", "value"), expected[1:], strict=True):
            repeated = part.repeat_interleave(HEADS // groups, dim=1)
            assert_close(projected(getattr(found, name), getattr(found, f"{name}_bias")), repeated)
        assert_close((by_head(X, HEADS) @ found.output).sum(dim=1) + found.output_bias, output(X))
        values = fused_values(layer(X), order, HEADS, groups)
        assert_close(values, expected[2].transpose(1, 2).flatten(-2))
        assert all(part.numel() for pieces in found.roles.values() for p in pieces for part in p.of(p.parameter))


@pytest.mark.parametrize("name", ZOO)
def test_projections_are_no_part_of_a_graph(name: str):
    model, _ = make(name)
    made = [block.projections() for block in anatomy_of(model).blocks if block.projections is not None]
    assert made or "attention_branch" in ZOO[name].hides or ZOO[name].attending == ()
    for projections in made:
        assert isinstance(projections, Projections)
        tensors = [tensor for tensor in vars(projections).values() if isinstance(tensor, Tensor)]
        assert len(tensors) >= (2 if projections.latent else 3)
        assert not any(tensor.requires_grad for tensor in tensors)
