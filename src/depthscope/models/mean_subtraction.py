"""Y = X − τ·mean in few passes over memory, forward and back, where every token counts and τ is a number.

The operation is linear, so its backward pass is the transposed operation and needs no tensor of the forward pass. The
full mean is its own transpose: one pass adds up, one subtracts. A causal mean is a lower triangular matrix I − τC with
a rank of one below its diagonal blocks: n tokens are swept in short stretches, a small product for each, and one row
of totals goes on to the next. Elsewhere (on other devices, under `torch.compile`, `torch.func`, in half precision, for
subclasses of tensors) the operation is written out in PyTorch's own, which those see, differentiate and batch by
themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from depthscope.models.token_means import CausalMean, Full, TokenMean, decayed_sums, no_autocast

KEPT = 128  # plans: one for every strength, length of sequences and dtype in use
# A product with c × c matrices costs c/40 ns a number, and a stretch 15 µs: least at c = √(BALANCE / (batch · d)).
BALANCE = 6e5
SHORTEST, LONGEST = 12, 64  # tokens in a stretch


def without_mean(tokens: Tensor, tau: float, mean: TokenMean) -> Tensor:
    """tokens (…, n, d) → tokens − τ·mean (…, n, d), every token counted."""
    return _without_full(tokens, tau) if isinstance(mean, Full) else _without_causal(tokens, tau, mean, False)


def _without_full(tokens: Tensor, tau: float) -> Tensor:
    if not is_plain(tokens):
        return _written_out_full(tokens, tau)
    return _Full.apply(tokens, tau) if _is_differentiated() else _full(tokens, tau)


def _without_causal(tokens: Tensor, tau: float, mean: CausalMean, transposed: bool) -> Tensor:
    if tokens.device.type != "cpu" or not is_plain(tokens):
        return _written_out(tokens, tau, mean, transposed)
    if _is_differentiated():
        return _Causal.apply(tokens, tau, mean, transposed)
    return _causal(tokens, tau, mean, transposed)


def _is_differentiated() -> bool:
    """Whether autograd may want to know of an operation, in either direction."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def is_plain(tokens: Tensor) -> bool:
    """Whether nobody but autograd looks at what is done with the tokens, and sums may be in their own dtype."""
    return (
        type(tokens) is Tensor
        and tokens.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch._C._get_tracing_state()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._functorch.is_legacy_batchedtensor(tokens)  # autograd.grad(…, is_grads_batched=True)
    )


class _Full(torch.autograd.Function):
    """X − τ·mean(X), its own transpose."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, tau: float) -> Tensor:
        ctx.tau = tau
        return _full(tokens, tau)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _without_full(gradients[0], ctx.tau), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return _without_full(tangents[0], ctx.tau)


class _Causal(torch.autograd.Function):
    """(I − τC)X, or its transpose."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, tau: float, mean: CausalMean, transposed: bool) -> Tensor:
        ctx.how = tau, mean, transposed
        return _causal(tokens, tau, mean, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        tau, mean, transposed = ctx.how
        return _without_causal(gradients[0], tau, mean, not transposed), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return _without_causal(tangents[0], *ctx.how)


def _full(tokens: Tensor, tau: float) -> Tensor:
    return torch.sub(tokens, tokens.mean(dim=-2, keepdim=True), alpha=tau)


def _causal(tokens: Tensor, tau: float, mean: CausalMean, transposed: bool) -> Tensor:
    if not tokens.numel():
        return tokens.clone()
    x = tokens.reshape(-1, *tokens.shape[-2:])
    found = _plan(mean, tau, x.shape[-2], _length(x), x.dtype)
    y = torch.empty(tokens.shape, dtype=x.dtype, device=x.device)  # no view: a model may add to it in place
    if torch.is_autocast_enabled("cpu"):
        with no_autocast(x.device):
            _sweep(x, y.view(x.shape), found, transposed)
    else:
        _sweep(x, y.view(x.shape), found, transposed)
    return y


class _Stretch(NamedTuple):
    """What a stretch of c tokens needs of I − τC, whose rows i and columns j before it are −τβ^(i−j)/(w_i + κ)."""

    forward: Tensor  # (c + 1, c) the block on the diagonal; below it what a token adds to the totals, β^(last−j)
    backward: Tensor  # (c + 1, c) the same of the transpose
    takes: Tensor  # (c, 1) what a token takes of the totals before it, −τβ^(i−first+1)/(w_i + κ)
    adds: Tensor  # (c, 1) the same of the transpose, β^(last−j)
    fade: float  # β^c


_plans: OrderedDict[tuple[Any, ...], list[_Stretch]] = OrderedDict()


def _length(x: Tensor) -> int:
    """How many tokens (batch, n, d) are swept at once: stretches of about the same length, as long as it pays."""
    best = min(max((BALANCE / (x.shape[0] * x.shape[2])) ** 0.5, SHORTEST), LONGEST)
    return -(-x.shape[1] // max(round(x.shape[1] / best), 1))


def _plan(mean: CausalMean, tau: float, n: int, length: int, dtype: torch.dtype) -> list[_Stretch]:
    """The stretches of n tokens; the newest plans are kept, since all blocks and passes of a model share them."""
    key = mean, tau, n, length, dtype
    found = _plans.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # kept for passes that have a gradient, too
            found = _make_plan(mean, tau, n, length, dtype)
        if any(type(matrix) is not Tensor for matrix in found[0][:4]):  # of whoever looks on
            return found
        _plans[key] = found
        while len(_plans) > KEPT:
            _plans.popitem(last=False)
    return found


def _make_plan(mean: CausalMean, tau: float, n: int, length: int, dtype: torch.dtype) -> list[_Stretch]:
    plan, before = [], torch.zeros((), dtype=torch.float64, device="cpu")
    for first in range(0, n, length):
        part = mean.stretch(min(length, n - first), before)
        block = torch.eye(len(part.within), dtype=torch.float64, device="cpu") - tau * part.within / part.divisor
        takes = -tau * part.carried / part.divisor
        adds = part.within[-1:].mT
        rows = torch.cat([block, adds.mT]), torch.cat([block.mT, takes.mT])
        forward, backward, takes, adds = (matrix.to(dtype).contiguous() for matrix in (*rows, takes, adds))
        plan.append(_Stretch(forward, backward, takes, adds, part.carried[-1].item()))
        before = part.weight[-1, 0]
    return plan


def _sweep(x: Tensor, y: Tensor, plan: list[_Stretch], transposed: bool) -> None:
    """y = (I − τC)x or its transpose, tokens (batch, n, d): the transpose goes from the last stretch to the first."""
    length, totals = len(plan[0].takes), None
    parts = list(zip(x.split(length, 1), y.split(length, 1), plan, strict=True))
    for given, result, stretch in reversed(parts) if transposed else parts:
        matrix, taken = (stretch.backward, stretch.adds) if transposed else (stretch.forward, stretch.takes)
        found = torch.bmm(matrix.expand(len(x), -1, -1), given)  # (batch, c + 1, d)
        own, added = found.narrow(1, 0, len(taken)), found.narrow(1, len(taken), 1)
        if totals is None:
            result.copy_(own)
            totals = added
        else:
            torch.addcmul(own, taken, totals, out=result)
            totals = torch.add(added, totals, alpha=stretch.fade)


def _written_out_full(tokens: Tensor, tau: float) -> Tensor:
    return tokens - (tau * Full().mean(tokens)).to(tokens.dtype)


def _written_out(tokens: Tensor, tau: float, mean: CausalMean, transposed: bool) -> Tensor:
    """The same in PyTorch's own operations: Lᵀ is L from behind, where C = L over the divisors."""
    if not transposed:
        return tokens - (tau * mean.mean(tokens)).to(tokens.dtype)
    divisor = mean.stretch(tokens.shape[-2], torch.zeros((), device=tokens.device, dtype=tokens.dtype)).divisor
    with no_autocast(tokens.device):
        return tokens - tau * decayed_sums((tokens / divisor).flip(-2), mean.beta).flip(-2)
