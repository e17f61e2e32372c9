"""The loss on a stream: against a plain loop, in any cut, and what a leaking model loses when the future is hidden."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from depthscope.models.token_means import Full
from depthscope_lab.models import CarriedMean, TransformerXL, TransformerXLConfig
from depthscope_lab.models.transformer_xl import Context
from depthscope_lab.training.perplexity import Reading, evaluate, evaluate_without_future, perplexity_of
from samples import seeded

CONFIG = TransformerXLConfig(11, 2, 16, 2, 24, cutoffs=(6,), dropout=0.3)
CAUSAL = {
    "post": CONFIG,
    "pre": replace(CONFIG, placement="pre", final_norm=True),
    "prefix": replace(CONFIG, carried_mean=CarriedMean()),
}
LEAKING = replace(CONFIG, carried_mean=CarriedMean(mean=Full()))
READING = Reading(rows=3, segment=5, context=Context(6, clamp=4, same_length=True))
TOKENS = torch.randint(11, (100,), generator=seeded(0), dtype=torch.int32).numpy()


def make(config: TransformerXLConfig) -> TransformerXL:
    model = TransformerXL(config, seeded(0)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=seeded(parameter.numel()))
    return model


def test_it_is_the_mean_over_all_predictions():
    model = make(CONFIG)
    found = evaluate(model, TOKENS, READING)
    rows = torch.from_numpy(TOKENS[:99].reshape(3, 33).astype(np.int64))
    with torch.no_grad():
        losses = model.eval()(rows[:, :-1], rows[:, 1:], context=READING.context).losses
    assert found.tokens == 3 * 32
    assert math.isclose(found.loss, losses.mean().item(), abs_tol=1e-12)
    assert perplexity_of(found.loss) == math.exp(found.loss)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_has_one_loss_however_it_is_read(name: str):
    model = make(CAUSAL[name])
    expected = evaluate(model, TOKENS, READING).loss
    for other in (
        evaluate(model, TOKENS, replace(READING, segment=1)),
        evaluate_without_future(model, TOKENS, READING),
    ):
        assert math.isclose(other.loss, expected, abs_tol=1e-12)


def test_a_leaking_model_has_another_loss_when_the_future_is_hidden():
    model = make(LEAKING)
    assert abs(evaluate(model, TOKENS, READING).loss - evaluate_without_future(model, TOKENS, READING).loss) > 1e-3


def test_only_a_leaking_model_goes_below_the_entropy_of_independent_words_and_the_truth_shows():
    """Independent uniform words: no causal model can have less than ln V on fresh ones; a leaking one does."""
    config = replace(LEAKING, vocabulary=8, cutoffs=(), width=32, heads=4, ffn_width=64, dropout=0.0)
    model = TransformerXL(config, seeded(0))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = seeded(1)
    for _ in range(300):
        ids = torch.randint(8, (32, 9), generator=generator)
        loss = model(ids[:, :-1], ids[:, 1:], context=Context(0)).losses.mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    fresh = torch.randint(8, (4000,), generator=generator).numpy()
    reading = Reading(rows=20, segment=8, context=Context(0))
    floor = math.log(8)
    assert evaluate(model, fresh, reading).loss < 0.8 * floor
    assert evaluate_without_future(model, fresh, reading).loss > floor


def test_modes_and_gradients_are_left_as_they_were():
    model = make(CONFIG).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    evaluate(model, TOKENS, replace(READING, segments=2))
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_defaults_are_the_authors():
    reading = Reading()
    assert (reading.segment, reading.context) == (64, Context(memory=640, clamp=400, same_length=True))


def test_no_segment_is_refused_and_a_huge_loss_is_infinite():
    with pytest.raises(ValueError, match="at least 1 segment to read, got 0"):
        evaluate(make(CONFIG), TOKENS, replace(READING, segments=0))
    assert perplexity_of(1e4) == math.inf
