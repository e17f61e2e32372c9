"""Watching models that are wrapped, compiled, checkpointed or remedied."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import depthscope
from depthscope import measures as m
from depthscope.models import BlockConfig, Encoder
from depthscope.remedies import deescalate
from traces import hooks_of
from zoo import IDS, MASK, TEXT, TOKENS


def encoder() -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(4, BlockConfig(16, 4))


def curve(watch: depthscope.watching.Watch, step: int) -> list[float]:
    rows = watch.records
    return rows.loc[(rows["step"] == step) & (rows["measure"] == "token_similarity"), "value"].tolist()


def plain_curve() -> list[float]:
    with depthscope.watch(model := encoder()) as watch:
        model(TOKENS, mask=MASK)
    return curve(watch, 0)


# --- activation checkpointing: the backward pass runs blocks, or the model, again -----------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.blocks = encoder().blocks
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def without_checkpoints(passes: int) -> tuple[list[list[float]], list[Tensor]]:
    model = encoder()
    x = TOKENS.clone().requires_grad_()
    with depthscope.watch(model, every=2) as watch:
        for _ in range(passes):
            model(x).square().sum().backward()
    return [curve(watch, step) for step in (0, 2)], [p.grad for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_count_once(reentrant: bool):
    model = Checkpointed(reentrant)
    x = TOKENS.clone().requires_grad_()
    with depthscope.watch(model, every=2) as watch:
        for _ in range(3):
            model(x).square().sum().backward()
    expected, gradients = without_checkpoints(3)
    assert [curve(watch, step) for step in (0, 2)] == expected
    assert watch.records["step"].unique().tolist() == [0, 2]
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_counts_once(reentrant: bool):
    model = encoder()
    x = TOKENS.clone().requires_grad_()
    with depthscope.watch(model, every=2) as watch:
        for _ in range(3):
            checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    expected, gradients = without_checkpoints(3)
    assert [curve(watch, step) for step in (0, 2)] == expected
    assert watch.records["step"].unique().tolist() == [0, 2]
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_s_checkpointing(reentrant: bool):
    curves = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = hf.BertModel(hf.BertConfig(**TEXT)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(1)  # of dropout
        with depthscope.watch(model, every=1) as watch:
            for _ in range(2):
                model(input_ids=IDS, attention_mask=MASK).last_hidden_state.square().sum().backward()
        curves.append([curve(watch, step) for step in (0, 1)])
        assert watch.records["step"].unique().tolist() == [0, 1]
    assert curves[0] == curves[1]


# --- remedies: forward hooks that change a block's output -----------------------------------------------


def remedy(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return deescalate(output, 0.7)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_remedies_are_seen_with_their_effect(when: str):
    model = encoder()
    if when == "before":
        model.blocks[1].register_forward_hook(remedy)
    with depthscope.watch(model, every=1) as watch:
        if when == "meanwhile":
            model.blocks[1].register_forward_hook(remedy)
        model(TOKENS)
    x = model.blocks[1](model.blocks[0](TOKENS))  # with the remedy
    assert curve(watch, 0)[2] == pytest.approx(m.token_similarity(x).mean().item(), rel=1e-6)
    assert curve(watch, 0)[2] < plain_curve()[2] / 2


# --- distributed ---------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("given", ["wrapper", "model"])
def test_distributed_data_parallel(given: str):
    model = encoder()
    wrapper = DistributedDataParallel(model)
    with depthscope.watch(wrapper if given == "wrapper" else model, every=2) as watch:
        for _ in range(3):
            wrapper(TOKENS, mask=MASK).square().sum().backward()
    assert curve(watch, 0) == plain_curve()
    assert watch.records["step"].unique().tolist() == [0, 2]
    assert not any(hooks_of(wrapper))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_process_alone_writes(tmp_path: Path, rank: int):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        model = encoder()
        with depthscope.watch(model, path=tmp_path / "depth.jsonl") as watch:
            model(TOKENS, mask=MASK)
    finally:
        torch.distributed.destroy_process_group()
    assert curve(watch, 0) == plain_curve()
    assert (tmp_path / "depth.jsonl").exists() == (rank == 0)


def test_data_parallel_on_one_device():
    model = DataParallel(encoder())
    with depthscope.watch(model) as watch:
        model(TOKENS, mask=MASK)
    assert curve(watch, 0) == plain_curve()


# --- torch.compile --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(model: Any, watch: depthscope.watching.Watch, passes: int = 5) -> depthscope.watching.Watch:
    with watch:
        for _ in range(passes):
            model(TOKENS, mask=MASK).square().sum().backward()
    return watch


@pytest.mark.parametrize("warm", [False, True])
def test_a_compiled_model_keeps_its_graph(warm: bool):
    counter = CompileCounter()
    model = encoder()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    if warm:
        compiled(TOKENS, mask=MASK)
    with torch._dynamo.config.patch(error_on_recompile=True):
        watch = run(compiled, depthscope.watch(compiled, every=2))
    assert counter.frame_count == 1
    assert watch.records["step"].unique().tolist() == [0, 2, 4]
    assert curve(watch, 0) == curve(watch, 4) == plain_curve()
    assert not any(hooks_of(compiled))


def test_a_compiled_model_that_fails_gets_its_graph_back():
    counter = CompileCounter()
    model = encoder()
    compiled = torch.compile(model, backend=counter)
    with depthscope.watch(compiled, every=1):
        with pytest.raises(RuntimeError):
            compiled(TOKENS[..., :5])
        assert counter.frame_count == 0
        model.eval()
        compiled(TOKENS)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler says so without us too
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_blocks(in_place: bool):
    counter = CompileCounter()
    model = encoder()
    for index, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend=counter)
        else:
            model.blocks[index] = torch.compile(block, backend=counter)
    watch = run(model, depthscope.watch(model, every=2))
    assert counter.frame_count > 0
    assert watch.records["step"].unique().tolist() == [0, 2, 4]
    assert curve(watch, 0) == curve(watch, 4) == plain_curve()


def test_a_model_compiled_in_place_is_refused():
    model = encoder()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled in place"):
        depthscope.watch(model)
    late = encoder()
    with depthscope.watch(late, every=2) as watch:
        watch.step(2)
        late.compile(backend="eager")
        with pytest.warns(UserWarning, match="the watch ends here; the training goes on: .*compiled in place"):
            late(TOKENS)
    assert not any(hooks_of(late))


@pytest.mark.parametrize("warm", [False, True])
def test_the_model_behind_a_compiled_one_is_refused(warm: bool):
    model = encoder()
    compiled = torch.compile(model, backend="eager")
    if warm:
        compiled(TOKENS)
    with depthscope.watch(model), pytest.warns(UserWarning, match=r"watch what torch.compile returned"):
        compiled(TOKENS)
    assert not any(hooks_of(model))
    step = torch.compile(lambda x: model(x).sum(), backend="eager")
    with depthscope.watch(model), pytest.warns(UserWarning, match=r"watch what torch.compile returned"):
        step(TOKENS)


class Unused(Encoder):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


def test_blocks_that_do_not_run_are_said():
    model = Unused(4, BlockConfig(16, 4))
    with depthscope.watch(model), pytest.warns(UserWarning, match=r"none of the blocks .* was seen at step 0.*blocks="):
        model(TOKENS)
    assert not any(hooks_of(model))
