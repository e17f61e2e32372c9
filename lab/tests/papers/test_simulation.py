"""One law of weights for modules and batched blocks: written down once, drawn in both ways."""

import pytest
import torch
from torch import nn

from depthscope import models
from depthscope.models import Attention
from depthscope.models.initialisers import HE, SCHEMES, TEXT, UNIT, XAVIER, Scheme, draw_block, draw_linear
from depthscope_lab.papers.simulation.blocks import attend, root
from depthscope_lab.papers.simulation.randomness import generators, levels
from depthscope_lab.papers.simulation.weights import SETTINGS, Passing, Sampler


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


def test_levels_have_the_moments_of_the_uniform_law():
    found = levels(torch.empty(1197, 399, dtype=torch.float64), generators(0, 1)[0])  # no multiple of four
    assert torch.equal(found, found.round())
    assert (found.min().item(), found.max().item()) == (-32768, 32767)
    assert found.unique().numel() > 60_000  # of 65 536 levels
    values = (found + 0.5) / 32768
    # 477 603 numbers: four standard errors of each moment of U(−1, 1)
    for power, moment, deviation in (
        (1, 0, 3**-0.5),
        (2, 1 / 3, (1 / 5 - 1 / 9) ** 0.5),
        (4, 1 / 5, (1 / 9 - 1 / 25) ** 0.5),
    ):
        assert abs(values.pow(power).mean().item() - moment) < 4 * deviation / values.numel() ** 0.5


@pytest.mark.parametrize("biased", [True, False])
def test_passing_weights_are_those_of_the_levels(biased: bool, monkeypatch: pytest.MonkeyPatch):
    """One after the other in pieces of two rows, the last one of one; without the half they would be off centre."""
    monkeypatch.setattr("depthscope_lab.papers.simulation.weights.PIECE", 20)
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(2, 1, 5, dtype=torch.float64) if biased else None
    found = Passing((2, 5, 8), 0.3, generators(1, 1)[0], bias)(x)
    stream = generators(1, 1)[0]
    pieces = [levels(torch.empty(rows, 8, dtype=torch.float64), stream) for _ in range(2) for rows in (2, 2, 1)]
    whole = torch.cat(pieces).view(2, 5, 8)
    weight = (whole + 0.5) * 0.3 / 32768
    expected = x @ weight.mT + (0 if bias is None else bias)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    shifted = x @ (whole * 0.3 / 32768).mT + (0 if bias is None else bias)
    assert (shifted - expected).abs().max() > 1e-6


def test_a_sampler_of_passing_weights_keeps_what_is_gaussian_and_has_the_same_laws():
    size = {"trials": 1, "width": 64, "heads": 4, "seed": 0}
    kept, passing = Sampler("theorem", **size).draw(), Sampler("theorem", **size, passing=True).draw()
    assert torch.equal(kept.value.weight, passing.value.weight)
    identity = torch.eye(256).unsqueeze(0)
    for one, other in ((kept.query, passing.query), (kept.expand, passing.expand), (kept.contract, passing.contract)):
        assert isinstance(other, Passing)
        bias = 0 if other.bias is None else other.bias
        rows = identity[:, : one.shape[-1], : one.shape[-1]]
        drawn = other(rows) - bias
        assert drawn.std().item() == pytest.approx(one.weight.std().item(), rel=0.05)  # 4096 numbers: 0.7 % each
        assert (one.bias is None) == (other.bias is None)
        assert not torch.equal(drawn, other(rows) - bias)  # drawn anew


@pytest.mark.parametrize("spread", [1.0, 1e-6, 0.0])
def test_a_root_has_the_gram_matrix_of_the_tokens_also_when_they_are_alike(spread: float):
    """XW and RG are Gaussian with the covariance XXᵀ = RRᵀ: equal in law. Seen on differences, which would vanish."""
    generator = torch.Generator().manual_seed(0)
    common, own = torch.randn(2, 1, 1, 9, 40, generator=generator, dtype=torch.float64)
    x = common[..., :1, :] + spread * own
    r = root(x)
    assert r.shape == (1, 1, 9, 9)
    for tokens, rooted in ((x, r), (x[..., 1:, :] - x[..., :1, :], r[..., 1:, :] - r[..., :1, :])):
        scale = tokens.square().sum().item()
        torch.testing.assert_close(rooted @ rooted.mT, tokens @ tokens.mT, rtol=0, atol=1e-9 * scale + 1e-28)


def test_values_in_law_have_the_spread_of_values_drawn_in_full():
    """‖PXW_V‖² over 400 trials: its mean is ‖PX‖²·h·(d/h)/d both ways, to 4 standard errors."""
    x = torch.randn(1, 1, 6, 32, generator=torch.Generator().manual_seed(0)).expand(400, 1, 6, 32)
    size = {"trials": 400, "width": 32, "heads": 4, "seed": 0}
    weights = Sampler("theorem", **size, value_inputs=6).draw()
    assert weights.value.weight.shape == (400, 32, 6)
    found, p = attend(weights, x, 4, values_of=root(x))
    expected = (p @ x.unsqueeze(2)).square().sum(dim=(-2, -1)).mean(dim=-1)
    ratio = found.square().sum(dim=(-2, -1)) / expected
    assert abs(ratio.mean().item() - 1) < 4 * ratio.std().item() / 20
    with pytest.raises(ValueError, match="whose W_V is Gaussian"):
        Sampler("xavier", **size, value_inputs=6)
