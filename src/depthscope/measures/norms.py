"""Norms that stay right for any finite input, and what is kept of a token matrix in place of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Row norms inside these bounds are computed without harmful under- or overflow of the squares.
SAFE_NORMS = {torch.float32: (1e-14, 1e18), torch.float64: (1e-140, 1e150)}

EIGHT_BITS = 2.0**-6  # epsilons of 8-bit formats are larger (2⁻³ and 2⁻²), those of 16 bits smaller (2⁻⁷ and 2⁻¹⁰)


def with_arithmetic(values: Tensor) -> Tensor:
    """The same numbers in a format that PyTorch can add: of eight bits in float32, else as they are."""
    return values.float() if values.dtype.itemsize == 1 and values.is_floating_point() else values


def norm_of_rows(values: Tensor) -> Tensor:
    """Euclidean norm over the last axis, in float64, right for any finite input.

    The fast path squares in the input's own precision. The few rows whose norm comes out zero, tiny,
    huge or not finite are scaled by their largest entry and done again in float64.
    Shapes: (…, k) → (…).
    """
    return norms_and_safety(values)[0]


def norms_and_safety(values: Tensor) -> tuple[Tensor, bool]:
    """The norms of the rows, and whether all of them came the fast way: then none is zero, huge or not finite.

    Another device than the CPU is not asked: there every row goes both ways.
    """
    if values.dtype not in SAFE_NORMS:  # half precision
        values = values.float()
    norms = torch.linalg.vector_norm(values, dim=-1).double()
    low, high = SAFE_NORMS[values.dtype]
    here = values.device.type == "cpu"
    if here and (norms.numel() == 0 or bool(low < norms.amin() and norms.amax() < high)):  # false for nan
        return norms, True
    doubtful = ~((norms > low) & (norms < high))  # also true for nan
    rows = (values[doubtful] if here else values).double()  # (rows, k), or (…, k)
    largest = rows.abs().amax(dim=-1, keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    careful = scale.squeeze(-1) * torch.linalg.vector_norm(rows / scale, dim=-1)
    return norms.masked_scatter(doubtful, careful) if here else torch.where(doubtful, careful, norms), False


def mean_is_lost(mean_norm: Tensor, deviation_norm: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Where a mean is so small that the shift by the first token has cost it its digits, (…).

    The differences to a first token that is all of ‖X‖ are rounded by ε/2·‖X‖ each: √n ε/2·‖X‖ of ‖Π₁X‖.
    """
    return mean_norm < 64 * tokens**0.5 * torch.finfo(dtype).eps * deviation_norm


@dataclass(frozen=True)
class TokenNorms:
    """Norms instead of tokens: all that the similarities of a station and the growth of a step need.

    A probe keeps these, not the tokens, and turns the stations of a pass into measures at once.
    """

    tokens: int  # n, padding included
    count: Tensor  # real tokens, float64, (…)
    mean_norm: Tensor  # ‖Π₁X‖_F, float64, (…)
    deviation_norm: Tensor  # ‖Π⊥X‖_F, float64, (…); nan where an entry is not finite
    epsilon: float  # of the format in which the tokens are stored

    @cached_property
    def norm(self) -> Tensor:
        """‖X‖_F by Pythagoras, (…); nan where an entry is not finite, or where float64 cannot hold the norm."""
        norm = torch.hypot(self.mean_norm, self.deviation_norm)
        return norm + 0 * norm  # an infinite one, also hypot(inf, nan), becomes nan

    @cached_property
    def has_mean(self) -> Tensor:
        """False where the mean is zero or rounding noise: ‖Π₁X‖_F ≤ (ε + (2 + log₂ n) ε′) ‖X‖_F, (…).

        ε is the machine epsilon of the stored format, and ε′ of that in which sums are taken: float32 for half
        precision, else the same. This is the state after de-escalation with τ = 1, where a ratio to ‖Π₁X‖ would say
        something about the rounding, not about the tokens: rounding the differences leaves up to ε/2·‖X‖, rounding the
        mean x̄ up to ε/2·√n‖x̄‖, no more than that if the mean was no larger than the deviations, and the sum over n
        tokens, halves of halves, up to log₂(n)·ε′/2 of the tokens that were, √2‖X‖. In eight bits PyTorch subtracts
        nothing: there the differences alone are rounded when they are stored, by ε/4 or less on average over a binade.
        """
        stored = self.epsilon if self.epsilon < EIGHT_BITS else self.epsilon / 4
        sums = (2 + self.count.clamp(min=1).log2()) * min(self.epsilon, torch.finfo(torch.float32).eps)
        return self.mean_norm > (stored + sums) * self.norm


def times_power_of_two(values: Tensor, exponent: Tensor) -> Tensor:
    """2^k·x of float64 numbers, for whole k; in two steps, since 2^k may be no normal float64."""
    half = (exponent / 2).floor()
    return values * torch.exp2(half) * torch.exp2(exponent - half)


class Scratch:
    """Buffers of the tokens' size, used again from one token matrix to the next.

    Fresh ones are cheap in arithmetic and dear in page faults: on a small model they cost more than the
    measures. What stands in a buffer is lost when the next token matrix uses it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer of this name, as large as `like` and where it is; `dtype` is `like`'s own unless it is said."""
        held, dtype = self._buffers.get(name), dtype or like.dtype
        if held is None or (held.shape, held.dtype, held.device) != (like.shape, dtype, like.device):
            held = self._buffers[name] = torch.empty(like.shape, dtype=dtype, device=like.device)
        return held
