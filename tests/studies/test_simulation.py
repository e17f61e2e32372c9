"""One law of weights for modules and batched blocks: written down once, drawn in both ways."""

import pytest
import torch
from torch import nn

from depthscope import models
from depthscope.models import Attention
from depthscope.models.initialisers import HE, SCHEMES, TEXT, UNIT, XAVIER, Scheme, draw_block, draw_linear
from depthscope.studies.simulation.weights import SETTINGS, Sampler


@pytest.mark.parametrize("name", SCHEMES)
def test_modules_and_batched_blocks_have_the_same_laws(name: str):
    scheme, setting = SCHEMES[name], SETTINGS[name]
    assert (setting.score, setting.value, setting.ffn) == (scheme.score, scheme.value, scheme.ffn)
    assert setting.output is None  # as in Prop. 2.9
    assert scheme.output is not None


@pytest.mark.parametrize("name", SCHEMES)
def test_both_ways_of_drawing_have_the_same_spread(name: str):
    """Standard deviations of 65 536 numbers: 0.3 % each, so 2 % is more than four standard errors."""
    width, heads = 256, 4
    block = models.Block(models.BlockConfig(width, heads, initialise=getattr(models, name)))
    batched = Sampler(name, trials=1, width=width, heads=heads, seed=0).draw()
    for module, drawn in (
        (block.attention.query, batched.query),
        (block.attention.key, batched.key),
        (block.attention.value, batched.value),
        (block.ffn[0], batched.expand),
        (block.ffn[2], batched.contract),
    ):
        assert module.weight.std().item() == pytest.approx(drawn.weight.std().item(), rel=0.02)
        assert bool(module.bias.any()) == (drawn.bias is not None)


@pytest.mark.parametrize(("law", "expected"), [(XAVIER, 2 / 320), (HE, 2 / 64), (UNIT, 1 / 64), (TEXT, 8 / 64)])
def test_a_law_has_the_variance_it_says(law, expected: float):
    linear = nn.Linear(64, 256)
    draw_linear(law, linear, 8, torch.Generator().manual_seed(0))
    assert linear.weight.var().item() == pytest.approx(expected, rel=0.04)  # 16 384 numbers: 1.1 %
    assert not linear.bias.any()
    uniform_bound = (3 * expected) ** 0.5
    assert (linear.weight.abs().max().item() > 1.01 * uniform_bound) == law.gaussian


def test_a_block_with_an_output_matrix_needs_a_law_for_it():
    without = Scheme(UNIT, UNIT, None, HE)
    draw_block(without, Attention(16, 4, output_projection=False), nn.Linear(16, 16))
    with pytest.raises(ValueError, match="expected a scheme with a law for W_O"):
        draw_block(without, Attention(16, 4), nn.Linear(16, 16))
