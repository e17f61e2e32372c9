"""Trained networks taken apart by path: both modes against the naive way, and the data of the three tasks."""

import itertools
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from depthscope.models.attention import Attention, split_heads
from depthscope_lab.papers.dong2021.path_networks import (
    TASKS,
    Network,
    Recipe,
    frozen_terms,
    on_hull,
    recomputed_sums,
    sampled_sum,
    table_accuracy,
    without_attention,
)
from depthscope_lab.papers.dong2021.paths import READINGS, SORTING, read

SMALL = replace(SORTING, tokens=4, depth=3, heads=2, width=8, classes=3)
SHAPES = {"attention alone": SMALL, "with an FFN": replace(SMALL, positions=False, ffn=True)}


def sized(train: int, validation: int, test: int, tokens: int, classes: int = 2) -> Recipe:
    return replace(SMALL, train=train, validation=validation, test=test, tokens=tokens, classes=classes)


@cache
def network(name: str) -> Network:
    """Small, in float64, with every bias and every learnt scale of a norm away from what it is drawn as."""
    generator = torch.Generator().manual_seed(0)
    made = Network(SHAPES[name], 5, generator).double().requires_grad_(False)
    for parameter in made.parameters():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


IDS = torch.randint(5, (6, 4), generator=torch.Generator().manual_seed(1))


class FrozenAttention(NamedTuple):
    """One attention layer whose attention does not change."""

    attention: Tensor  # P (…, h, n, n)
    value: Tensor  # W_V (h, d, d_v)
    output: Tensor  # W_O (h, d_v, d)
    value_bias: Tensor  # (h, d_v)
    output_bias: Tensor  # (d)

    def head(self, number: int, tokens: Tensor) -> Tensor:
        """P_h X W_h of one head, counted from 1, without biases: (…, n, d)."""
        h = number - 1
        return self.attention[..., h, :, :] @ (tokens @ self.value[h]) @ self.output[h]


def frozen_attention(attention: Attention, x: Tensor) -> FrozenAttention:
    """A layer with its attention as it is for these tokens (batch, n, d), and its matrices by head."""
    q, k = (split_heads(project(x), attention.heads) for project in (attention.query, attention.key))
    return FrozenAttention(
        torch.softmax(q @ k.mT * attention.scale, dim=-1),
        attention.value.weight.unflatten(0, (attention.heads, -1)).mT,  # (h, d, d_v)
        attention.output.weight.mT.unflatten(0, (attention.heads, -1)),  # (h, d_v, d)
        attention.value.bias.unflatten(0, (attention.heads, -1)),
        attention.output.bias,
    )


@pytest.mark.parametrize("name", SHAPES)
def test_the_frozen_terms_add_up_to_what_leaves_the_encoder(name: str):
    model = network(name)
    terms = frozen_terms(model, IDS)
    assert terms.shape == (5, 6, 4, 8)  # lengths 0 to 3, constant
    assert_close(terms.sum(dim=0), model.encoder(model.embed(IDS)), rtol=0, atol=1e-12)
    assert all(float(term.abs().max()) > 1e-3 for term in terms)


def one_frozen_path(model: Network, heads: tuple[int, ...]) -> torch.Tensor:
    """The naive way: one path with everything frozen, block by block."""
    x = model.embed(IDS)
    path = x
    for block, head in zip(model.blocks, heads, strict=True):
        y = x + block.attention(x)
        path = path if head == 0 else frozen_attention(block.attention, x).head(head, path)
        scale = 1 / (y.var(-1, keepdim=True, correction=0) + block.norm1.eps).sqrt()
        path = (path - path.mean(-1, keepdim=True)) * scale * block.norm1.weight
        x = block.norm1(y)
        if not isinstance(block.ffn, nn.Identity):
            u = block.ffn[0](x)
            path = path + (F.gelu(u) / u * (path @ block.ffn[0].weight.T)) @ block.ffn[2].weight.T
            y = x + block.ffn(x)
            scale = 1 / (y.var(-1, keepdim=True, correction=0) + block.norm2.eps).sqrt()
            path = (path - path.mean(-1, keepdim=True)) * scale * block.norm2.weight
            x = block.norm2(y)
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_the_frozen_terms_are_the_sums_of_single_paths(name: str):
    model = network(name)
    terms = frozen_terms(model, IDS)
    naive = torch.zeros_like(terms[:-1])
    for path in itertools.product(range(3), repeat=3):
        naive[sum(head > 0 for head in path)] += one_frozen_path(model, path)
    assert_close(terms[:-1], naive, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_recomputed_paths_are_networks_of_their_own(name: str):
    model = network(name)

    def one(path: tuple[int, ...]) -> torch.Tensor:
        x = model.embed(IDS)
        for block, head in zip(model.blocks, path, strict=True):
            if head:
                layer = frozen_attention(block.attention, x)
                bias = layer.value_bias[head - 1] @ layer.output[head - 1] + layer.output_bias
                x = F.layer_norm(layer.head(head, x) + bias, (8,))
                x = block.norm2(x + block.ffn(x)) if not isinstance(block.ffn, nn.Identity) else x
        return x

    naive = torch.zeros(4, 6, 4, 8, dtype=torch.float64)
    for path in itertools.product(range(3), repeat=3):
        naive[sum(head > 0 for head in path)] += one(path)
    found = recomputed_sums(model, IDS)
    assert_close(found, naive, rtol=0, atol=1e-12)
    assert not torch.allclose(found.sum(0), model.encoder(model.embed(IDS)))  # these add up to nothing
    longest = sampled_sum(model, IDS, 0, 7, torch.Generator().manual_seed(0))
    assert_close(longest, 7 * model.embed(IDS))  # there is one path of length 0, drawn seven times


def test_readings_choose_their_lengths():
    terms = torch.tensor([1.0, 10.0, 100.0, 1000.0])[:, None, None, None]  # lengths 0 to 2, constant
    found = {reading: [float(read(terms, reading, asked)) for asked in range(3)] for reading in READINGS}
    assert found == {
        "alone": [1, 10, 100],
        "with constant": [1001, 1010, 1100],
        "up to": [1001, 1011, 1111],
    }


def test_the_hull_is_that_of_every_line_through_two_points():
    """Naive: a point is a corner if some line through it has all the others strictly on one side."""
    points = torch.rand(20, 7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for cloud, found in zip(points, on_hull(points), strict=True):
        naive = torch.zeros(7, dtype=torch.bool)
        for i, j in itertools.permutations(range(7), 2):
            way = cloud[j] - cloud[i]
            sides = way[0] * (cloud[:, 1] - cloud[i, 1]) - way[1] * (cloud[:, 0] - cloud[i, 0])
            naive[i] |= bool((sides[[k for k in range(7) if k not in (i, j)]] > 0).all())
        assert torch.equal(found, naive)
    square = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1], [0.4, 0.5]])
    assert on_hull(square).tolist() == [True, True, True, True, False]


def test_labels_are_what_the_tasks_say_and_splits_differ():
    data = TASKS["sorting"](sized(50, 20, 20, 6, 4), seed=3)
    assert torch.equal(data.test.labels, data.test.inputs.sort(dim=-1).values)
    assert not torch.equal(data.train.inputs[:20], data.test.inputs)
    again = TASKS["sorting"](sized(50, 20, 20, 6, 4), seed=3)
    assert torch.equal(again.test.inputs, data.test.inputs)
    memory = TASKS["memorisation"](sized(10, 0, 4, 8), seed=0)
    assert torch.equal(memory.test.labels, memory.train.labels[:4])
    assert set(memory.train.labels.unique().tolist()) == {0, 1}


def test_what_a_token_knows_of_itself_is_learnt_by_a_table():
    data = TASKS["sorting"](sized(4000, 10, 1000, 2, 2), seed=0)
    # Two letters of {0, 1}: first the smaller. Own letter and place: "0 first" is right, "1 first" is 0 or 1 by the
    # other; "1 last" is right, "0 last" open: 3/4 in all.
    assert abs(without_attention("sorting", data) - 0.75) < 0.03
    keys, labels = torch.tensor([[7, 7, 7, 2]]), torch.tensor([[1, 1, 0, 0]])
    assert table_accuracy(keys, labels, keys, labels) == 0.75
    assert table_accuracy(keys, labels, torch.tensor([[5, 9]]), torch.tensor([[0, 1]])) == 0.5  # unseen keys
