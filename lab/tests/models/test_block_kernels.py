"""Blocks in PyTorch's products and loops, against the same blocks called one by one."""

import gc
import importlib.util

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from depthscope.models import BlockConfig, Encoder
from depthscope_lab.models import AtOnceEncoder, block_kernels, block_loops, in_one, spare
from depthscope_lab.models.block_kernels import Kernels, exponential, kernels_for
from depthscope_lab.papers.deep.variants import weighted_post_norm

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="the extra `fast` is not installed")

WIRINGS = {name: name for name in ("post", "pre", "deep-norm", "layer-scale")} | {
    "weighted": weighted_post_norm(alpha=0.3, tau=0.4)
}


def plain(dtype: torch.dtype) -> Kernels:
    """The loops as they are, uncompiled."""
    return Kernels(*(getattr(block_loops, name) for name in block_kernels._NAMES), *exponential(dtype))


def stack(wiring="post", dtype=torch.float64, depth=2, width=8, heads=2, ffn=12) -> AtOnceEncoder:
    generator = torch.Generator().manual_seed(0)
    encoder = AtOnceEncoder(depth, BlockConfig(width, heads, ffn, alpha=0.7, placement=wiring), generator=generator)
    with torch.no_grad():
        for parameter in encoder.parameters():  # no gain that is 1, no bias that is 0
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return encoder.to(dtype)


def drawn(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def outcome(encoder: Encoder, x: torch.Tensor, at_once: bool) -> dict[str, torch.Tensor]:
    """What leaves the stack, and all gradients of a fixed projection of it."""
    encoder.at_once = at_once
    encoder.zero_grad()
    x = x.clone().requires_grad_()
    y = encoder(x)
    (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return {"output": y.detach(), "input": x.grad} | {name: one.grad for name, one in encoder.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        scale = value.abs().max().item() + 1  # sums over tokens round with their largest part
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12 * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
def test_the_loops_as_they_are(wiring, monkeypatch):
    monkeypatch.setattr(in_one, "kernels_for", plain)
    encoder, x = stack(wiring), drawn(2, 5, 8)
    assert_equal(outcome(encoder, x, True), outcome(encoder, x, False))


SIZES = [  # batch, tokens, width, heads, FFN
    (1, 1, 1, 1, 1),
    (3, 1, 6, 2, 5),
    (1, 2, 6, 6, 1),
    (5, 7, 9, 3, 11),
    (2, 17, 10, 2, 3),
    (3, 64, 14, 2, 9),
    (33, 4, 8, 1, 16),
]


@needs_numba
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("wiring", ["weighted", "layer-scale"])
def test_compiled_in_odd_sizes(size, wiring):
    batch, n, width, heads, ffn = size
    encoder, x = stack(WIRINGS[wiring], width=width, heads=heads, ffn=ffn), drawn(batch, n, width)
    assert kernels_for(torch.float64) is not None
    assert_equal(outcome(encoder, x, True), outcome(encoder, x, False))


@needs_numba
@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
def test_float32_errs_no_more_than_the_blocks_do(wiring):
    width, heads, x = 32, 4, drawn(16, 17, 32)
    right = outcome(stack(wiring, width=width, heads=heads), x, False)
    narrow = stack(wiring, torch.float32, width=width, heads=heads)
    found, blocks = outcome(narrow, x.float(), True), outcome(narrow, x.float(), False)
    for name, value in right.items():
        own, theirs = ((one[name] - value).abs().max() for one in (found, blocks))
        floor = 2**-23 * (16 * 17) ** 0.5 * value.abs().max()  # what 272 tokens add up to by chance
        assert own <= 2 * theirs + floor, (name, own, theirs)


@needs_numba
def test_blocks_of_different_shapes():
    encoder, x = stack(depth=3), drawn(3, 5, 8)
    other = stack(depth=1, heads=4, ffn=7)
    encoder.blocks[1] = other.blocks[0]
    assert_equal(outcome(encoder, x, True), outcome(encoder, x, False))


@needs_numba
@pytest.mark.parametrize("name", block_kernels._NAMES)
def test_mutants_without_one_of_the_loops_are_found(name, monkeypatch):
    encoder, x = stack(WIRINGS["weighted"]), drawn(2, 5, 8)
    right = outcome(encoder, x, False)
    mutant = kernels_for(torch.float64)._replace(**{name: lambda *_: None})
    monkeypatch.setattr(in_one, "kernels_for", lambda _dtype: mutant)
    with pytest.raises(AssertionError):
        assert_equal(outcome(encoder, x, True), right)
    with pytest.raises(AssertionError):
        block_kernels._try(name, exponential(torch.float64), lambda *_: None)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_of_all_kinds_of_scores(dtype):
    scores = torch.stack([torch.zeros(6), torch.tensor([0.0, -1, -30, -80, -500, -1e4]), torch.linspace(-3, 3, 6)])
    scores = torch.cat([scores, scores * 1e3, torch.full((1, 6), torch.nan), torch.full((1, 6), -torch.inf)])
    scores = torch.cat([scores, torch.tensor([[torch.inf, 1, 2, 3, 4, 5], [-torch.inf, 1, 2, 3, 4, 5]])]).to(dtype)
    p = scores.T.contiguous()  # (n, tokens)
    kernels = kernels_for(dtype)
    kernels.softmax(p.numpy(), 1, kernels.series, kernels.exponents, 0, 1)
    right, smallest = scores.softmax(1), 1e-37 if dtype == torch.float32 else 1e-300  # below it nothing is told from 0
    assert torch.equal(p.T.isnan(), right.isnan())
    u = (scores - scores.amax(1, keepdim=True)).abs()  # which is rounded itself
    off = (p.T - right).abs() > 4 * torch.finfo(dtype).eps * (1 + u) * right + smallest
    assert not off[~right.isnan()].any()


@needs_numba
def test_nan_comes_out_where_it_goes_in():
    encoder, x = stack(), drawn(3, 5, 8)
    x[1, 2, 3] = torch.nan
    encoder.at_once = True
    y = encoder(x.requires_grad_())
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


@needs_numba
def test_a_mode_hears_what_the_backward_pass_does():
    encoder, x = stack(), drawn(3, 5, 8)
    right = outcome(encoder, x, False)
    encoder.at_once = True
    x.requires_grad_()
    y = encoder(x)
    loss = (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum()
    heard = set()

    class Listens(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            heard.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Listens():
        (found,) = torch.autograd.grad(loss, x)
    assert torch.ops.aten.bmm in heard
    torch.testing.assert_close(found, right["input"])


@needs_numba
def test_memory_is_used_again_but_not_while_anybody_needs_it():
    encoder, x = stack(), drawn(3, 5, 8).requires_grad_()
    encoder.at_once = True
    first = encoder(x)
    second = encoder(x * 2)  # both graphs are needed
    found = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (first, second, first)]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    memory = spare._spares[encoder].memory
    del first, second
    y = encoder(x)
    assert spare._spares[encoder].memory is memory
    y.sum().backward()
    encoder(x[:2]).sum().backward()  # a smaller batch finds room in it
    assert spare._spares[encoder].memory is memory
    encoder(torch.cat([x, x])).sum().backward()
    assert len(spare._spares[encoder].memory) > len(memory)


@needs_numba
def test_memory_is_not_taken_from_who_holds_another_tensor_of_it():
    encoder, x = stack(), drawn(3, 5, 8).requires_grad_()
    encoder.at_once = True
    with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.clone):
        y = encoder(x)
    encoder(x * 3)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    (right,) = torch.autograd.grad(encoder(x).square().sum(), x)
    assert torch.equal(found, right)


@needs_numba
def test_memory_goes_with_the_model():
    encoder, x = stack(), drawn(3, 5, 8)
    encoder.at_once = True
    encoder(x).sum().backward()
    before = len(spare._spares)
    del encoder
    gc.collect()
    assert len(spare._spares) == before - 1


@needs_numba
def test_the_loops_are_left_where_they_are_not_wanted(monkeypatch):
    monkeypatch.setenv("DEPTHSCOPE_KERNEL", "off")
    assert kernels_for(torch.float32) is None


def test_plain_loops_of_one_head_are_those_of_all():
    rng = np.random.default_rng(0)
    left, right, whole, parts = (rng.normal(size=(6, 10)) for _ in range(4))
    block_loops.meet(left, right, 3, 0.5, whole[:6], 0, 3)
    for head in range(3):
        block_loops.meet(left, right, 3, 0.5, parts[:6], head, head + 1)
    assert np.array_equal(whole, parts)
