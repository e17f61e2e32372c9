"""What the verdict says of remedies that were trained: the nearest depth, the best, and what is compared with it."""

import json
from importlib.resources import files

import pytest
import torch
from depthscope.diagnosis.trained_remedies import trained_at

import depthscope
from depthscope.diagnosis import trained_remedies
from depthscope.models import BlockConfig, Encoder
from depthscope.models.language import CausalLM
from samples import seeded


def stage(**losses):
    ordered = sorted(losses, key=lambda name: losses[name][0] or 9.0)
    return {
        name.replace("_", "-"): {"label": name.upper(), "loss": losses[name][0], "rank": losses[name][1]}
        for name in ordered
    }


@pytest.fixture
def made_up(monkeypatch):
    few = stage(pre=(0.1, "best"), keel=(0.11, "equal"), deescalated=(0.5, "worse"), post=(2.0, "worse"))
    many = stage(deescalated=(0.3, "best"), pre=(0.6, "worse"), post=(None, ""))
    found = {"task": "made up", "seeds": 3, "depths": {"10": few, "100": many}}
    monkeypatch.setattr(trained_remedies, "_comparison", lambda: found)


def test_it_is_the_nearest_depth_in_logarithms(made_up):
    assert "with 10 blocks (made up, 3 seeds), the least test loss had PRE 0.10, KEEL 0.11" in trained_at(31)
    assert trained_at(32).endswith("DEESCALATED 0.30; PRE 0.60, POST failed")
    assert trained_at(10_000) == trained_at(32)
    assert "DEESCALATED 0.50, POST 2.00" in trained_at(1)


def test_what_ships_names_three_variants_at_every_depth_and_its_best_is_first():
    path = files("depthscope.diagnosis") / "comparisons" / "remedies.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["seeds"] >= 3
    for variants in found["depths"].values():
        assert {"post", "pre", "deescalated"} <= set(variants)
        losses = [one["loss"] for one in variants.values() if one["loss"] is not None]
        assert losses == sorted(losses)
        assert next(iter(variants.values()))["rank"] == "best"


def test_only_new_models_that_see_all_tokens_are_told(made_up):
    x = torch.randn(2, 16, 32, generator=seeded(0))
    new = Encoder(100, BlockConfig(32, 4, 64), generator=seeded(1))
    hints = str(depthscope.diagnose(depthscope.probe(new, x)).recommendation.reason)
    assert "trained side by side with 100 blocks" in hints
    assert "which one suits your task, `depthscope compare` measures" in hints


def test_a_causal_mean_that_wears_tokens_down_is_said_with_its_numbers():
    def advice(depth: int) -> str:
        model = CausalLM(depth, BlockConfig(16, 2, 32), vocabulary=11, context=16, generator=seeded(0))
        ids = torch.randint(0, 11, (2, 16), generator=seeded(1))
        return str(depthscope.diagnose(depthscope.probe(model, ids)).recommendation.reason)

    said = advice(60)
    assert "side by side" not in said  # those were not causal
    assert "over 60 blocks it leaves" in said
    assert "with every=10" in said
    assert "over" not in advice(6)
