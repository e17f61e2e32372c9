"""Which samples a step sees, and the random numbers behind it."""

import torch

from depthscope_lab.training import vit_digits
from depthscope_lab.training.data.order import batch_indices
from depthscope_lab.training.engine import step_seed
from depthscope_lab.training.randomness import derived_seed, seeded
from depthscope_lab.training.task import Share


def test_an_epoch_shows_no_sample_twice_and_each_epoch_has_its_own_order():
    epochs = [torch.cat([batch_indices(0, 4 * epoch + step, 35, 8) for step in range(4)]) for epoch in range(50)]
    for epoch in epochs:
        assert len(epoch.unique()) == 32
    assert not torch.equal(epochs[0], epochs[1])
    assert len(torch.cat(epochs).unique()) == 35  # who is left out changes


def test_order_is_a_function_of_seed_and_step():
    before = [batch_indices(7, step, 100, 10) for step in range(30)]
    shuffled = {step: batch_indices(7, step, 100, 10) for step in reversed(range(30))}
    assert all(torch.equal(before[step], shuffled[step]) for step in range(30))
    assert not torch.equal(batch_indices(8, 0, 100, 10), before[0])


def test_shares_are_disjoint_and_complete():
    batch = list(range(12))
    assert [sample for index in range(4) for sample in batch[Share(index, 4).of(12)]] == batch


def test_names_give_unrelated_seeds_that_torch_takes():
    seeds = {derived_seed(seed, name, step) for seed in range(3) for name in "ab" for step in range(100)}
    assert len(seeds) == 600
    assert derived_seed(1, 23) != derived_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeded_leaves_the_global_state_alone():
    before = torch.random.get_rng_state()
    with seeded(1):
        first = torch.rand(3)
    with seeded(1):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_dropout_differs_between_seeds_steps_and_shares():
    configs = [vit_digits("post").changed(seed=seed) for seed in (0, 1)]
    seeds = {step_seed(config, step, share) for config in configs for step in (0, 1) for share in (0, 1)}
    assert len(seeds) == 8
