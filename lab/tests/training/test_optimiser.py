"""QuickAdamW against torch's fused AdamW: bit by bit, also when gradients are missing and after loading."""

import copy
import pickle

import pytest
import torch
from torch import nn

from depthscope_lab.training.optimiser import QuickAdamW

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


def test_nothing_moves_without_gradients():
    model = make()
    before = copy.deepcopy(model.state_dict())
    optimiser = QuickAdamW(model.parameters(), **SETTINGS)
    optimiser.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def begun_anew(optimiser):
    optimiser.state.clear()
    return optimiser


@pytest.mark.parametrize(
    "change",
    [copy.deepcopy, lambda optimiser: pickle.loads(pickle.dumps(optimiser)), begun_anew],
    ids=["copied", "pickled", "begun anew"],
)
def test_the_lists_are_those_of_the_state(change):
    found = []
    for optimiser in (
        QuickAdamW(make().parameters(), **SETTINGS),
        torch.optim.AdamW(make().parameters(), **SETTINGS, fused=True),
    ):
        for step in range(4):
            if step == 2:
                optimiser = change(optimiser)
            give_gradients(nn.ParameterList(optimiser.param_groups[0]["params"]), 3 + step)
            optimiser.step()
        found.append(optimiser.param_groups[0]["params"])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_a_state_of_another_kind_of_step_is_refused(option):
    model = make()
    optimiser = QuickAdamW(model.parameters(), **SETTINGS)
    optimiser.load_state_dict(torch.optim.AdamW(make().parameters(), **SETTINGS, **{option: True}).state_dict())
    give_gradients(model, 0)
    with pytest.raises(ValueError, match="neither amsgrad nor maximize"):
        optimiser.step()


def test_a_scaler_divides_the_gradients_and_skips_those_that_overflow():
    found = []
    for make_optimiser in (QuickAdamW, torch.optim.AdamW):
        model, scaler = make(), torch.amp.GradScaler("cpu")
        optimiser = make_optimiser(model.parameters(), **SETTINGS)
        for factor in (1e-8, float("inf"), 1.0):
            optimiser.zero_grad()
            scaler.scale(factor * sum(p.square().sum() for p in model.parameters())).backward()
            scaler.step(optimiser)
            scaler.update()
        found.append(list(model.parameters()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
