"""QuickAdamW against torch's fused AdamW: bit by bit, also when gradients are missing and after loading."""

import copy

import pytest
import torch
from torch import nn

from depthscope.training.optimiser import QuickAdamW

SETTINGS = {"lr": 0.01, "betas": (0.5, 0.7), "weight_decay": 0.3}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def give_gradients(model: nn.Module, step: int) -> None:
    """Other ones in every step; the first layer has none in step 2."""
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(model.parameters()):
        grad = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if step == 2 and number < 2 else grad


def states(optimiser) -> list[torch.Tensor]:
    found = optimiser.state_dict()
    return [value for entries in found["state"].values() for _, value in sorted(entries.items())]


def test_it_is_torchs_fused_adamw_bit_by_bit():
    ours, theirs = make(), make()
    quick, fused = (
        QuickAdamW(ours.parameters(), **SETTINGS),
        torch.optim.AdamW(theirs.parameters(), **SETTINGS, fused=True),
    )
    for step in range(6):
        if step == 4:  # as after a checkpoint
            state = copy.deepcopy(quick.state_dict())
            quick = QuickAdamW(ours.parameters(), **SETTINGS)
            quick.load_state_dict(state)
        for model, optimiser in ((ours, quick), (theirs, fused)):
            give_gradients(model, step)
            optimiser.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimiser.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert quick.state_dict()["param_groups"] == fused.state_dict()["param_groups"]
    assert all(torch.equal(one, other) for one, other in zip(states(quick), states(fused), strict=True))


def test_every_parameter_has_a_count_of_its_own_in_the_state():
    model = make()
    optimiser = QuickAdamW(model.parameters(), **SETTINGS)
    give_gradients(model, 0)
    optimiser.step()
    places = [entries["step"].data_ptr() for entries in optimiser.state_dict()["state"].values()]
    assert len(set(places)) == 4


def test_nothing_moves_without_gradients_and_a_closure_is_refused():
    model = make()
    before = copy.deepcopy(model.state_dict())
    optimiser = QuickAdamW(model.parameters(), **SETTINGS)
    optimiser.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="no closure"):
        optimiser.step(lambda: 0.0)
