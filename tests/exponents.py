"""Two exponents of a fresh block: how fast tokens grow alike or apart, how fast the gradient grows or shrinks.

Measured from Jacobian-vector and vector-Jacobian products; no Jacobian is formed. Both are natural logarithms of a
factor per block, so that 0 is "neither". Cowsik et al. 2024 (2403.02579) read trainability off such a pair. The
closed forms are in `theory.mean_field`. A statement about **random weights**.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from depthscope.measures import TokenMatrix

Block = Callable[[Tensor], Tensor]  # tokens (batch, n, d) → the same shape; what stands after it (a remedy) included


def token_exponents(
    blocks: Sequence[Block], tokens: Tensor, *, generator: torch.Generator | None = None
) -> list[float]:
    """λ_t of each block: by what factor e^λ differences between tokens grow against what they share, near the collapse.

    At tokens X̄ = 1x̄ᵀ that are all equal (each sequence's own mean with the energy of its tokens, and then what the
    blocks make of it), with a difference δ that has no mean: λ_t = ln(‖Π⊥Jδ‖/‖δ‖) − ln(‖f(X̄)‖/‖X̄‖), J the Jacobian
    of the block at X̄. Below 0 a collapse goes on (order), above 0 it heals: λ_t = −½ ln((1 − τ)²ρ) with ρ of
    `theory.odds`. δ is drawn once and goes on as Π⊥Jδ: drawn anew in each block it would lose about 1/d of its length
    to the directions that norms take out, and a model of width 32 would look ordered that is not. The mean is over the
    batch. nan where the mean vanishes, as after τ = 1: then nothing can collapse.
    """
    found = []
    x = TokenMatrix.of(tokens)
    mean = (x.mean * (x.norm / x.mean_norm)[..., None]).to(tokens.dtype)  # (batch, d)
    delta = _centred(_noise(tokens, generator))
    for block in blocks:
        equal = mean.unsqueeze(-2).expand_as(tokens).contiguous()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward derivative
            after, moved = jvp(block, (equal,), (delta,))  # type: ignore[misc]  # three only with has_aux
        moved = _centred(moved)
        grown = _norm(moved) / _norm(delta)
        rescaled = _norm(after) / _norm(equal)
        usable = (rescaled > 0) & (_norm(after) > 1e-6 * _norm(moved))
        logs = (grown.log() - rescaled.log())[usable]
        found.append(logs.mean().item() if usable.any() else torch.nan)
        mean = after.mean(dim=-2)
        delta = _unit(moved) * _norm(delta)[..., None, None].to(moved.dtype)
    return found


def gradient_exponents(
    blocks: Sequence[Block], tokens: Tensor, *, generator: torch.Generator | None = None
) -> list[float]:
    """λ_g of each block: by what factor e^λ the gradient's norm grows on its way back through it.

    A random gradient at the end goes back block by block, g ← Jᵀg at the tokens that the blocks make of X:
    λ_g = ln(‖Jᵀg‖/‖g‖), mean over the batch. Kept are the blocks' inputs; each block runs twice.
    """
    inputs = [tokens.detach()]
    with torch.no_grad():
        for block in blocks:
            inputs.append(block(inputs[-1]))
    gradient = _noise(inputs[-1], generator)
    found = []
    for block, entered in zip(reversed(blocks), reversed(inputs[:-1]), strict=True):
        with torch.enable_grad():
            x = entered.detach().requires_grad_()
            (back,) = torch.autograd.grad(block(x), x, gradient)
        found.append((_norm(back) / _norm(gradient)).log().mean().item())
        gradient = _unit(back)  # or hundreds of blocks would overflow
    return found[::-1]


def _noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return drawn.to(like.device)


def _centred(x: Tensor) -> Tensor:
    """Π⊥X: without the mean over the tokens."""
    return x - x.mean(dim=-2, keepdim=True)


def _unit(x: Tensor) -> Tensor:
    """X/‖X‖, per sequence."""
    return x / _norm(x)[..., None, None].to(x.dtype)


def _norm(x: Tensor) -> Tensor:
    """Frobenius, per sequence, in float64."""
    return x.double().flatten(-2).norm(dim=-1)
