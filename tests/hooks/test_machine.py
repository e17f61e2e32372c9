"""The machine: every pass is followed block by block, listening changes nothing, changing changes what is asked for."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import zoo
from depthscope.anatomy import anatomy_of
from depthscope.hooks import Change, Listen, ListenToAttention, Machine, Visit, undisturbed
from depthscope.inputs import batches
from depthscope.models import BlockConfig, Encoder, post_norm, pre_norm
from samples import seeded
from traces import hooks_of


def run(model: nn.Module, inputs, *sites) -> Tensor:
    """The last block's output, with the sites at work."""
    found: list[Tensor] = []
    keep = Listen({"output"}, lambda _v, _s, tokens, _source: found.append(tokens.clone()))
    with undisturbed(model), Machine(model, anatomy_of(model), *sites, keep):
        for batch in batches(model, inputs):
            model(*batch.args, **batch.kwargs)
    return found[-1]


def encoder(placement=post_norm, depth: int = 3) -> tuple[Encoder, Tensor]:
    model = Encoder(depth, BlockConfig(16, 4, placement=placement), generator=seeded(0)).double()
    return model, torch.randn(2, 6, 16, dtype=torch.float64, generator=seeded(1))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_visits_are_numbered_and_know_what_entered(name: str):
    model, inputs = zoo.make(name)
    hooks = hooks_of(model)
    numbers: list[int] = []

    def hear(visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        if station == "input":
            numbers.append(visit.number)
            assert visit.entered.shape == visit.shape
            assert torch.equal(visit.entered, source)
            assert visit.real is None or visit.real.shape == tokens.shape[:2]

    anatomy = anatomy_of(model)
    with undisturbed(model), Machine(model, anatomy, Listen({"input"}, hear)) as machine:
        for batch in batches(model, inputs):
            for _ in range(2):  # every pass is counted from 1
                model(*batch.args, **batch.kwargs)
    depth = zoo.ZOO[name].blocks
    assert numbers == [*range(1, depth + 1)] * 2
    assert machine.blocks_run == depth
    assert machine.visit is None
    assert hooks_of(model) == hooks


@pytest.mark.parametrize("placement", [post_norm, pre_norm])
def test_a_change_that_gives_none_changes_nothing(placement):
    model, x = encoder(placement)
    plain = run(model, x)
    stations = anatomy_of(model).blocks[0].spots
    assert len(stations) >= 8
    for station in stations:
        assert torch.equal(run(model, x, Change(station, lambda _visit, _tokens: None)), plain)


def test_a_block_its_attention_and_its_ffn_are_left_out():
    """What the next rooms build on: without a block, without a branch, without a skip."""
    model, x = encoder(pre_norm)

    def by_hand(attention: float = 1.0, ffn: float = 1.0, skip: float = 1.0, left_out: int = 0) -> Tensor:
        y = x
        for number, block in enumerate(model.blocks, start=1):
            if number == left_out:
                continue
            a = attention * block.attention(block.norm1(y))
            y = skip * y + a
            y = y + ffn * block.ffn(block.norm2(y))
        return y

    with torch.no_grad():
        skipped = Change("output", lambda visit, _tokens: visit.entered if visit.number == 2 else None)
        assert_close(run(model, x, skipped), by_hand(left_out=2), rtol=0, atol=1e-12)
        for branch, arguments in (("attention_branch", {"attention": 0.5}), ("ffn_branch", {"ffn": 0.0})):
            factor = next(iter(arguments.values()))
            changed = Change(branch, lambda _visit, tokens, factor=factor: factor * tokens)
            assert_close(run(model, x, changed), by_hand(**arguments), rtol=0, atol=1e-12)
        without_skip = Change("after_attention", lambda visit, tokens: tokens - visit.entered)
        assert_close(run(model, x, without_skip), by_hand(skip=0.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["bert", "xlnet", "torch-tokens-first", "gpt2", "opt"])
def test_a_block_runs_again_unheard(name: str):
    model, inputs = zoo.make(name)
    heard = []

    def hear(visit: Visit, station: str, tokens: Tensor, _source: Tensor) -> None:
        heard.append((visit.number, station))
        if station == "output":
            again = visit.again(machine.running.batch_first(visit.entered))
            assert_close(again, tokens, rtol=0, atol=1e-6)
            other = visit.again(torch.zeros_like(again))
            assert other.shape == tokens.shape
            assert not torch.equal(other, tokens)

    with undisturbed(model), Machine(model, anatomy_of(model), Listen({"input", "output"}, hear)) as machine:
        for batch in batches(model, inputs):
            model(*batch.args, **batch.kwargs)
    assert heard == [(n, station) for n in (1, 2, 3) for station in ("input", "output")]


def test_attention_comes_as_operators_of_the_running_block():
    model, inputs = zoo.make("t5")
    seen = []

    def hear(visit: Visit, kind: str, heads, values: Tensor | None) -> None:
        first = next(iter(heads))
        rows = (first.attention @ torch.ones(2, first.attention.shape[-1], 1)).squeeze(-1)
        assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-5)
        assert values is not None
        seen.append((visit.number, kind))

    run(model, inputs, ListenToAttention(hear))
    crosses = [(n, kind) for n in (4, 5, 6) for kind in ("attention", "cross_attention")]
    assert seen == [(1, "attention"), (2, "attention"), (3, "attention"), *crosses]


@pytest.mark.parametrize("station", ["input", "ffn_branch", "output"])
def test_nothing_is_left_after_an_exception_in_a_site(station: str):
    model, x = encoder()

    def fail(*_: object) -> None:
        raise RuntimeError("inside")

    for site in (Listen({station}, fail), Change(station, fail)):
        with pytest.raises(RuntimeError, match="inside"):
            run(model, x, site)
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    machine = Machine(model, anatomy_of(model), Listen({station}, fail))
    with pytest.raises(RuntimeError, match="inside"), machine:
        model(x)
    with machine, pytest.raises(RuntimeError, match="inside"):  # it can be opened again
        model(x)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


class FromList(nn.Sequential):
    """A block that is made from a list of modules."""

    def __init__(self, width: int):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, width))


def test_blocks_that_are_lists_of_modules_are_followed():
    model = nn.Sequential(*(FromList(8) for _ in range(3)))
    x = torch.randn(2, 5, 8, generator=seeded(0))
    assert_close(run(model, x), model(x), rtol=0, atol=0)


def test_a_machine_is_open_once():
    model, x = encoder()
    machine = Machine(model, anatomy_of(model))
    with machine, pytest.raises(ValueError, match="open already"), machine:
        model(x)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_station_that_does_not_exist_or_is_not_shown_is_refused():
    model, _ = encoder()
    with pytest.raises(ValueError, match="unknown station 'outptu': did you mean 'output'"):
        Machine(model, anatomy_of(model), Listen({"outptu"}, lambda *_: None))
    unknown = nn.Sequential(*(FromList(8) for _ in range(3)))
    with pytest.raises(ValueError, match="does not show its ffn_branch"):
        Machine(unknown, anatomy_of(unknown), Change("ffn_branch", lambda _visit, tokens: tokens))


@pytest.mark.parametrize("name", ["vit", "gpt2", "llama", "t5", "encoder-pre"])
def test_a_change_of_the_trunk_is_one_also_where_a_norm_reads_a_copy(name: str):
    """Doubled after attention: the output is the doubled trunk plus the branches that follow."""
    model, inputs = zoo.make(name)
    seen: dict[tuple[int, str], Tensor] = {}

    def keep(visit: Visit, station: str, tokens: Tensor, _source: Tensor) -> None:
        seen[visit.number, station] = tokens.clone()

    heard = {"after_attention", "after_cross_attention", "cross_attention_branch", "ffn_branch", "output"}
    doubled = Change("after_attention", lambda _visit, tokens: 2 * tokens)
    run(model, inputs, doubled, Listen(heard, keep))
    for number in {number for number, _ in seen}:
        trunk = seen[number, "after_attention"]
        if (number, "after_cross_attention") in seen:
            trunk = trunk + seen[number, "cross_attention_branch"]
            assert_close(seen[number, "after_cross_attention"], trunk, rtol=1e-5, atol=1e-4)
        assert_close(seen[number, "output"], trunk + seen[number, "ffn_branch"], rtol=1e-5, atol=1e-4)


def test_what_one_machine_runs_again_no_other_hears():
    model, x = encoder()
    counted: list[int] = []
    again = Listen({"output"}, lambda visit, _s, _t, _source: visit.again(x))
    count = Listen({"output"}, lambda visit, _s, _t, _source: counted.append(visit.number))
    with torch.no_grad(), Machine(model, anatomy_of(model), again), Machine(model, anatomy_of(model), count) as other:
        model(x)
    assert counted == [1, 2, 3]
    assert other.blocks_run == 3


def test_nothing_of_a_failed_pass_is_kept():
    model, x = encoder()
    kept: list[weakref.ref[Tensor]] = []
    machine = Machine(model, anatomy_of(model), Listen({"input"}, lambda _v, _s, _t, y: kept.append(weakref.ref(y))))
    handle = model.blocks[2].ffn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), machine:
        model(x)
    handle.remove()
    gc.collect()
    assert [ref() is None for ref in kept[1:]] == [True, True]  # the first is `x` itself
