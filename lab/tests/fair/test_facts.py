"""The task facts: its table, its order, its measures; and that small models learn it."""

import math

import pytest
import torch

from depthscope.models import BlockConfig
from depthscope_lab.fair import Budget, Facts, Member, Reader, Table, Together, equal_width
from depthscope_lab.fair.facts import ASK, LABELS, SYMBOLS, bits_stored, table


def test_keys_are_distinct_and_drawn_from_the_seed():
    keys, labels = table(3, 8192)
    assert len(keys.unique(dim=0)) == len(keys) == len(labels) == 8192
    assert (keys.min(), keys.max(), labels.max()) == (0, SYMBOLS - 1, LABELS - 1)
    assert not torch.equal(keys, table(4, 8192)[0])
    assert (labels.bincount(minlength=LABELS).float().std() / 128) < 0.15  # √128 of 128 is .09


def test_a_pass_sees_every_fact_once_also_where_batches_do_not_divide_it():
    facts = Facts(facts=50, samples=20)
    seen = torch.cat([facts.batch(1, step)[0] for step in range(5)])[:, :3]
    for one in (seen[:50], seen[50:]):
        assert len(one.unique(dim=0)) == 50
    assert not torch.equal(seen[:50], seen[50:])
    assert torch.equal(facts.batch(1, 2)[0], facts.batch(1, 2)[0])


def test_labels_are_those_of_the_keys_and_noise_is_drawn_anew():
    facts = Facts(facts=40, noise=5, samples=40)
    known = {tuple(key): label for key, label in zip(*(part.tolist() for part in table(1, 40)), strict=True)}
    (first, labels), (second, _) = facts.batch(1, 0), facts.batch(1, 1)
    assert first.shape == (40, facts.tokens) == (40, 9)
    assert [known[tuple(row[:3])] for row in first.tolist()] == labels.tolist()
    assert bool((first[:, -1] == ASK).all())
    assert not torch.equal(first[:, 3:-1], second[:, 3:-1])


def test_bits_stored():
    assert bits_stored(0.0, 8192) == Facts(8192).capacity == 49152
    assert bits_stored(math.log(LABELS), 8192) == pytest.approx(0, abs=1e-9)
    assert bits_stored(9.0, 8192) == 0
    assert math.isnan(bits_stored(math.nan, 8192))
    assert bits_stored(0.313, 8192) == pytest.approx(45453, abs=1)  # 8192 (6 − .313/ln 2)
    scores = torch.zeros(4, LABELS)
    measured = Facts(4).measure(scores, torch.tensor([0, 1, 2, 3]))
    assert measured["bits"] == pytest.approx(0, abs=1e-9)
    assert measured["accuracy"] == 0.25


def test_a_model_stores_more_than_a_table_can():
    """40 facts, known after 150 steps by one block of width 16; of 8192 a linear model stores 9 %."""
    members, budget = [Member(1, 1e-2)], Budget(150)
    few, many = Facts(40, samples=40), Facts(8192, samples=2048)
    block = BlockConfig(16, 2, 32, placement="pre")
    reader = Together(few, lambda seed: Reader(1, block, few.tokens, seed), members, budget)
    linear = Together(many, lambda _: Table(many.tokens), members, budget)
    for one in (reader, linear):
        one.train()
    assert reader.measure()[0]["accuracy"] == 1
    assert linear.measure()[0]["bits"] < 0.12 * many.capacity


def test_the_wide_model_has_about_as_many_weights():
    def count(depth, width):
        return sum(p.numel() for p in Reader(depth, BlockConfig(width, 2, 2 * width), 4, 0).encoder.parameters())

    assert equal_width(48, 16) == 80
    assert count(2, equal_width(48, 16)) == pytest.approx(count(48, 16), rel=0.1)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="1 to 32768 facts"):
        Facts(40_000)
    with pytest.raises(ValueError, match="noise"):
        Facts(10, noise=-1)


def test_a_filler_is_the_same_in_every_sample_and_the_key_stays():
    plain, filled = Facts(facts=40, samples=40), Facts(facts=40, filler=8, samples=40)
    (keys, labels), (inputs, same) = plain.batch(1, 0), filled.batch(1, 0)
    assert inputs.shape == (40, filled.tokens) == (40, 12)
    assert torch.equal(inputs[:, :3], keys[:, :3])
    assert torch.equal(labels, same)
    assert bool((inputs[:, 3:] == ASK).all())
