"""The block against Algorithm 1 written out by hand, its stations, masks and initialisers."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from depthscope.measures import growth
from depthscope.models import (
    Block,
    BlockConfig,
    paper_text,
    post_norm,
    pre_norm,
    pytorch_default,
    theorem,
    xavier,
)
from depthscope.stations import BLOCK, TRUNK
from samples import seeded

F64 = torch.float64


def layer_norm(x: Tensor, norm: torch.nn.LayerNorm, eps: float = 1e-5) -> Tensor:
    normed = (x - x.mean(dim=-1, keepdim=True)) / (x.var(dim=-1, keepdim=True, unbiased=False) + eps).sqrt()
    return normed * norm.weight + norm.bias


def with_random_norms(config: BlockConfig) -> Block:
    """In float64, the gains and biases of the two norms drawn: one norm cannot stand for the other."""
    block = Block(config, seeded(0)).double()
    for number, parameter in enumerate((*block.norm1.parameters(), *block.norm2.parameters())):
        torch.nn.init.normal_(parameter, generator=seeded(10 + number))
    return block


def algorithm_1(block: Block, x: Tensor) -> dict[str, Tensor]:
    """Yu & Zhang 2024, Algorithm 1 and eq. 2, head by head, as written (with biases where there are any)."""
    a, (n, d) = block.attention, x.shape
    width = d // a.heads
    score_scale = math.sqrt(d) if block.config.scale == "width" else math.sqrt(width)
    heads = []
    for k in range(a.heads):
        rows = slice(k * width, (k + 1) * width)
        q, key, v = (x @ w.weight[rows].T + w.bias[rows] for w in (a.query, a.key, a.value))
        scores = q @ key.T / score_scale
        if a.causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        p = scores.exp() / scores.exp().sum(dim=1, keepdim=True)
        heads.append(p @ v)
    attended = torch.cat(heads, dim=1)
    if block.config.output_projection:
        attended = attended @ a.output.weight.T + a.output.bias
    y1 = x + block.alpha * attended
    y2 = layer_norm(y1, block.norm1)
    first, _, second = block.ffn
    y3 = torch.relu(y2 @ first.weight.T + first.bias) @ second.weight.T + second.bias + y2
    return dict(zip(TRUNK, [x, y1, y2, y3, layer_norm(y3, block.norm2)], strict=True))


def visit(block: Block, x: Tensor) -> dict[str, Tensor]:
    """What passes at each station."""
    seen: dict[str, Tensor] = {}
    handles = [
        station.register_forward_hook(lambda _m, _i, output, name=name: seen.update({name: output}))
        for name, station in block.stations.items()
    ]
    block(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("scale", ["width", "head_width"])
@pytest.mark.parametrize("output_projection", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_post_norm_is_algorithm_1_station_by_station(scale, output_projection: bool, causal: bool):
    config = BlockConfig(16, 4, alpha=0.7, scale=scale, output_projection=output_projection, causal=causal)
    block = with_random_norms(config)
    x = torch.randn(6, 16, generator=seeded(1), dtype=F64)
    expected, seen = algorithm_1(block, x), visit(block, x[None])
    for name in TRUNK:
        assert_close(seen[name][0], expected[name], rtol=0, atol=1e-12)


def test_pre_norm_is_equation_19():
    block = with_random_norms(BlockConfig(16, 4, alpha=0.7, placement=pre_norm))
    x = torch.randn(2, 6, 16, generator=seeded(1), dtype=F64)
    seen = visit(block, x)
    normed = layer_norm(x, block.norm1)
    assert_close(seen["attention_input"], normed, rtol=0, atol=1e-12)
    assert_close(seen["attention_branch"], block.attention(normed), rtol=0, atol=1e-12)
    y = x + 0.7 * block.attention(normed)
    assert_close(seen["after_attention"], y, rtol=0, atol=1e-12)
    assert_close(seen["ffn_input"], layer_norm(y, block.norm2), rtol=0, atol=1e-12)
    z = y + block.ffn(layer_norm(y, block.norm2))
    assert_close(seen["after_ffn"], z, rtol=0, atol=1e-12)
    assert torch.equal(seen["after_ffn"], seen["output"])


@pytest.mark.parametrize("placement", [post_norm, pre_norm])
def test_every_station_is_passed_and_can_change_the_trunk(placement):
    block = Block(BlockConfig(16, 4, placement=placement), seeded(0))
    x = torch.randn(2, 6, 16, generator=seeded(1))
    plain = block(x)
    for name in BLOCK:
        handle = block.stations[name].register_forward_hook(lambda _m, _i, output: output + torch.randn_like(output))
        assert not torch.equal(block(x), plain), name
        handle.remove()
    assert torch.equal(block(x), plain)
    assert not any("stations" in key for key in block.state_dict())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [True, False])
def test_padding_does_not_reach_real_tokens(causal: bool, left: bool):
    block = Block(BlockConfig(16, 4, causal=causal), seeded(0)).double()
    x = torch.randn(2, 6, 16, generator=seeded(1), dtype=F64)
    padding = 1e3 * torch.randn(2, 3, 16, generator=seeded(2), dtype=F64)
    where = slice(3, 9) if left else slice(0, 6)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, where] = True
    padded = block(torch.cat([padding, x] if left else [x, padding], dim=1), mask)
    assert_close(padded[:, where], block(x), rtol=0, atol=1e-12)
    assert padded.isfinite().all()


def test_causal_blocks_do_not_see_later_tokens_and_others_do():
    x = torch.randn(1, 6, 16, generator=seeded(1), dtype=F64)
    changed = x.clone()
    changed[:, 3:] += 1
    for causal in (True, False):
        block = Block(BlockConfig(16, 4, causal=causal), seeded(0)).double()
        assert torch.equal(block(x)[:, :3], block(changed)[:, :3]) == causal


@pytest.mark.parametrize("initialise", [pytorch_default, xavier, theorem, paper_text])
def test_a_generator_makes_the_weights_reproducible(initialise):
    config = BlockConfig(16, 4, initialise=initialise)
    first, again, other = (Block(config, seeded(s)).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    ("initialise", "gain"), [(pytorch_default, 1 / 3), (xavier, 1.0), (theorem, 1.0), (paper_text, 8.0)]
)
def test_the_initialisers_have_the_variance_they_say(initialise, gain: float):
    """d·σ² of W_V; the sampling error of a variance over d² entries is √(2/d²), here 0.6 %."""
    block = Block(BlockConfig(256, 8, initialise=initialise), seeded(0))
    assert_close(256 * block.attention.value.weight.var().item(), gain, rtol=0.02, atol=0)


def test_step_one_grows_the_mean_twice_as_fast_with_the_theorem_and_nine_times_with_the_text():
    """Yu & Zhang's Fig. 2 shows ξ₁/ξ₂ ≈ 2 = 1 + dσ², which their stated N(0, h/d) cannot give."""
    x = torch.randn(8, 64, 512, generator=seeded(0))
    for initialise, expected in ((theorem, 2.0), (paper_text, 9.0)):
        config = BlockConfig(512, 8, output_projection=False, scale="width", initialise=initialise)
        with torch.no_grad():
            xi1, xi2 = growth(x, visit(Block(config, seeded(1)), x)["after_attention"])
        assert abs((xi1 / xi2).mean().item() / expected - 1) < 0.15


def test_the_default_generator_draws_like_pytorch():
    """The same numbers as nn.Linear's own initialisation, in distribution: bounds and spread."""
    block = Block(BlockConfig(256, 8), seeded(0))
    weight, reference = block.ffn[0].weight, torch.nn.Linear(256, 1024).weight
    assert weight.abs().max() <= 1 / 16
    assert_close(weight.std(), reference.std(), rtol=0.02, atol=0)


def test_a_block_can_be_copied_pickled_and_compiled_on_meta():
    block = Block(BlockConfig(16, 4), seeded(0))
    x = torch.randn(1, 3, 16, generator=seeded(1))
    assert torch.equal(copy.deepcopy(block)(x), block(x))
    assert torch.equal(pickle.loads(pickle.dumps(block))(x), block(x))
    with torch.device("meta"):
        assert Block(BlockConfig(16, 4))(torch.empty(1, 3, 16)).shape == (1, 3, 16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Block(BlockConfig(16, 3)), "width 16 and 3 heads"),
        (lambda: Block(BlockConfig(16, 0)), "width 16 and 0 heads"),
        (lambda: Block(BlockConfig(16, 4, scale="depth")), "'depth'"),
    ],
)
def test_impossible_shapes_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
