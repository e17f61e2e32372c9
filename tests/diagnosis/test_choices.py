"""What can be done: in the order of what was trained, for the depth and the kind of model."""

import json
import math
from importlib.resources import files

import pytest
import torch
import transformers as hf

import depthscope
from depthscope.diagnosis.choices import AS_IT_IS, DEESCALATION, REBUILT, Kind, for_new_model, reason_for, rebuilt
from depthscope.diagnosis.fixing import best
from depthscope.diagnosis.summary import choices_table
from depthscope.models import BlockConfig, Encoder, xavier
from depthscope.remedies import applied
from samples import seeded

IDS = torch.randint(5, 200, (3, 32), generator=seeded(0))


@pytest.mark.parametrize(
    ("depth", "first"), [(12, "ContraNorm"), (40, "MV-Split"), (60, "MV-Split"), (300, "MV-Split")]
)
def test_the_least_test_loss_at_the_nearest_depth_comes_first(depth: int, first: str):
    found = for_new_model(Kind(depth, pre_norm=False))
    assert found[0].name == first
    losses = [float(choice.evidence.removeprefix("test loss ")) for choice in found if choice.evidence[:4] == "test"]
    assert losses == sorted(losses)
    root = next(choice for choice in found if choice.name == "branches × 1/√L")
    assert root.remedies[0].alpha == pytest.approx(depth**-0.5, rel=5e-3)


def test_what_was_trained_in_pre_norm_is_not_said_of_post_norm():
    post, pre = (Kind(48, pre_norm=pre) for pre in (False, True))
    assert pre.loss("LayerScale") < 0.5 < 1 < post.loss("LayerScale")  # put into a post-norm model, it trains badly
    assert for_new_model(pre)[0].name == "LayerScale"
    assert pre.loss("MV-Split") is None
    assert rebuilt(pre) is None
    assert rebuilt(post).evidence == f"test loss {pre.loss('LayerScale'):.2f}"
    assert "If you can rebuild it, pre-norm with LayerScale had 0.35" in reason_for(for_new_model(post)[0], post)


def test_what_ships_is_whole():
    path = files("depthscope.diagnosis") / "comparisons" / "remedies.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["seeds"] >= 3
    for variants in found["depths"].values():
        assert {"post", "pre", "deescalated", "layer-scale"} <= set(variants)
        losses = [one["loss"] for one in variants.values() if one["loss"] is not None]
        assert losses == sorted(losses)


def test_fix_puts_the_first_of_its_choices_in_and_shows_them_all():
    model = Encoder(48, BlockConfig(32, 4, 64, initialise=xavier), generator=seeded(0))
    x = torch.randn(2, 16, 32, generator=seeded(1))
    fixed = depthscope.fix(model, x)
    names = [choice.name for choice in fixed.choices]
    assert names[:2] == [REBUILT, "MV-Split"]
    assert set(names[-2:]) <= {AS_IT_IS, "ReZero", "LayerScale"}
    assert {DEESCALATION, "branches × 1/√L"} <= set(names)
    assert fixed.remedies == fixed.choices[1].remedies
    put_in = next(choice for choice in fixed.choices if choice.name == "MV-Split")
    assert fixed.after.curve("token_similarity")[-1] == pytest.approx(put_in.similarity, abs=1e-5)
    as_it_is = next(choice for choice in fixed.choices if choice.name == AS_IT_IS)
    assert as_it_is.similarity > 0.99 > put_in.similarity
    assert not applied(model)
    for choice in fixed.choices:
        if choice.line is not None and choice.name != REBUILT:
            exec(choice.line, {"depthscope": depthscope, "model": model, **vars(depthscope.remedies)})
            depthscope.remove(model)
    assert [row[0] for row in choices_table(fixed.choices).rows] == [*names[:5], AS_IT_IS]
    scope = depthscope.Scope(model, x)
    assert best(scope, scope.probe()).remedies == fixed.remedies  # what `probe` says


def test_trained_weights_are_priced_and_left_as_they_are():
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=200, n_embd=32, n_layer=3, n_head=4, n_positions=64)).eval()
    with torch.no_grad():
        for block in model.transformer.h:
            block.ln_1.bias += 0.1  # as training leaves it
    fixed = depthscope.fix(model, {"input_ids": IDS})
    assert fixed.remedies == ()
    by_name = {choice.name: choice.loss for choice in fixed.choices}
    assert set(by_name) == {AS_IT_IS, "LayerScale from 1", "de-escalation, τ = 0.1", "branches × 1/√L"}
    assert all(math.isfinite(loss) for loss in by_name.values())
    assert by_name["LayerScale from 1"] == pytest.approx(by_name[AS_IT_IS], abs=1e-5)
    assert len({round(loss, 6) for loss in by_name.values()}) >= 3
    assert fixed.recommendation.reason.startswith("leave it as it is: ")
