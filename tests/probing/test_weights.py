"""Whether a model looks trained, and that looking changes nothing."""

import pytest
import torch
from torch import nn

from depthscope.anatomy import anatomy_of
from depthscope.anatomy.look import look_of_weights
from depthscope.models import BlockConfig, Encoder
from depthscope.probing import probe
from samples import seeded
from zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_a_fresh_model_looks_fresh_and_one_step_changes_that(name: str):
    build = ZOO[name].build
    model = build()
    fresh = look_of_weights(anatomy_of(model))
    assert fresh["look"] == "initialised"
    assert fresh["norms"] >= 2
    assert fresh["moved"] == 0
    before = {key: value.clone() for key, value in model.state_dict().items()}
    look_of_weights(anatomy_of(model))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for parameter in model.parameters():  # one step of an optimiser with any gradient
        parameter.data += 1e-4 * torch.randn(parameter.shape, generator=seeded(0))
    moved = look_of_weights(anatomy_of(model))
    assert moved == {"look": "trained", "norms": fresh["norms"], "moved": fresh["norms"]}


def test_gains_drawn_at_random_are_no_training():
    """Transformer-XL draws its gains; its biases are exactly 0 until it is trained."""
    model = Encoder(2, BlockConfig(16, 4), generator=seeded(0))
    for block in model.blocks:
        nn.init.normal_(block.norm1.weight, 1.0, 0.02)
    assert look_of_weights(anatomy_of(model))["look"] == "initialised"


def test_what_has_no_norms_or_no_numbers_is_unknown():
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert probe(plain, torch.randn(2, 3, 8)).metadata["weights"] == {"look": "unknown", "norms": 0, "moved": 0}
    model = Encoder(2, BlockConfig(16, 4), generator=seeded(0))
    nn.init.constant_(model.blocks[0].norm1.bias, float("nan"))
    assert look_of_weights(anatomy_of(model))["look"] == "unknown"
