"""Steps of a plain loop are those of the optimizer, where that can be seen; nothing stays behind."""

import gc
import weakref

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.watching import loop as module
from zoo import TOKENS


def encoder() -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(2, BlockConfig(16, 4)).train()


def steps_of(watch: depthscope.watching.Watch) -> list[int]:
    return watch.records["step"].drop_duplicates().tolist()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_accumulated_passes_are_one_step(every: int):
    model = encoder()
    optimizers = [torch.optim.SGD(list(model.parameters())[k::2], lr=1e-3) for k in (0, 1)]  # one loop, two optimizers
    with depthscope.watch(model, every=every) as watch:
        for number in range(12):
            model(TOKENS).square().mean().backward()
            if number % 4 == 3:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    assert steps_of(watch) == [step for step in range(3) if step % every == 0]


def test_the_optimizer_of_another_model_does_not_count():
    model, other = encoder(), encoder()
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-3)
    with depthscope.watch(model, every=1) as watch:
        for _ in range(3):
            model(TOKENS)
            optimizer.step()
    assert steps_of(watch) == [0, 1, 2]  # each pass, since no optimizer has this model's weights


def test_an_optimizer_that_never_steps_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PATIENCE", 3)
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with depthscope.watch(model, every=1) as watch:
        for _ in range(6):
            model(TOKENS)
    assert steps_of(watch) == [0, 1, 2, 3]
    assert optimizer.param_groups


def test_nothing_stays_behind():
    before = dict(_global_optimizer_post_hooks)
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with depthscope.watch(model):
        model(TOKENS).square().mean().backward()
        optimizer.step()
        assert len(_global_optimizer_post_hooks) == len(before) + 1
    assert dict(_global_optimizer_post_hooks) == before
    watch = depthscope.watch(model).open()
    alive = weakref.ref(model)
    del model, optimizer, watch  # never closed
    gc.collect()
    assert alive() is None
    assert dict(_global_optimizer_post_hooks) == before


def test_a_watch_that_was_never_opened_counts_no_steps():
    with pytest.raises(ValueError, match="this watch is not open"):
        depthscope.watch(Encoder(2, BlockConfig(16, 2))).step()


def test_a_loss_is_no_step():
    with depthscope.watch(Encoder(2, BlockConfig(16, 2))) as watch:
        with pytest.raises(TypeError, match=r"expected the number of the step .* got 0\.37; tell"):
            watch.step(0.37)
        watch.step(0)
