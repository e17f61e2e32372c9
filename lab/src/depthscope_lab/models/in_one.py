"""A whole stack of blocks as one operation of autograd, for training deep and narrow models on a CPU.

In a block of width 32 half of the time is not spent on its numbers but around them: a module, a node of autograd and a
handful of views for each of some forty small operations. Here forward and backward pass of all blocks are written out,
and what is kept is what the backward pass reads. On a short sequence a product for each head is also faster than
PyTorch's fused kernel, which is made for long ones. Where numba is installed, all but the products is compiled
(`block_kernels.py`).

It computes what the modules compute, up to rounding, and it is for training only. `at_once.py` asks `may_run` and every
block first, and runs block by block where anybody could look inside (hooks, tensor subclasses, modes, transforms,
forward-mode derivatives, `torch.compile`), where weights are frozen or parametrised, in half precision, with a mask, on
a long sequence, and for wirings that have no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules import module as modules

from depthscope.models.mean_subtraction import is_plain
from depthscope.models.token_means import no_autocast
from depthscope_lab.models import block_kernels
from depthscope_lab.models.block_kernels import kernels_for

LONGEST = 64  # tokens: beyond it the fused kernel is as fast, and the matrices of attention begin to weigh
_fused = F.scaled_dot_product_attention  # as it is before anybody patches it to listen
_layer_norm, _layer_norm_backward = torch.native_layer_norm, torch.ops.aten.native_layer_norm_backward.default
_threshold_backward = torch.ops.aten.threshold_backward.default

Shape = Sequence[int]  # batch, n
Weights = Sequence[Tensor]


@dataclass(frozen=True)
class Plan:
    """One block in numbers. With F a branch, w its weight and g the block's gains, if it has such (else 1):

    post   x ← LN(x + w·g ⊙ F(x))      pre   x ← x + w·g ⊙ F(LN(x))      then, at the end, x ← x − τ·mean(x)
    """

    placement: Literal["post", "pre"]
    attention_weight: float = 1.0
    ffn_weight: float = 1.0
    norm_eps: float = 1e-5
    gains: tuple[str, ...] = ()  # the names of the block's two gains
    tau: float = 0.0
    heads: int = 1
    scale: float = 1.0

    @property
    def size(self) -> int:
        """How many weights a block has."""
        return 16 + len(self.gains)


def is_heard(module: nn.Module) -> bool:
    """Whether calling the module does more than its class says."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def may_run(x: Tensor) -> bool:
    """Whether nothing but plain autograd looks at what is done with the tokens x (batch, n, d)."""
    return (
        not torch._C._len_torch_function_stack()  # first: a mode would hear of the questions below
        and x.device.type == "cpu"
        and x.ndim == 3
        and x.shape[1] <= LONGEST
        and x.numel() > 0
        and torch.is_grad_enabled()
        and is_plain(x)
        and not torch._C._len_torch_dispatch_stack()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and F.scaled_dot_product_attention is _fused
        and not modules._has_any_global_hook()
    )


def run(x: Tensor, plans: list[Plan], weights: list[Tensor], owner: nn.Module | None = None) -> Tensor:
    """x (batch, n, d) through the blocks: what leaves the last one, (batch, n, d).

    `weights` has, block by block, weight and bias of queries, keys, values, output, of the FFN's two layers and of the
    two norms, then the gains that the plan names. The memory of what is kept for the backward pass stays with the
    owner, if there is one, for the next step.
    """
    return _Stack.apply(x, plans, owner, *weights)  # type: ignore[no-any-return]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plans: list[Plan], owner: nn.Module | None, *weights: Tensor) -> Tensor:
        ctx.plans, ctx.kernels = plans, kernels_for(x.dtype)
        if ctx.kernels is not None:
            result, columns = block_kernels.forward(x, plans, weights, ctx.kernels, owner)
            ctx.save_for_backward(x, *weights, columns)
            return result
        kept: list[Tensor] = []
        counts: list[int] = []
        rows, at = x.reshape(-1, x.shape[-1]), 0
        for plan in plans:
            rows, saved = _forward(rows, x.shape[:2], plan, weights[at : at + plan.size])
            at += plan.size
            kept += saved
            counts.append(len(saved))
        ctx.counts = counts
        ctx.save_for_backward(x, *weights, *kept)
        return torch.ops.aten._unsafe_view(rows, x.shape)  # no view to autograd: a model may add to it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_autocast_enabled("cpu"):  # backward() was called in its scope
            with no_autocast(gradients[0].device):
                return _Stack._gradients(ctx, gradients[0])
        return _Stack._gradients(ctx, gradients[0])

    @staticmethod
    def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *given = ctx.saved_tensors
        at, place = sum(plan.size for plan in ctx.plans), len(given)
        if torch.is_grad_enabled() or not is_plain(gradient):  # create_graph=True, or many gradients batched as one
            return _differentiable(gradient, x, ctx.plans, given[:at])
        if ctx.kernels is not None:
            if torch._C._len_torch_dispatch_stack():  # who looks on at PyTorch's operations would miss the loops
                return _differentiable(gradient, x, ctx.plans, given[:at])
            dx, of_weights = block_kernels.backward(gradient, ctx.plans, given[:at], given[at], ctx.kernels)
            return dx, None, None, *of_weights
        rows = gradient.reshape(-1, x.shape[-1])
        found: list[tuple[Tensor, ...]] = []
        for plan, count in zip(reversed(ctx.plans), reversed(ctx.counts), strict=True):
            weights, kept = given[at - plan.size : at], given[place - count : place]
            rows, own = _backward(rows, x.shape[:2], plan, weights, kept)
            found.append(own)
            at, place = at - plan.size, place - count
        return rows.view(x.shape), None, None, *(one for own in reversed(found) for one in own)


def _differentiable(gradient: Tensor, x: Tensor, plans: list[Plan], weights: Sequence[Tensor]) -> tuple[Any, ...]:
    """The same gradients, from the forward pass run once more under autograd."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        rows, at = x.reshape(-1, x.shape[-1]), 0
        for plan in plans:
            rows, _ = _forward(rows, x.shape[:2], plan, weights[at : at + plan.size])
            at += plan.size
        result = rows.view(x.shape)
    wanted = [one for one in (x, *weights) if one.requires_grad]
    found = iter(torch.autograd.grad(result, wanted, gradient, create_graph=further))
    dx, *others = (next(found) if one.requires_grad else None for one in (x, *weights))
    return dx, None, None, *others


def _forward(x: Tensor, shape: Shape, plan: Plan, weights: Weights) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One block: rows (batch·n, d) → the same, and what the backward pass reads."""
    attention, ffn, (g1, c1, g2, c2) = weights[:8], weights[8:12], weights[12:16]
    gain1, gain2 = weights[16:] or (None, None)
    width, eps = (x.shape[1],), plan.norm_eps
    if plan.placement == "post":
        mixed, inner = _mix(x, shape, plan, attention)
        y1, out1 = _add(x, mixed, attention[6], attention[7], plan.attention_weight, gain1)
        n1, mean1, scale1 = _layer_norm(y1, width, g1, c1, eps)
        hidden = torch.addmm(ffn[1], n1, ffn[0].t()).relu_()
        y2, out2 = _add(n1, hidden, ffn[2], ffn[3], plan.ffn_weight, gain2)
        z, mean2, scale2 = _layer_norm(y2, width, g2, c2, eps)
        read1, read2 = x, n1
    else:
        n1, mean1, scale1 = _layer_norm(x, width, g1, c1, eps)
        mixed, inner = _mix(n1, shape, plan, attention)
        y2, out1 = _add(x, mixed, attention[6], attention[7], plan.attention_weight, gain1)
        n2, mean2, scale2 = _layer_norm(y2, width, g2, c2, eps)
        hidden = torch.addmm(ffn[1], n2, ffn[0].t()).relu_()
        z, out2 = _add(y2, hidden, ffn[2], ffn[3], plan.ffn_weight, gain2)
        y1, read1, read2 = x, n1, n2
    if plan.tau:
        z = _without_mean(z, shape, plan.tau)
    outs = () if gain1 is None else (out1, out2)
    return z, (read1, *inner, mixed, y1, mean1, scale1, read2, hidden, y2, mean2, scale2, *outs)


def _backward(
    g: Tensor, shape: Shape, plan: Plan, weights: Weights, kept: Weights
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradient behind a block → before it, and those of its weights in their order."""
    attention, ffn, (g1, c1, g2, c2) = weights[:8], weights[8:12], weights[12:16]
    gain1, gain2 = weights[16:] or (None, None)
    read1, by_head, p, mixed, y1, mean1, scale1, read2, hidden, y2, mean2, scale2, *outs = kept
    out1, out2 = outs or (None, None)
    width, all_three = (g.shape[1],), [True, True, True]
    if plan.tau:
        g = _without_mean(g, shape, plan.tau)
    if plan.placement == "post":
        g, dg2, dc2 = _layer_norm_backward(g, y2, width, mean2, scale2, g2, c2, all_three)
    branch, dgain2 = _weighted(g, plan.ffn_weight, gain2, out2)
    dw2, db2 = torch.mm(branch.t(), hidden), branch.sum(0)
    back = _threshold_backward(torch.mm(branch, ffn[2]), hidden, 0)
    dw1, db1 = torch.mm(back.t(), read2), back.sum(0)
    if plan.placement == "post":
        g = torch.addmm(g, back, ffn[0])
        g, dg1, dc1 = _layer_norm_backward(g, y1, width, mean1, scale1, g1, c1, all_three)
    else:
        inner, dg2, dc2 = _layer_norm_backward(torch.mm(back, ffn[0]), y2, width, mean2, scale2, g2, c2, all_three)
        g = inner.add_(g)
    branch, dgain1 = _weighted(g, plan.attention_weight, gain1, out1)
    inner, of_attention = _mix_backward(branch, shape, plan, attention, (read1, by_head, p, mixed))
    if plan.placement == "post":
        g = inner.add_(g)
    else:
        inner, dg1, dc1 = _layer_norm_backward(inner, y1, width, mean1, scale1, g1, c1, all_three)
        g = inner.add_(g)
    gains = () if gain1 is None else (dgain1, dgain2)
    return g, (*of_attention, dw1, db1, dw2, db2, dg1, dc1, dg2, dc2, *gains)


def _mix(x: Tensor, shape: Shape, plan: Plan, weights: Weights) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What the heads make of rows x (batch·n, d), side by side; and queries, keys, values and attention by head.

    Scores are kept as (keys, queries): PyTorch's softmax is twice as fast over a dimension that is not the last.
    """
    (batch, n), heads = shape, plan.heads
    projected = torch.addmm(torch.cat([*weights[1:6:2]]), x, torch.cat([*weights[:6:2]]).t())  # (batch·n, 3d)
    by_head = projected.view(batch, n, 3, heads, -1).permute(2, 0, 3, 1, 4).reshape(3, batch * heads, n, -1)
    q, k, v = by_head.unbind()
    p = torch.softmax(torch.baddbmm(x.new_empty(()), k, q.mT, beta=0, alpha=plan.scale), 1)
    return _side_by_side(torch.bmm(p.mT, v), shape, heads), (by_head, p)


def _mix_backward(
    g: Tensor, shape: Shape, plan: Plan, weights: Weights, kept: Weights
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """From the gradient of attention's branch to that of what it reads, and of its eight weights."""
    (batch, n), heads = shape, plan.heads
    x, by_head, p, mixed = kept
    q, k, v = by_head.unbind()
    back = torch.mm(g, weights[6]).view(batch, n, heads, -1).transpose(1, 2).reshape(q.shape)
    ds = torch._softmax_backward_data(torch.bmm(v, back.mT), p, 1, p.dtype).mul_(plan.scale)
    apart = torch.empty_like(by_head)
    torch.bmm(ds.mT, k, out=apart[0])
    torch.bmm(ds, q, out=apart[1])
    torch.bmm(p, back, out=apart[2])
    beside = apart.view(3, batch, heads, n, -1).permute(1, 3, 0, 2, 4).reshape(batch * n, -1)  # (batch·n, 3d)
    dx = torch.mm(beside, torch.cat([*weights[:6:2]]))
    inner = zip(torch.mm(beside.t(), x).chunk(3), beside.sum(0).chunk(3), strict=True)
    return dx, (*(one for pair in inner for one in pair), torch.mm(g.t(), mixed), g.sum(0))


def _side_by_side(apart: Tensor, shape: Shape, heads: int) -> Tensor:
    """(batch·h, n, d/h) → (batch·n, d)."""
    batch, n = shape
    return apart.view(batch, heads, n, -1).transpose(1, 2).reshape(batch * n, -1)


def _add(
    trunk: Tensor, read: Tensor, weight: Tensor, bias: Tensor, factor: float, gain: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """trunk + factor·gain ⊙ (read·Wᵀ + b); and, with a gain, what it multiplies."""
    if gain is None:
        return torch.addmm(trunk, read, weight.t(), alpha=factor).add_(bias, alpha=factor), None
    out = torch.addmm(bias, read, weight.t())
    return torch.addcmul(trunk, out, gain, value=factor), out


def _weighted(g: Tensor, factor: float, gain: Tensor | None, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradient behind the weight of a branch → before it, and that of the gain."""
    g = g if factor == 1 else g * factor
    if gain is None or out is None:
        return g, None
    return g * gain, (g * out).sum(0)


def _without_mean(rows: Tensor, shape: Shape, tau: float) -> Tensor:
    tokens = rows.view(*shape, -1)
    return torch.sub(tokens, tokens.mean(dim=1, keepdim=True), alpha=tau).view(rows.shape)
