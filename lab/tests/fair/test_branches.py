"""The cross of wirings: its corners are those that are known, and τ takes out the mean."""

import pytest
import torch

from depthscope.models import BlockConfig, Encoder
from depthscope_lab.fair.branches import crossed


def out(placement, tokens, generator_seed=0):
    generator = torch.Generator().manual_seed(generator_seed)
    return Encoder(3, BlockConfig(8, 2, 16, placement=placement), generator=generator)(tokens)


@pytest.mark.parametrize("placement", ["post", "pre", "deep-norm", "rezero"])
def test_without_weight_and_mean_it_is_the_wiring_itself(placement):
    tokens = torch.randn(2, 5, 8)
    assert torch.equal(out(crossed(placement), tokens), out(placement, tokens))


def test_the_branch_weight_is_that_of_the_formula():
    """One post-norm block with α: LN(y + αF(y)), y = LN(x + αA(x))."""
    encoder = Encoder(
        1, BlockConfig(8, 2, 16, placement=crossed("post", 0.3)), generator=torch.Generator().manual_seed(0)
    )
    x, block = torch.randn(2, 5, 8), encoder.blocks[0]
    y = block.norm1(x + 0.3 * block.attention(x))
    assert torch.allclose(encoder(x), block.norm2(y + 0.3 * block.ffn(y)), atol=1e-6)
    gains = Encoder(2, BlockConfig(8, 2, 16, placement=crossed("layer-scale", 0.1))).blocks[1]
    assert bool((gains.gain1 == 0.1).all() and (gains.gain2 == 0.1).all())


@pytest.mark.parametrize("placement", ["post", "pre", "layer-scale"])
def test_tau_takes_the_mean_out_after_each_block(placement):
    """τ = 1 leaves no mean; a causal one lets no token see a later one."""
    tokens = torch.randn(2, 5, 8)
    block = Encoder(1, BlockConfig(8, 2, 16, placement=crossed(placement, 0.5, 1.0))).blocks[0]
    assert block(tokens).mean(1).abs().max() < 1e-6
    causal = BlockConfig(8, 2, 16, causal=True, placement=crossed(placement, 0.5, 0.5, causal=True))
    changed = torch.cat([tokens[:, :4], torch.randn(2, 1, 8)], 1)
    encoder = Encoder(3, causal)
    assert torch.allclose(encoder(tokens)[:, :4], encoder(changed)[:, :4], atol=1e-6)


def test_a_wiring_with_weights_of_its_own_takes_no_other():
    with pytest.raises(ValueError, match="a weight of their own"):
        crossed("deep-norm", 0.5)
