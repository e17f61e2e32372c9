"""Progress: pieces, shares of a piece, and pulses of a loop that nobody or somebody listens to."""

import pytest
import torch

from depthscope.measures import heads, operators
from depthscope.models import BlockConfig, Encoder
from depthscope.probing import probe
from depthscope.progress import Steps, pulse, pulses
from samples import seeded


def test_steps_count_pieces_and_shares_of_the_running_one():
    shown: list[float] = []
    steps = Steps(shown.append)
    steps.inside(0.5)
    steps()
    steps.inside(0.25)
    steps()
    assert shown == [0.5, 1, 1.25, 2]


def test_pulses_reach_the_listener_alone_and_only_while_it_listens():
    heard: list[float] = []
    pulse(0.1)
    with pulses(heard.append):
        pulse(0.2)
        inner: list[float] = []
        with pulses(inner.append):
            pulse(0.3)
    pulse(0.4)
    assert heard == [0.2]
    assert inner == [0.3]


def test_a_bar_moves_within_the_attention_of_long_heads(monkeypatch: pytest.MonkeyPatch):
    """Two blocks of two heads, swept over in four tiles: the bar never goes back, and ends at every block."""
    monkeypatch.setattr(heads, "TOGETHER", 100)
    monkeypatch.setattr(operators, "TILE", 16 * 64)
    shown: list[float] = []
    model = Encoder(2, BlockConfig(8, 2), generator=seeded(0))
    tokens = torch.randn(1, 64, 8, generator=seeded(1))
    profile = probe(model, tokens, measures=["delta", "attention_entropy"], progress=Steps(shown.append))
    assert shown == sorted(shown)
    assert {0.5, 1.0, 1.5, 2.0} <= set(shown)
    within = [share for share in shown if share < 0.5]
    assert len(set(within)) > 8  # sweeps, in tiles
    monkeypatch.undo()
    dense = probe(model, tokens, measures=["delta", "attention_entropy"])
    for measure in ("delta", "attention_entropy"):
        assert profile.curve(measure, "attention")[1:] == pytest.approx(dense.curve(measure, "attention")[1:], rel=1e-5)
