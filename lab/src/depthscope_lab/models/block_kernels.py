"""A stack of blocks in PyTorch's products and compiled loops (`block_loops.py`): how `in_one` computes with numba.

Tokens are (features, tokens) throughout, so that no product needs a transposed copy and no head has to be cut out. The
rows of one matrix are all that the backward pass reads. Gains and weights of branches are multiplied into the small
matrices behind them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from depthscope import compiling
from depthscope_lab.models import block_loops, spare

if TYPE_CHECKING:
    from depthscope_lab.models.in_one import Plan

Weights = Sequence[Tensor]
Pair = tuple[Tensor, Tensor]  # weight and bias of a layer
_NAMES = (
    "meet", "gather", "softmax", "softmax_backward",
    "norm", "norm_backward", "relu", "relu_backward", "subtract_mean",
)  # fmt: skip


class Kernels(NamedTuple):
    """The loops, compiled for one dtype, and the constants with which they compute exp."""

    meet: compiling.Loops
    gather: compiling.Loops
    softmax: compiling.Loops
    softmax_backward: compiling.Loops
    norm: compiling.Loops
    norm_backward: compiling.Loops
    relu: compiling.Loops
    relu_backward: compiling.Loops
    subtract_mean: compiling.Loops
    series: Any
    exponents: Any

    @property
    def number(self) -> Any:
        """The type of a number: one of another width would make every product a double."""
        return self.series.dtype.type


def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """The compiled loops; None where there is no numba, or it is not wanted. The environment is asked each time."""
    return _compiled(dtype) if compiling.wanted() else None


@cache
def _compiled(dtype: torch.dtype) -> Kernels | None:
    constants, found = exponential(dtype), []
    for name in _NAMES:
        # Sums may be taken in another order, which makes them fast; nan and infinity keep their meaning.
        plain = getattr(block_loops, name)
        made = compiling.compiled(plain, partial(_try, name, constants), fastmath={"reassoc", "contract", "nsz"})
        if made.loops is None:
            return None
        found.append(made.loops)
    return Kernels(**dict(zip(_NAMES, found, strict=True)), series=constants[0], exponents=constants[1])


def exponential(dtype: torch.dtype) -> tuple[Any, Any]:
    """What `block_loops.softmax` needs for exp: numbers, and integers of the same width."""
    kind, integer, least, offset, digits = (
        (np.float32, np.int32, -87.0, 127, 23) if dtype == torch.float32 else (np.float64, np.int64, -708.0, 1023, 52)
    )
    terms = [1 / math.factorial(power) for power in reversed(range(block_loops.TERMS))]
    series = [least, 1 / math.log(2), math.log(2), 0.5, 1.0, *terms]
    return np.array(series, kind), np.array([offset, 1 << digits], integer)


def _try(name: str, constants: tuple[Any, Any], loops: compiling.Loops) -> None:
    """The compiled loops and the plain ones must agree: 2 heads of 5 features, 5 tokens, 2 sequences."""
    kind = constants[0].dtype.type
    some = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return some.uniform(0.5, 1.5, shape).astype(kind)

    given: dict[str, tuple[Any, ...]] = {
        "meet": (drawn(10, 10), drawn(10, 10), 2, kind(0.3), drawn(10, 10), 0, 2),
        "gather": (drawn(10, 10), drawn(10, 10), 2, True, drawn(10, 10), 0, 2),
        "softmax": (drawn(10, 10), 2, *constants, 0, 2),
        "softmax_backward": (drawn(10, 10), drawn(10, 10), 2, kind(0.3), 0, 2),
        "norm": (drawn(10, 10), drawn(10), drawn(10), drawn(10), kind(1e-5), drawn(2, 10), drawn(10, 10)),
        "norm_backward": (
            drawn(10, 10), drawn(10, 10), drawn(2, 10), drawn(10), drawn(10, 10), drawn(10, 10), drawn(3, 10),
        ),
        "relu": (drawn(10, 10) - 1, drawn(10) - 1),
        "relu_backward": (drawn(10, 10), drawn(10, 10) - 1, drawn(10)),
        "subtract_mean": (drawn(10, 10), 5, kind(0.3)),
    }  # fmt: skip
    expected = [one.copy() if isinstance(one, np.ndarray) else one for one in given[name]]
    getattr(block_loops, name)(*expected)
    loops(*given[name])
    for found, right in zip(given[name], expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


def _to_columns(x: Tensor, out: Tensor) -> Tensor:
    """(batch, n, d) → (d, n·batch)."""
    batch, n, d = x.shape
    out.view(d, n, batch).copy_(x.permute(2, 1, 0))
    return out


def _from_columns(columns: Tensor, shape: torch.Size) -> Tensor:
    """(d, n·batch) → (batch, n, d), always a copy."""
    batch, n, d = shape
    return columns.new_empty(shape).copy_(columns.view(d, n, batch).permute(2, 1, 0))


def forward(
    x: Tensor, plans: list[Plan], weights: Weights, kernels: Kernels, owner: nn.Module | None
) -> tuple[Tensor, Tensor]:
    """x (batch, n, d) through the blocks; and what is kept: x in columns, and below it the rows of each block."""
    batch, n, d = x.shape
    sizes = _sizes(n, plans, weights)
    kept = spare.matrix(d + sum(map(sum, sizes)), n * batch, x.dtype, owner)
    columns, at = _to_columns(x, kept[:d]), 0
    for plan, own in zip(plans, _cut(kept, d, sizes), strict=True):
        _forward(columns, n, plan, weights[at : at + plan.size], own, kernels)
        columns, at = own.out, at + plan.size
    return _from_columns(columns, x.shape), kept


def backward(
    gradient: Tensor, plans: list[Plan], weights: Weights, kept: Tensor, kernels: Kernels
) -> tuple[Tensor, list[Tensor]]:
    """The gradient (batch, n, d) behind the blocks → before them, and those of all weights in their order."""
    batch, n, d = gradient.shape
    g = _to_columns(gradient, gradient.new_empty(d, n * batch))
    sizes = _sizes(n, plans, weights)
    rows = _cut(kept, d, sizes)
    works: dict[tuple[int, ...], _Work] = {}  # one, if nobody has changed a block
    found: list[tuple[Tensor, ...]] = []
    at = len(weights)
    for number in reversed(range(len(plans))):
        plan = plans[number]
        at -= plan.size
        if sizes[number] not in works:
            works[sizes[number]] = _work_for(g, sizes[number])
        before = rows[number - 1].out if number else kept[:d]
        own = weights[at : at + plan.size]
        found.append(_backward(g, before, n, plan, own, rows[number], works[sizes[number]], kernels))
    return _from_columns(g, gradient.shape), [one for own in reversed(found) for one in own]


class _Kept(NamedTuple):
    """What a block keeps, as rows of one matrix; all have n·batch columns."""

    out: Tensor  # (d) what leaves the block
    projected: Tensor  # (3d) queries, keys, values
    attention: Tensor  # (heads·n) by distance
    mixed: Tensor  # (d) what the heads make of the values
    trunk: Tensor  # (d) behind attention
    normed1: Tensor  # (d)
    hidden: Tensor  # (f) behind ReLU
    other: Tensor  # (d) post-norm: the trunk behind the FFN; pre-norm: what norm2 makes of the one behind attention
    stats1: Tensor  # (2)
    stats2: Tensor  # (2)


def _sizes(n: int, plans: list[Plan], weights: Weights) -> list[tuple[int, ...]]:
    """How many rows of each kind the blocks keep, in the order of `_Kept`."""
    sizes: list[tuple[int, ...]] = []
    at = 0
    for plan in plans:
        d, f = len(weights[at + 6]), len(weights[at + 8])
        sizes.append((d, 3 * d, plan.heads * n, d, d, d, f, d, 2, 2))
        at += plan.size
    return sizes


def _cut(kept: Tensor, d: int, sizes: list[tuple[int, ...]]) -> list[_Kept]:
    """The rows of each block, below those of what enters the first."""
    rows = kept.split_with_sizes([d, *(size for own in sizes for size in own)])[1:]
    each = len(_Kept._fields)
    return [_Kept(*rows[at : at + each]) for at in range(0, len(rows), each)]


def _forward(x: Tensor, n: int, plan: Plan, weights: Weights, at: _Kept, kernels: Kernels) -> None:
    """One block: x (d, n·batch) → `at.out`, and the other rows."""
    g1, c1, g2, c2 = map(_array, weights[12:16])
    gain1, gain2 = weights[16:] or (None, None)
    wo, bo = _weighted(weights[6], weights[7], plan.attention_weight, gain1)
    w2, b2 = _weighted(weights[10], weights[11], plan.ffn_weight, gain2)
    eps, post = kernels.number(plan.norm_eps), plan.placement == "post"
    stats1, stats2, normed1 = at.stats1.numpy(), at.stats2.numpy(), at.normed1.numpy()
    if not post:
        kernels.norm(x.numpy(), np.zeros_like(g1), g1, c1, eps, stats1, normed1)
    _attend(at.normed1 if not post else x, plan, weights, at, kernels)
    torch.addmm(x, wo, at.mixed, out=at.trunk)
    if post:
        kernels.norm(at.trunk.numpy(), _array(bo), g1, c1, eps, stats1, normed1)
    else:
        kernels.norm(at.trunk.numpy(), _array(bo), g2, c2, eps, stats2, at.other.numpy())
    torch.mm(weights[8], at.normed1 if post else at.other, out=at.hidden)
    kernels.relu(at.hidden.numpy(), _array(weights[9]))
    if post:
        torch.addmm(at.normed1, w2, at.hidden, out=at.other)
        kernels.norm(at.other.numpy(), _array(b2), g2, c2, eps, stats2, at.out.numpy())
    else:
        torch.addmm(at.trunk, w2, at.hidden, out=at.out).add_(b2[:, None])
    if plan.tau:
        kernels.subtract_mean(at.out.numpy(), n, kernels.number(plan.tau))


class _Work(NamedTuple):
    """What the gradient passes through in a block; written over by the next one."""

    behind: Tensor  # (d, m) the gradient of the trunk behind the FFN, or behind attention
    inner: Tensor  # (d, m) that of what a branch reads
    hidden: Tensor  # (f, m)
    projected: Tensor  # (3d, m)
    scores: Tensor  # (heads·n, m)


def _work_for(g: Tensor, sizes: tuple[int, ...]) -> _Work:
    d, inner, scores, f = sizes[0], sizes[1], sizes[2], sizes[6]
    return _Work(*(g.new_empty(rows, g.shape[1]) for rows in (d, d, f, inner, scores)))


def _backward(
    g: Tensor, x: Tensor, n: int, plan: Plan, weights: Weights, at: _Kept, work: _Work, kernels: Kernels
) -> tuple[Tensor, ...]:
    """The gradient g (d, m) behind a block becomes that before it, in place; → those of its weights in their order.

    x (d, m) is what entered the block.
    """
    d, f = len(x), len(at.hidden)
    sums = x.new_empty(6 * d + f)
    dg2, dc2, both2, dg1, dc1, both1, db1 = sums.split_with_sizes([d] * 6 + [f])
    found2, found1 = sums.numpy()[: 6 * d].reshape(2, 3, d)
    if plan.tau:
        kernels.subtract_mean(g.numpy(), n, kernels.number(plan.tau))
    norm1 = at.stats1.numpy(), _array(weights[12])
    norm2 = at.stats2.numpy(), _array(weights[14])
    arrays = g.numpy(), work.behind.numpy(), work.inner.numpy()
    nothing = arrays[0][:0]
    gain1, gain2 = weights[16:] or (None, None)
    branch1 = weights[6], weights[7], plan.attention_weight, gain1
    branch2 = weights[10], weights[11], plan.ffn_weight, gain2
    if plan.placement == "post":
        kernels.norm_backward(arrays[0], at.other.numpy(), *norm2, nothing, arrays[1], found2)
        dw2 = torch.mm(work.behind, at.hidden.t())
        dw1 = _ffn_backward(work.behind, at.normed1, weights, _weighted(*branch2)[0], at, work, db1, kernels)
        torch.addmm(work.behind, weights[8].t(), work.hidden, out=work.inner)
        kernels.norm_backward(arrays[2], at.trunk.numpy(), *norm1, nothing, arrays[1], found1)
    else:
        both1, both2 = both2, g.sum(1)
        dw2 = torch.mm(g, at.hidden.t())
        dw1 = _ffn_backward(g, at.other, weights, _weighted(*branch2)[0], at, work, db1, kernels)
        torch.mm(weights[8].t(), work.hidden, out=work.inner)
        kernels.norm_backward(arrays[2], at.trunk.numpy(), *norm2, arrays[0], arrays[1], found2)
    dwo = torch.mm(work.behind, at.mixed.t())
    torch.mm(_weighted(*branch1)[0].t(), work.behind, out=work.inner)
    read = x if plan.placement == "post" else at.normed1
    of_inner, joined = _attend_backward(read, plan, weights, at, work, kernels)
    if plan.placement == "post":
        torch.addmm(work.behind, joined.t(), work.projected, out=g)
    else:
        torch.mm(joined.t(), work.projected, out=work.inner)
        kernels.norm_backward(arrays[2], x.numpy(), *norm1, arrays[1], arrays[0], found1)
    dwo, dbo, *dgain1 = _of_branch(dwo, both1, *branch1)
    dw2, db2, *dgain2 = _of_branch(dw2, both2, *branch2)
    return (*of_inner, dwo, dbo, dw1, db1, dw2, db2, dg1, dc1, dg2, dc2, *dgain1, *dgain2)


def _attend(read: Tensor, plan: Plan, weights: Weights, at: _Kept, kernels: Kernels) -> None:
    """From what attention reads to what its heads make of it."""
    torch.addmm(torch.cat([*weights[1:6:2]])[:, None], torch.cat([*weights[:6:2]]), read, out=at.projected)
    d, heads, p, projected = len(read), plan.heads, at.attention.numpy(), at.projected.numpy()
    q, k, v, mixed = projected[:d], projected[d : 2 * d], projected[2 * d :], at.mixed.numpy()
    scale, series, exponents = kernels.number(plan.scale), kernels.series, kernels.exponents

    def attend(first: int, last: int) -> None:
        kernels.meet(q, k, heads, scale, p, first, last)
        kernels.softmax(p, heads, series, exponents, first, last)
        kernels.gather(p, v, heads, False, mixed, first, last)

    compiling.over_sequences(attend, (), heads, p.size)


def _attend_backward(
    read: Tensor, plan: Plan, weights: Weights, at: _Kept, work: _Work, kernels: Kernels
) -> tuple[tuple[Tensor, ...], Tensor]:
    """From the gradient of the mixed values, `work.inner`, to that of what is projected, and of six weights."""
    d, heads, p, dp = len(read), plan.heads, at.attention.numpy(), work.scores.numpy()
    projected, found, g = at.projected.numpy(), work.projected.numpy(), work.inner.numpy()
    q, k, v = projected[:d], projected[d : 2 * d], projected[2 * d :]
    dq, dk, dv = found[:d], found[d : 2 * d], found[2 * d :]
    one, scale = kernels.number(1), kernels.number(plan.scale)

    def back(first: int, last: int) -> None:
        kernels.meet(g, v, heads, one, dp, first, last)
        kernels.softmax_backward(p, dp, heads, scale, first, last)
        kernels.gather(dp, k, heads, False, dq, first, last)
        kernels.gather(dp, q, heads, True, dk, first, last)
        kernels.gather(p, g, heads, True, dv, first, last)

    compiling.over_sequences(back, (), heads, p.size)
    of_weights = torch.mm(work.projected, read.t()).chunk(3)
    of_biases = work.projected.sum(1).chunk(3)
    pairs = zip(of_weights, of_biases, strict=True)
    return tuple(one for pair in pairs for one in pair), torch.cat([*weights[:6:2]])


def _ffn_backward(
    g: Tensor, read: Tensor, weights: Weights, w2: Tensor, at: _Kept, work: _Work, db1: Tensor, kernels: Kernels
) -> Tensor:
    """From the gradient of the FFN's branch to that of its hidden layer, `work.hidden`, and of the first weight."""
    torch.mm(w2.t(), g, out=work.hidden)
    kernels.relu_backward(work.hidden.numpy(), at.hidden.numpy(), db1.numpy())
    return torch.mm(work.hidden, read.t())


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _weighted(weight: Tensor, bias: Tensor, factor: float, gain: Tensor | None) -> Pair:
    """Weight and bias of factor·gain ⊙ (Wx + b)."""
    if gain is not None:
        by = gain * factor
        return weight * by[:, None], bias * by
    return (weight, bias) if factor == 1 else (weight * factor, bias * factor)


def _of_branch(
    product: Tensor, total: Tensor, weight: Tensor, bias: Tensor, factor: float, gain: Tensor | None
) -> tuple[Tensor, ...]:
    """The gradients of W, b and, if there is one, of the gain in factor·gain ⊙ (Wx + b).

    With g the gradient of the whole: `product` is gxᵀ and `total` the sum of g over the tokens.
    """
    if gain is None:
        return (product, total) if factor == 1 else (product * factor, total * factor)
    by = gain * factor
    return product * by[:, None], total * by, ((weight * product).sum(1) + bias * total) * factor
