"""Blocks trained in one operation, against the same blocks called one by one."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from depthscope.models import BlockConfig, Encoder
from depthscope_lab.models import AtOnceEncoder, in_one
from depthscope_lab.papers.deep.variants import weighted_post_norm

WIRINGS = {name: name for name in ("post", "pre", "deep-norm", "layer-scale")} | {
    "weighted": weighted_post_norm(alpha=0.3, tau=0.4)
}


def stack(wiring="post", depth=3, dtype=torch.float64, width=8, **config) -> AtOnceEncoder:
    generator = torch.Generator().manual_seed(0)
    encoder = AtOnceEncoder(
        depth, BlockConfig(width, 2, 12, alpha=0.7, placement=wiring, **config), generator=generator
    )
    with torch.no_grad():
        for parameter in encoder.parameters():  # no gain that is 1, no bias that is 0
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    encoder.at_once = True
    return encoder.to(dtype)


def tokens(dtype=torch.float64, n=5, width=8) -> torch.Tensor:
    return torch.randn(4, n, width, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


@pytest.fixture(params=["on", "off"])
def kernel(request, monkeypatch) -> str:
    """With compiled loops, where numba is, and in PyTorch's operations alone."""
    monkeypatch.setenv("DEPTHSCOPE_KERNEL", request.param)
    return request.param


@contextmanager
def counted(monkeypatch):
    """How often blocks are run in one inside."""
    calls, original = [], in_one.run
    monkeypatch.setattr(in_one, "run", lambda *given: calls.append(1) or original(*given))
    yield calls
    monkeypatch.setattr(in_one, "run", original)


def outcome(encoder: Encoder, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What leaves the stack, and all gradients of a fixed projection of it."""
    encoder.zero_grad()
    y = encoder(x)
    (dx,) = torch.autograd.grad((y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum(), x, retain_graph=True)
    (y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in encoder.named_parameters()}
    return {"output": y.detach(), "input": dx, **gradients}


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
def test_it_is_what_the_blocks_compute(wiring, monkeypatch, kernel):
    encoder, x = stack(wiring), tokens()
    with counted(monkeypatch) as calls:
        at_once = outcome(encoder, x)
    assert calls == [1]
    encoder.at_once = False
    one_by_one = outcome(encoder, x)
    assert at_once.keys() == one_by_one.keys()
    for name, value in one_by_one.items():
        torch.testing.assert_close(at_once[name], value, rtol=1e-10, atol=1e-12)  # 3 blocks in float64


@pytest.mark.parametrize("wiring", ["post", "pre", "layer-scale"])
def test_gradients_and_their_gradients(wiring, kernel):
    encoder, x = stack(wiring, depth=1, width=4), tokens(n=3, width=4)
    plans, weights = encoder._in_one(x)
    plans = [replace(plan, tau=0.3) for plan in plans]
    run = lambda x, *weights: in_one.run(x, plans, list(weights))  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *weights), fast_mode=True)


def test_a_mutant_without_the_mean_of_the_gradient_is_found(monkeypatch):
    monkeypatch.setenv("DEPTHSCOPE_KERNEL", "off")
    encoder, x = stack(WIRINGS["weighted"]), tokens()
    encoder.at_once = False
    right = outcome(encoder, x)
    encoder.at_once = True
    forward = in_one._without_mean
    monkeypatch.setattr(in_one, "_without_mean", lambda rows, *_: rows)
    assert not torch.allclose(outcome(encoder, x)["output"], right["output"])
    monkeypatch.setattr(
        in_one, "_backward", lambda g, shape, plan, *rest: BACKWARD(g, shape, replace(plan, tau=0.0), *rest)
    )
    monkeypatch.setattr(in_one, "_without_mean", forward)
    found = outcome(encoder, x)
    torch.testing.assert_close(found["output"], right["output"])
    assert not torch.allclose(found["input"], right["input"])


BACKWARD = in_one._backward


def hear(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def freeze(encoder: Encoder) -> None:
    encoder.blocks[1].ffn[0].weight.requires_grad_(False)


def parametrise(encoder: Encoder) -> None:
    nn.utils.parametrizations.weight_norm(encoder.blocks[0].ffn[0])


def replace_a_block(encoder: Encoder) -> None:
    encoder.blocks[1] = Passing()


def replace_an_activation(encoder: Encoder) -> None:
    encoder.blocks[1].ffn[1] = nn.GELU()


class Passing(nn.Module):
    def forward(self, x, mask=None):
        return x


REASONS = {
    "a station is heard": lambda encoder: hear(encoder.blocks[2].stations["after_ffn"]),
    "a projection is heard": lambda encoder: hear(encoder.blocks[0].attention.query),
    "a block is heard": lambda encoder: hear(encoder.blocks[1]),
    "frozen": freeze,
    "parametrised": parametrise,
    "replaced": replace_a_block,
    "another activation": replace_an_activation,
    "evaluated": lambda encoder: encoder.eval(),
}


@pytest.mark.parametrize("change", REASONS.values(), ids=REASONS)
def test_where_somebody_looks_blocks_are_called(change, monkeypatch):
    encoder, x = stack(), tokens()
    change(encoder)
    with counted(monkeypatch) as calls:
        encoder(x)
    assert not calls


def test_a_hook_hears_and_changes_what_passes():
    encoder, x = stack("pre"), tokens()
    before = encoder(x)
    handle = encoder.blocks[1].stations["ffn_branch"].register_forward_hook(lambda _m, _a, out: 2 * out)
    assert not torch.allclose(encoder(x), before)
    handle.remove()
    assert torch.equal(encoder(x), before)


def test_without_being_asked_nothing_is_done_at_once(monkeypatch):
    with counted(monkeypatch) as calls:
        Encoder(2, BlockConfig(8, 2, 12))(tokens(torch.float32))
        with torch.no_grad():
            stack()(tokens())
        stack()(tokens(), torch.ones(4, 5, dtype=torch.bool))
        stack(causal=True)(tokens())
    assert not calls


def test_nor_where_modes_or_forward_derivatives_look_on():
    x = tokens()
    assert in_one.may_run(x)
    with TorchFunctionMode():  # which refuses whatever it hears of
        assert not in_one.may_run(x)
    with forward_ad.dual_level():
        assert not in_one.may_run(x)
    assert not in_one.may_run(tokens(n=in_one.LONGEST + 1))


def test_what_leaves_may_be_changed_in_place(kernel):
    encoder, x = stack("post"), tokens()  # nothing stands behind the last block
    found = []
    for encoder.at_once in (True, False):
        y = encoder(x)
        y.mul_(3).add_(1)
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for at_once, one_by_one in zip(*found, strict=True):
        torch.testing.assert_close(at_once, one_by_one)


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
def test_many_gradients_in_one_backward_pass(wiring, monkeypatch, kernel):
    encoder, x = stack(wiring), tokens(n=3)[:1].detach()
    with counted(monkeypatch) as calls:
        batched = torch.autograd.functional.jacobian(encoder, x, vectorize=True)
    assert calls == [1]
    encoder.at_once = False
    torch.testing.assert_close(batched, torch.autograd.functional.jacobian(encoder, x))


def test_backward_in_the_scope_of_autocast(kernel):
    encoder, x = stack(dtype=torch.float32), tokens(torch.float32)
    loss = encoder(x).square().sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)
