"""The one loop of the studies, and the one place where what they computed is kept."""

import math
from pathlib import Path

import pytest
import torch

from depthscope_lab.papers.trained import steps
from depthscope_lab.papers.vocabulary import Work
from depthscope_lab.training.kept import kept


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_loop_is_what_everybody_writes(clip: float | None):
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.ones(5, 1)
    ours, plain = (torch.nn.Linear(3, 1) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    optimiser = torch.optim.Adam(ours.parameters(), lr=9.0)
    seen, gradients = [], []
    for step, loss in steps(lambda step: (ours(x) - step * y).square().mean(), optimiser, 4, rate=_rate, clip=clip):
        seen.append((step, loss))
        gradients.append(ours.weight.grad.clone())
    optimiser, expected = torch.optim.Adam(plain.parameters()), []
    for step in range(4):
        optimiser.zero_grad()
        loss = (plain(x) - step * y).square().mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        assert torch.equal(gradients[step], plain.weight.grad)  # behind the step they are still there
        optimiser.param_groups[0]["lr"] = _rate(step)
        optimiser.step()
        expected.append((step, loss.item()))
    assert seen == expected
    assert torch.equal(ours.weight, plain.weight)


def _rate(step: int) -> float:
    return 0.1 / (step + 1)


def test_what_was_computed_for_the_same_key_is_not_computed_again(tmp_path: Path):
    made = []

    def make(value: float):
        made.append(value)
        return {"values": (value, 1), "rows": [{"a": 1 / 3}]}

    first = kept(tmp_path, {"rate": 1e-3, "form": (1, 2)}, lambda: make(math.nan))
    assert first == {"values": [None, 1], "rows": [{"a": 1 / 3}]}
    assert kept(tmp_path, {"rate": 1e-3, "form": (1, 2)}, lambda: pytest.fail("made again")) == first
    assert kept(tmp_path, {"rate": 2e-3, "form": (1, 2)}, lambda: make(2.0))["values"] == [2.0, 1]
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace("0.3333", "0.3334"))
    with pytest.warns(UserWarning, match="it is made again"):
        assert kept(tmp_path, {"rate": 1e-3, "form": (1, 2)}, lambda: make(math.nan)) == first
    assert len(made) == 3


def test_work_is_counted_in_pieces_of_any_size():
    shares: list[float] = []
    work = Work(10, shares.append)
    work()
    told = work.part(5)
    told(0.5)
    told(1.0)
    work(4)
    work()  # more than there was to be
    assert shares == [0.1, 0.35, 0.6, 1.0, 1.0]
