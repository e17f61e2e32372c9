"""A gate does not speak while the loss falls, nor before its grace period is over."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.watching import Alarm
from depthscope.watching.gate import GRACE, make_gate
from depthscope.watching.losses import BINS, Losses
from samples import seeded

RULE = "token_similarity>0.99 for 3"  # the documentation's own


def losses(*hints: float) -> Losses:
    found = Losses()
    for loss in hints:
        found.tell(loss)
    return found


def noisy(trend: list[float]) -> list[float]:
    noise = random.Random(0)
    return [value + noise.gauss(0, 0.3) for value in trend]


@pytest.mark.parametrize("steps", [100, 1000, 5000])
def test_what_falls_and_what_does_not_is_told_apart_in_noise(steps: int):
    falling = noisy([7 * (step + 1) ** -0.3 for step in range(steps)])
    assert losses(*falling).judge().falls
    spiked = [50.0 if step % 20 == 0 else loss for step, loss in enumerate(falling)]
    assert losses(*spiked).judge().falls
    assert not losses(*noisy([2 + step / steps for step in range(steps)])).judge().falls
    jumped = falling[: steps // 2] + noisy([7.0] * (steps // 2))
    assert not losses(*jumped[: int(0.65 * steps)]).judge().falls  # a fifth more steps are enough


def test_on_a_plateau_a_gate_waits_for_some_looks_and_not_for_all():
    plateau = noisy([7 * math.exp(-step / 10) + 2.3 for step in range(1000)])
    waits = [losses(*plateau[:step]).judge().falls for step in range(100, 1000, 50)]
    assert 0 < sum(waits) < len(waits)


def test_none_few_and_undefined():
    verdict = losses().judge()
    assert (verdict.falls, "is not known: call watch.tell(loss=loss)" in verdict.words) == (False, True)
    assert losses(3.0, 3.0).judge().falls  # too few
    assert not losses(3.0, 3.0, 3.0, 3.0, 3.0, 3.0).judge().falls
    for undefined in (math.nan, math.inf):
        assert losses(*range(20, 0, -1), undefined).judge() == (False, "the loss is not finite")
        assert losses(*range(20, 10, -1), undefined, *range(10, 0, -1)).judge().falls


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(0, 300))
def test_what_is_kept_is_bounded_and_goes_on_from_its_state(hints: list[float], cut: int):
    whole, first = losses(*hints), losses(*hints[:cut])
    second = Losses.of(first.state())
    for loss in hints[cut:]:
        second.tell(torch.tensor(loss, dtype=torch.float64))
    assert (second.state(), second.judge()) == (whole.state(), whole.judge())
    assert len(whole.state()["means"]) < BINS
    assert len(whole.state()["begun"]) < whole.state()["width"]


STATE = losses(1.0, 2.0).state()
DAMAGED = [
    [],
    {},
    STATE | {"means": ["1"]},
    STATE | {"means": [1.0] * BINS},
    STATE | {"width": 0},
    STATE | {"finite": 1},
]


@pytest.mark.parametrize("state", DAMAGED)
def test_a_damaged_state_is_refused_in_one_line(state: Any):
    gate = make_gate(RULE, None, ["token_similarity"], ["output"])
    with pytest.raises(ValueError, match=r"^the losses of the gate in the checkpoint are damaged: [^\n]*$"):
        gate.restore({"losses": state})


@pytest.mark.parametrize("loss", [None, "1", True, torch.ones(2), torch.ones(2).numpy(), [1.0]])
def test_what_is_no_loss_is_refused(loss: Any):
    with pytest.raises(ValueError, match=r"^expected loss= to be "):
        losses(loss)


# --- a watch ----------------------------------------------------------------------------------------------


def collapsed(hints: Any, rule: str = RULE, steps: int = 240, **rules: Any) -> list[Alarm]:
    """A model whose tokens are equal from the first step on; `told(step)` is its loss, None: it is not told."""
    torch.manual_seed(0)
    model, raised = Encoder(2, BlockConfig(8, 2)), []
    with depthscope.watch(model, 10, **({"stop_if": rule} | rules), on_alarm=raised.append) as watch:
        for step in range(steps):
            model(torch.ones(1, 3, 8))
            if hints is not None:
                watch.tell(loss=hints(step))
            if watch.should_stop:
                break
    return raised


def test_a_collapse_that_learns_nothing_is_stopped_when_the_grace_period_is_over():
    (alarm,) = collapsed(lambda _step: 2.3)
    assert (alarm.since, alarm.step) == (0, GRACE)
    assert "; the loss has not fallen: 2.3 over 64 steps, 2.3 over the 64 before" in str(alarm)
    (alarm,) = collapsed(lambda _step: torch.tensor(2.3), f"{RULE} after 70")
    assert alarm.step == 70
    (alarm,) = collapsed(lambda step: 20 - step / 20 if step < 212 else math.nan)
    assert (alarm.step, "the loss is not finite" in str(alarm)) == (220, True)


def test_nothing_is_said_while_the_loss_falls():
    for rules in ({}, {"stop_if": None, "warn_if": f"{RULE} after 0"}):
        assert collapsed(lambda step: 20 - step / 20, **rules) == []


def test_where_the_loss_is_not_told_the_alarm_says_how_to_tell_it():
    (alarm,) = collapsed(None)
    assert alarm.step == GRACE
    assert "; the loss is not known: call watch.tell(loss=loss) at every step" in str(alarm)


def test_the_alarm_says_no_more_than_was_measured():
    gate = make_gate("token_similarity>0.5 after 0", None, ["token_similarity"], ["output"])
    (alarm,) = gate.see(0, {"output": {"token_similarity": {1: 0.56}}}, [1])
    assert "0.56 at block 1: at 1 the tokens of a sequence are equal;" in str(alarm)


class Classifier(nn.Module):
    """Six pre-norm blocks on the patches of a digit; the mean of the tokens is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(4, 64), nn.Parameter(torch.randn(16, 64) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True) for _ in range(6)
        )
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, patches: Tensor) -> Tensor:
        tokens = self.embed(patches) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens).mean(1))


def test_the_documentation_s_own_rule_does_not_stop_a_healthy_training():
    """Its tokens are alike for 70 steps, and it learns; a gate that is not told the loss has its grace period alone."""
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32) / 16
    patches, labels = pictures.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4), torch.tensor(digits.target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Classifier()
    optimizer, generator, raised = torch.optim.AdamW(model.parameters(), lr=3e-3), seeded(1), []
    with (
        depthscope.watch(model, 10, stop_if=RULE) as watch,
        depthscope.watch(model, 10, stop_if=f"{RULE} after 70") as hints,
        depthscope.watch(model, 10, stop_if=f"{RULE} after 70", on_alarm=raised.append),
    ):
        for _ in range(71):
            chosen = torch.randint(len(labels), (32,), generator=generator)
            loss = nn.functional.cross_entropy(model(patches[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.tell(loss=loss)
            hints.tell(loss=loss)
    assert watch.records.query("step >= 10 and block == 6 and measure == 'token_similarity'")["value"].min() > 0.99
    assert watch.alarms == hints.alarms == []
    assert [alarm.step for alarm in raised] == [70]
