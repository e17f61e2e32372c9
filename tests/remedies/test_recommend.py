"""The recommended τ holds the level that was asked for; measuring it leaves no trace."""

import pytest
import torch

import depthscope
import zoo
from depthscope.measures import token_similarity
from depthscope.models import BlockConfig, Encoder, pre_norm
from depthscope.remedies import DeEscalate, ResidualWeight, applied, recommend
from depthscope.remedies.recommendation import HELD, gradient_growth, growth_by_weight
from depthscope.theory import odds_of
from samples import seeded


def tokens(width: int = 128) -> torch.Tensor:
    return torch.randn(4, 32, width, generator=seeded(0))


def last_similarity(model: torch.nn.Module, x: torch.Tensor) -> float:
    return depthscope.probe(model, x, measures=["token_similarity"]).curve("token_similarity")[-1]


@pytest.mark.parametrize("level", [0.1, 0.3])
def test_the_level_is_held(level: float):
    x = tokens()
    model = Encoder(60, BlockConfig(128, 4), generator=seeded(1))
    assert last_similarity(model, x) > 0.9
    found = recommend(model, x, level=level, weigh_branches=False)
    assert found.odds.critical_tau < found.tau < 1
    depthscope.apply(model, *found.remedies)
    assert last_similarity(model, x) == pytest.approx(found.expected_similarity, rel=1e-6)
    # The log-odds of 60 blocks scatter about their fixed point; a factor of 1.6 in the odds is 3 of its deviations,
    # √(1.5 k/d) with the k ≈ 10 blocks that the map remembers.
    assert level / 1.6 < found.expected_similarity <= level * HELD


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_the_level_is_held_in_blocks_that_are_copies_of_one_another(seed: int):
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(128, 8, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 48, enable_nested_tensor=False)  # copies the layer, weights and all
    x = torch.randn(2, 64, 128)
    found = recommend(model, x, weigh_branches=seed == 0)  # which is looked for after τ
    by_the_map = found.odds.tau_for(odds_of(found.level))
    depthscope.apply(model, DeEscalate(by_the_map))
    assert last_similarity(model, x) > 2 * found.level  # what was promised once
    depthscope.apply(depthscope.remove(model), DeEscalate(found.tau))
    assert found.level / 2 < last_similarity(model, x) <= HELD * found.level
    depthscope.apply(depthscope.remove(model), *found.remedies)
    assert last_similarity(model, x) == pytest.approx(found.expected_similarity, rel=1e-6)


def test_a_level_that_cannot_be_held_is_not_promised():
    model, inputs = zoo.make("gpt2")
    found = recommend(model, inputs, level=0.001, weigh_branches=False)  # in block 1 the tokens of a causal mean differ
    depthscope.apply(model, *found.remedies)
    assert found.expected_similarity > HELD * 0.001
    profile = depthscope.probe(model, inputs, measures=["token_similarity"])
    assert profile.curve("token_similarity")[-1] == pytest.approx(found.expected_similarity, rel=1e-5)


def test_a_chaotic_stack_gets_a_branch_weight_that_tames_its_gradient():
    def he(attention, ffn, generator):
        for module in [*attention.modules(), *ffn.modules()]:
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=(2 / module.in_features) ** 0.5, generator=generator)
                torch.nn.init.zeros_(module.bias)

    x = tokens(64)
    model = Encoder(80, BlockConfig(64, 4, initialise=he), generator=seeded(1))
    found = recommend(model, x)
    assert found.growth[1.0] ** 80 > 10
    assert found.alpha is not None
    assert 0 < found.alpha < 1
    assert "branch weight" in found.reason
    assert not applied(model)
    depthscope.apply(model, *found.remedies)
    few = x[:2]  # which it is measured on
    growth = gradient_growth(depthscope.probe(model, few, measures=["token_similarity"], gradients=True))
    assert growth == pytest.approx(found.growth[found.alpha], rel=1e-5)
    assert growth**80 < 10
    assert any(isinstance(entry.remedy, ResidualWeight) for entry in applied(model))


@pytest.mark.parametrize(
    "name", ["encoder-pre", "torch-tokens-first", "bert", "albert", "xlnet", "gpt2", "llama", "t5"]
)
def test_every_kind_of_model_is_measured_and_left_as_it_was(name: str):
    model, inputs = zoo.make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = recommend(model, inputs, weigh_branches=name not in ("xlnet", "t5"))
    assert found.blocks == 3  # of an encoder-decoder, those of the half that is more alike
    assert found.odds.rho > 0
    assert found.odds.feed > 0
    assert not applied(model)
    assert not hasattr(getattr(model, "config", None), "depthscope_remedies")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_nothing_is_recommended_where_nothing_escalates():
    x = tokens()
    model = Encoder(3, BlockConfig(128, 4, placement=pre_norm), generator=seeded(1))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.output.weight.zero_()
            block.ffn[2].weight.zero_()
            block.ffn[2].bias.zero_()
            block.attention.output.bias.zero_()
    found = recommend(model, x)
    assert found.remedies == ()
    assert "by themselves" in found.reason


def test_a_sequence_without_odds_is_left_out():
    model, _ = zoo.make("bert")
    whole = recommend(model, {"input_ids": zoo.IDS}, weigh_branches=False)
    mask = torch.cat([torch.ones(2, 7), torch.eye(7)[:1]]).long()  # a third with a single token
    found = recommend(
        model, {"input_ids": zoo.IDS[[0, 1, 0]], "attention_mask": mask}, weigh_branches=False, level=whole.level
    )
    assert found.odds.rho == pytest.approx(whole.odds.rho, rel=1e-3)
    assert found.odds.feed == pytest.approx(whole.odds.feed, rel=1e-3)


def test_the_level_is_that_of_the_real_tokens_at_the_entrance():
    model, _ = zoo.make("encoder")
    real = zoo.MASK.bool().unsqueeze(-1)
    x = torch.where(real, zoo.TOKENS + 0.5, 50.0)  # padding, all of it equal and large
    entrance = token_similarity(x, zoo.MASK).mean().item()
    assert 0.1 < entrance < 0.5
    assert abs(token_similarity(x).mean().item() - entrance) > 0.02
    found = recommend(model, {"x": x, "mask": zoo.MASK}, weigh_branches=False)
    assert found.level == pytest.approx(entrance, rel=1e-6)


def test_bad_wishes_are_refused():
    model, x = Encoder(2, BlockConfig(128, 4), generator=seeded(1)), tokens()
    with pytest.raises(ValueError, match="between 0 and 1, got 0"):
        recommend(model, x, level=0)
    with pytest.raises(ValueError, match="at least one batch"):
        recommend(model, [])
    with pytest.raises(ValueError, match="cannot be measured"):
        recommend(model, x[:, :1])


def test_a_tower_is_recommended_for_by_its_own_numbers():
    """The text tower of CLIP, whose tokens are more alike: its blocks 4 to 6, its causality, its entrance."""
    model, inputs = zoo.make("clip")
    found = recommend(model, inputs)
    assert found.blocks == 3
    assert {remedy.blocks for remedy in found.remedies} == {(4, 5, 6)}
    assert "of the part 'text'" in found.reason
    alone = recommend(model.text_model, {key: inputs[key] for key in ("input_ids", "attention_mask")})
    assert found.odds.rho == pytest.approx(alone.odds.rho, rel=1e-5)
    assert found.tau == alone.tau
    assert found.level == pytest.approx(alone.level, rel=1e-6)
    depthscope.apply(model, *found.remedies)  # chosen by numbers: no warning
    assert {item.part for item in applied(model)} == {"text"}


def test_the_weight_that_is_prescribed_is_tried_first_and_mended_where_it_does_not_do():
    def growth(alpha: float) -> float:  # per block
        return 1.1 ** (alpha * alpha)

    assert list(growth_by_weight(growth, 20, 0.5)) == [1.0]  # 1.1²⁰ is allowed
    assert list(growth_by_weight(growth, 60, 0.5)) == [1.0, 0.5]  # 4.2 over 60 blocks
    mended = growth_by_weight(growth, 60, 0.9)
    assert list(mended) == [1.0, 0.9, 0.45]
    assert list(growth_by_weight(growth, 60, 1.0)) == [1.0, 0.45]  # nothing is prescribed
    assert len(growth_by_weight(lambda _: 2.0, 60, 0.9)) == 4  # no weight helps
