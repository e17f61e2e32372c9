"""Watching a model in training: the numbers are right, and training is bitwise what it would be without."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import depthscope
from depthscope import measures as m
from depthscope.anatomy import anatomy_of
from depthscope.hooks import first_tokens
from depthscope.models import BlockConfig, Encoder
from samples import seeded
from traces import hooks_of, state_of
from zoo import MASK, TOKENS, ZOO, make


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def loss_of(output: Any) -> Tensor:
    items = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
    return sum(x.float().square().mean() for x in items if isinstance(x, Tensor) and x.is_floating_point())  # type: ignore[return-value]


def train(model: nn.Module, inputs: Any, steps: int) -> list[float]:
    """Some steps of gradient descent with dropout; the losses."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = loss_of(call(model, inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def encoder(depth: int = 4) -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(depth, BlockConfig(16, 4))


def steps_of(watch: depthscope.watching.Watch) -> list[int]:
    return watch.records["step"].drop_duplicates().tolist()


@pytest.mark.parametrize("name", ZOO)
def test_training_is_bitwise_the_same(name: str):
    outcomes = []
    for watched in (False, True):
        model, inputs = make(name)
        model.train()
        torch.manual_seed(5)  # of dropout
        state = state_of(model)
        if watched:
            with depthscope.watch(model, every=2, measures="light", stations="trunk") as watch:
                losses = train(model, inputs, 5)
            assert steps_of(watch) == [0, 2, 4]
            assert state_of(model)["hooks"] == state["hooks"]
            assert state_of(model)["attributes"] == state["attributes"]
        else:
            losses = train(model, inputs, 5)
        outcomes.append((losses, model.state_dict(), torch.get_rng_state()))
    (losses, weights, random), (watched_losses, watched_weights, watched_random) = outcomes
    assert watched_losses == losses
    assert torch.equal(watched_random, random)
    assert all(torch.equal(watched_weights[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", ZOO)
def test_the_numbers_are_those_of_the_training_pass_itself(name: str):
    """Dropout and all, padding left out: against hooks that keep the blocks' outputs of the same pass."""
    model, inputs = make(name)
    model.train()
    anatomy = anatomy_of(model)
    kept: list[Tensor] = []
    for module in {id(block.module): block.module for block in anatomy.blocks}.values():
        module.register_forward_hook(lambda _m, _i, output: kept.append(first_tokens(output).detach().clone()))
    with depthscope.watch(model) as watch:
        call(model, inputs)
    assert len(kept) == ZOO[name].blocks
    found = watch.records.query("block > 0")
    for measure, function in (("token_similarity", m.token_similarity), ("cosine_similarity", m.cosine_similarity)):
        tokens = [x if anatomy.token_axis == 1 else x.transpose(0, 1) for x in kept]
        expected = [function(x, ZOO[name].mask_of(block)).mean().item() for block, x in enumerate(tokens, start=1)]
        assert found.loc[found["measure"] == measure, "value"].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_gradients_are_not_disturbed_on_a_watched_step():
    gradients = []
    for every in (1, 10**6):
        model = encoder()
        with depthscope.watch(model, every, measures="light", stations="all") as watch:
            watch.step(1)  # watched by the first only
            model(TOKENS, mask=MASK).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert len(watch.records) == 0 if every > 1 else len(watch.records) > 0
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def large_tensors() -> int:
    gc.collect()
    return sum(type(x) is Tensor and x.numel() >= TOKENS.numel() for x in gc.get_objects())


def test_nothing_of_the_tokens_size_is_kept():
    model = encoder()
    passed: list[weakref.ref[Tensor]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, output: passed.append(weakref.ref(output)))
    with depthscope.watch(model, 1, measures="light", stations="trunk") as watch:
        before = large_tensors()
        model(TOKENS)
        assert large_tensors() == before
        assert len(passed) == 4
        assert all(reference() is None for reference in passed)
        kept = model.blocks[0].register_forward_hook(lambda module, _i, output: watch.__dict__.update(kept=output))
        model(TOKENS)
        kept.remove()
        assert large_tensors() > before  # the mutant is seen


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("name", ["encoder", "torch", "bert", "albert", "gpt2"])
def test_a_pass_that_fails_leaves_no_trace(name: str):
    model, inputs = make(name)
    model.train()
    state = state_of(model)
    part = [module for module in model.modules() if isinstance(module, nn.LayerNorm)][-1]
    with depthscope.watch(model, every=1) as watch:
        call(model, inputs)
        open_hooks = hooks_of(model)

        def fail(*_: object) -> None:
            raise Broken

        handle = part.register_forward_pre_hook(fail)
        with pytest.raises(Broken):
            call(model, inputs)
        handle.remove()
        model.eval()
        call(model, inputs)
        assert hooks_of(model) == open_hooks
        model.train()
        call(model, inputs)
        assert steps_of(watch) == [0, 2]  # what failed has no record
    assert state_of(model) == state

    part.register_forward_pre_hook(fail)
    with pytest.raises(Broken), depthscope.watch(model, every=1):
        call(model, inputs)
    assert sum(hooks_of(model)) == 1  # ours that fails


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_record_that_fails_leaves_no_trace(error: type[BaseException]):
    model = encoder()
    state = state_of(model)

    def fail(_step: int, _scalars: dict[str, float]) -> None:
        raise error

    with pytest.raises(error), depthscope.watch(model, on_record=fail):
        model(TOKENS)
    assert state_of(model) == state


def test_an_interrupted_pass_does_not_disturb_the_next():
    model = encoder()
    with depthscope.watch(model, every=2) as watch:
        handle = model.blocks[2].register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(TOKENS)
        handle.remove()
        model(TOKENS)  # step 1 is not watched
        assert sum(hooks_of(model)) == 1
        model(TOKENS)
    assert steps_of(watch) == [2]
    assert watch.records["block"].max() == 4
    assert not any(hooks_of(model))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_between_watched_steps_there_is_one_hook():
    model = encoder()
    counts = []
    model.blocks[-1].ffn.register_forward_hook(lambda *_: counts.append(sum(hooks_of(model))))
    with depthscope.watch(model, every=3):
        for _ in range(4):
            model(TOKENS)
    assert counts[1] == counts[2] == 2  # the counter, and the one that counts here
    assert counts[0] == counts[3] > 10


def test_passes_in_eval_mode_do_not_count():
    model = encoder()
    with depthscope.watch(model, every=2) as watch:
        for _ in range(3):
            model.train()
            model(TOKENS)
            model.eval()
            model(TOKENS)
            model(TOKENS)
    assert steps_of(watch) == [0, 2]


def test_announced_steps_may_be_several_passes():
    model = encoder()
    seen: list[int] = []
    with depthscope.watch(model, every=2, on_record=lambda step, _: seen.append(step)) as watch:
        for _ in range(3):
            watch.step()
            for _ in range(4):
                model(TOKENS)
        watch.step(100)
        model(TOKENS)
        watch.step()
        model(TOKENS)
    assert seen == steps_of(watch) == [0, 2, 100]
    assert len(watch.records) == 3 * 2 * 5


def test_counting_and_announcing_do_not_mix():
    model = encoder()
    with depthscope.watch(model) as watch:
        model(TOKENS)
        with pytest.raises(ValueError, match="at the head of every step, or never"):
            watch.step()


def test_a_model_that_is_never_seen_is_said():
    model = encoder().eval()
    with pytest.warns(UserWarning, match=r"no training pass was seen.*model.train\(\)"), depthscope.watch(model):
        model(TOKENS)
    with depthscope.watch(model) as watch:
        watch.step()
        model(TOKENS)
        with pytest.warns(UserWarning, match="step 0 was to be watched, and Encoder was not called"):
            watch.step()
    assert watch.scalars() == {}
    assert watch.records.empty
    assert list(watch.records.columns) == ["step", "block", "station", "measure", "value"]


def test_it_follows_the_weights():
    """The table has the model of each step: a planted collapse appears when it is planted."""
    model = encoder()
    with depthscope.watch(model, every=1) as watch:
        model(TOKENS)
        with torch.no_grad():
            model.blocks[2].norm2.weight.zero_()
            model.blocks[2].norm2.bias.normal_(generator=seeded(0))
        model(TOKENS)
    similarity = watch.records.query("measure == 'token_similarity'").pivot(
        index="step", columns="block", values="value"
    )
    assert similarity.loc[0].max() < 0.9
    assert similarity.loc[1, 2] == similarity.loc[0, 2]
    assert similarity.loc[1, 3] == pytest.approx(1)
    assert watch.scalars()["depth/t_sim_passes_0.9"] == 3
    assert watch.scalars()["depth/effective_depth"] == 3


def test_a_copy_of_the_model_is_not_watched():
    model = encoder()
    with depthscope.watch(model, every=1) as watch:
        average = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        for other in (average, loaded):
            assert torch.equal(other(TOKENS), model(TOKENS))
    assert steps_of(watch) == [0, 1]  # the two calls of the model itself


def test_under_autocast_the_measures_keep_full_precision():
    model = encoder()
    kept: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda _m, _i, output: kept.append(output.detach()))
    with depthscope.watch(model) as watch, torch.autocast("cpu", dtype=torch.bfloat16):
        model(TOKENS)
    expected = m.token_similarity(kept[0].double()).mean().item()
    assert watch.scalars()["depth/t_sim_last"] == pytest.approx(expected, rel=1e-5)


def test_two_watches_at_once():
    model = encoder()
    with depthscope.watch(model, every=1) as fine, depthscope.watch(model, every=3, stations="trunk") as coarse:
        for _ in range(4):
            model(TOKENS)
    assert steps_of(fine) == [0, 1, 2, 3]
    assert steps_of(coarse) == [0, 3]
    assert not any(hooks_of(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "1 or more, got 0"),
        ({"every": 2.5}, "1 or more, got 2.5"),
        ({"measures": "nothing"}, "unknown measure 'nothing'"),
        ({"measures": ["delta"]}, "delta: attention matrices are not watched; use depthscope.probe"),
        ({"stations": "nowhere"}, "unknown station 'nowhere'"),
        ({"path": "no/such/folder/x.jsonl"}, "the folder no/such/folder does not exist"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str):
    model = encoder()
    with pytest.raises(ValueError, match=message):
        depthscope.watch(model, **options).open()
    assert not any(hooks_of(model))


def test_opening_twice_is_refused():
    watch = depthscope.watch(encoder()).open()
    with pytest.raises(ValueError, match="open already"):
        watch.open()
    watch.close()
    watch.open().close()  # again, after its end
