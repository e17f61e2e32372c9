"""The recipe on letters: its data, its windows, causality, what it refuses, and that it learns."""

import math

import pytest
import torch

from depthscope_lab.training import lm_manual, make_task
from depthscope_lab.training.characters import load_characters
from depthscope_lab.training.estimate import estimate
from depthscope_lab.training.task import Share

SMALL = {"depth": 2, "width": 16, "heads": 2, "ffn_width": 16, "context": 12, "batch_size": 8, "eval_windows": 40}
CPU, ALL = torch.device("cpu"), Share(0, 1)


def task_of(variant="post", **changes):
    return make_task(lm_manual(variant).changed(**(SMALL | changes)))


def test_letters_and_the_three_parts_of_the_text():
    data = load_characters()
    text = "".join("?" if number == 0 else data.letters[number - 1] for number in data.train[:50].tolist())
    assert text == text.strip("?")  # the training part knows all its letters
    total = len(data.train) + len(data.valid) + len(data.test)
    assert len(data.valid) == len(data.test) == total // 10
    assert int(torch.cat([data.valid, data.test]).max()) < data.symbols
    assert data.describe()["symbols"] == data.symbols


def test_a_batch_is_a_function_of_step_and_share():
    task = task_of()
    ids, targets = task.batch(3, ALL, CPU)
    assert ids.shape == targets.shape == (8, 12)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    parts = [task.batch(3, Share(index, 2), CPU)[0] for index in (0, 1)]
    assert torch.equal(torch.cat(parts), ids)
    assert not torch.equal(task.batch(4, ALL, CPU)[0], ids)


@pytest.mark.parametrize("variant", ["post", "pre", "deescalated(tau=0.5)"])
def test_no_letter_sees_a_later_one(variant: str):
    task = task_of(variant)
    model = task.build().eval()
    ids, _ = task.batch(0, ALL, CPU)
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % task.data.symbols
    with torch.no_grad():
        assert torch.allclose(model(ids)[:, :6], model(other)[:, :6], atol=1e-6)
        assert not torch.allclose(model(ids)[:, 6:], model(other)[:, 6:], atol=1e-3)


def test_what_sees_the_future_is_refused():
    with pytest.raises(ValueError, match="lm-manual has no variant"):
        lm_manual("deescalated-leaking")
    with pytest.raises(ValueError, match="de-escalation sees later letters here, and lm-manual cannot hide them"):
        task_of("post+de-escalation(mixing=full, allow_leak=true)").build()


def test_an_evaluation_is_the_mean_over_windows_side_by_side_of_either_part():
    task = task_of()
    model = task.build().eval()
    with torch.no_grad():
        found = task.evaluate(model, ALL, CPU)
        halves = [task.evaluate(model, Share(index, 2), CPU) for index in (0, 1)]
        first = task.data.valid[: 12 + 1]
        logs = model(first[None, :-1]).log_softmax(-1)[0]
        alone = -logs[torch.arange(12), first[1:]].sum().item()
        task_of(evaluate_on="test", eval_windows=1)
        single = task_of(eval_windows=1).evaluate(model, ALL, CPU)
    assert found["count"] == 40 * 12
    assert sum(half["valid_loss"] for half in halves) == pytest.approx(found["valid_loss"])
    assert single["valid_loss"] == pytest.approx(alone, rel=1e-5)
    assert "test_loss" in task_of(evaluate_on="test").evaluate(model, ALL, CPU)


def test_it_learns_and_its_size_is_estimated():
    task = task_of("pre", lr=1e-2)
    assert estimate(task.config).parameters == sum(p.numel() for p in task.build().parameters())
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(40):
        loss, _ = task.loss(model, task.batch(step, ALL, CPU), None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(task.data.symbols), abs=0.5)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.7


def test_a_window_longer_than_the_text_is_refused():
    with pytest.raises(ValueError, match="expected a context of less than"):
        task_of(context=10**8)
    with pytest.raises(ValueError, match="expected context greater than 0"):
        task_of(context=0)
