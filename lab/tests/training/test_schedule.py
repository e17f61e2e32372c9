"""The learning rate as a function of the step."""

import pytest

from depthscope_lab.training.engine import learning_rate
from tiny_training import tiny_config


def rates(total: int = 100, **changes) -> list[float]:
    config = tiny_config(lr=1.0, **changes)
    return [learning_rate(config, step, total) for step in range(total)]


def test_drops_at_70_and_90_percent_as_torchs_own():
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    reference = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[70, 90], gamma=0.2)
    expected = []
    for _ in range(100):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert rates() == pytest.approx(expected)
    assert rates()[69:71] == pytest.approx([1.0, 0.2])
    assert rates()[89:91] == pytest.approx([0.2, 0.04])


def test_cosine_falls_to_zero():
    found = rates(schedule="cosine")
    assert found[0] == 1.0
    assert found[50] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert 0 < found[-1] < 1e-3


def test_warm_up_rises_linearly_to_the_rate():
    assert rates(schedule="constant", warmup_steps=4)[:6] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
