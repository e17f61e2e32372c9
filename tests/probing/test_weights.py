"""Whether a model looks trained, and that looking changes nothing."""

import pytest
import torch
from torch import nn

from depthscope.anatomy import anatomy_of
from depthscope.anatomy.trained import training_state
from depthscope.models import BlockConfig, Encoder
from depthscope.probing import probe
from depthscope.probing.finite import weights_not_finite
from samples import seeded
from zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_a_fresh_model_looks_fresh_and_one_step_changes_that(name: str):
    build = ZOO[name].build
    model = build()
    fresh = training_state(anatomy_of(model))
    assert fresh["look"] == "initialised"
    assert fresh["norms"] >= 2
    assert fresh["moved"] == 0
    before = {key: value.clone() for key, value in model.state_dict().items()}
    training_state(anatomy_of(model))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for parameter in model.parameters():  # one step of an optimiser with any gradient
        parameter.data += 1e-4 * torch.randn(parameter.shape, generator=seeded(0))
    moved = training_state(anatomy_of(model))
    assert moved == {"look": "trained", "norms": fresh["norms"], "moved": fresh["norms"]}


def test_gains_drawn_at_random_are_no_training():
    """Transformer-XL draws its gains; its biases are exactly 0 until it is trained."""
    model = Encoder(2, BlockConfig(16, 4), generator=seeded(0))
    for block in model.blocks:
        nn.init.normal_(block.norm1.weight, 1.0, 0.02)
    assert training_state(anatomy_of(model))["look"] == "initialised"


def test_what_has_no_norms_or_no_numbers_is_unknown():
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert probe(plain, torch.randn(2, 3, 8)).metadata["weights"] == {"look": "unknown", "norms": 0, "moved": 0}
    model = Encoder(2, BlockConfig(16, 4), generator=seeded(0))
    nn.init.constant_(model.blocks[0].norm1.bias, float("nan"))
    assert training_state(anatomy_of(model))["look"] == "unknown"


def test_norms_of_several_widths_and_formats_are_each_asked():
    model = Encoder(3, BlockConfig(16, 4), generator=seeded(0))
    model.blocks[1].norm2 = nn.RMSNorm(16)
    model.blocks[2].norm1 = nn.LayerNorm(16, dtype=torch.float64)
    model.blocks[2].norm2 = nn.LayerNorm(8)
    assert training_state(anatomy_of(model)) == {"look": "initialised", "norms": 6, "moved": 0}
    for moved, weights in ((1, model.blocks[1].norm2.weight), (2, model.blocks[2].norm1.bias)):
        nn.init.constant_(weights[3:4], 1e-30 if moved == 2 else 1.5)
        assert training_state(anatomy_of(model)) == {"look": "trained", "norms": 6, "moved": moved}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_every_weight_that_is_no_number_is_named(bad: float):
    weights = {name: torch.randn(5, 3, generator=seeded(0)) for name in "abcd"}
    weights["c"], weights["d"] = weights["c"].double(), weights["d"].bfloat16()
    weights["ids"] = torch.arange(3)
    assert weights_not_finite(weights.items()) == []
    for name in "bcd":
        weights[name][4, 1] = bad
    assert weights_not_finite(weights.items()) == ["b", "c", "d"]


def test_weights_whose_squares_overflow_are_numbers():
    huge = {"huge": torch.full((4, 4), 1e38), "small": torch.ones(3), "large": torch.full((2,), 3e38)}
    assert weights_not_finite(huge.items()) == []
