"""Which tokens a token's mean is taken over: the whole sequence, or only what came before.

`Full` is Yu & Zhang's (eq. 21). In a causal model it lets a position see later ones; `Prefix` and `Ema` do not.
Their matrices C are row-stochastic and lower triangular, so C1 = 1 and the similar part is scaled by 1 − τ as in
the paper, except at the first token, whose own mean would be itself (see `Prefix`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

Mixing = Literal["causal", "full"]
CHUNK = 64  # tokens per triangular product: below 2 % of a block's work from width 128 on


class Running(NamedTuple):
    """What a causal mean remembers of the tokens before: per sequence, so that a cache can carry it."""

    total: Tensor  # (…, 1, d) Σ_j β^(i−j) x_j
    weight: Tensor  # (…, 1, 1) Σ_j β^(i−j)
    counted: Tensor  # (…, 1, 1) tokens in the mean so far


@dataclass(frozen=True)
class Full:
    """The mean over all real tokens of the sequence."""

    kind: ClassVar[Mixing] = "full"

    def mean(self, tokens: Tensor, counted: Tensor | None, before: Running | None = None) -> tuple[Tensor, None]:
        """tokens (…, n, d), counted (…, n) true for tokens in the mean → (…, 1, d); 0 if there are none."""
        n = tokens.shape[-2]
        if counted is None:
            total = tokens.sum(dim=-2, keepdim=True, dtype=accumulator(tokens))
            return total / max(n, 1), None
        inside = counted.unsqueeze(-1)
        # where, not a product: padding may hold nan
        total = torch.where(inside, tokens, 0.0).sum(dim=-2, keepdim=True, dtype=accumulator(tokens))
        return total / inside.sum(dim=-2, keepdim=True).clamp(min=1), None


@dataclass(frozen=True)
class Prefix:
    """The mean of the tokens up to and including the position: m_i = Σ_{j≤i} x_j / (i + κ).

    With `shrink=None` κ is 0 and the first token is left alone: its mean is itself, and τ = 1 would make it a zero
    row, whose gradient under LayerNorm is huge. With κ > 0 it is shrunk by τ/(1 + κ) like any other token.
    """

    shrink: float | None = None
    kind: ClassVar[Mixing] = "causal"

    def __post_init__(self) -> None:
        _check_shrink(self.shrink)

    def mean(self, tokens: Tensor, counted: Tensor | None, before: Running | None = None) -> tuple[Tensor, Running]:
        """tokens (…, n, d), counted (…, n) → (…, n, d), and what the next tokens need."""
        return _running_mean(tokens, counted, 1.0, self.shrink, before)


@dataclass(frozen=True)
class Ema:
    """The exponential moving average m_i = Σ_{j≤i} β^(i−j) x_j / (Σ_{j≤i} β^(i−j) + κ), bias-corrected.

    β is `decay`; i − j counts positions, so a token left out in the middle still lets time pass.
    `shrink` is κ, as in `Prefix`.
    """

    decay: float = 0.95
    shrink: float | None = None
    kind: ClassVar[Mixing] = "causal"

    def __post_init__(self) -> None:
        _check_shrink(self.shrink)
        if not 0 < self.decay < 1:
            raise ValueError(f"expected a decay between 0 and 1, got {self.decay}; a decay of 1 is mixing='prefix'")

    def mean(self, tokens: Tensor, counted: Tensor | None, before: Running | None = None) -> tuple[Tensor, Running]:
        """tokens (…, n, d), counted (…, n) → (…, n, d), and what the next tokens need."""
        return _running_mean(tokens, counted, self.decay, self.shrink, before)


def accumulator(tokens: Tensor) -> torch.dtype:
    """float32 or better."""
    return torch.float64 if tokens.dtype == torch.float64 else torch.float32


def _check_shrink(shrink: float | None) -> None:
    if shrink is not None and not 0 < shrink < float("inf"):
        raise ValueError(f"expected shrink above 0, or None to leave the first token alone, got {shrink}")


def _running_mean(
    tokens: Tensor, counted: Tensor | None, decay: float, shrink: float | None, before: Running | None
) -> tuple[Tensor, Running]:
    working = tokens.to(accumulator(tokens))
    if counted is None:
        inside = torch.ones_like(tokens[..., :1], dtype=torch.bool)  # (…, n, 1)
    else:
        inside = counted.unsqueeze(-1)
        working = torch.where(inside, working, 0.0)
    ones = inside.to(working.dtype)
    with torch.autocast(tokens.device.type, enabled=False):  # a product in bfloat16 is no float32 sum
        total = decayed_sums(working, decay)  # (…, n, d)
        number = ones.cumsum(dim=-2)
        weight = number if decay == 1 else decayed_sums(ones, decay)  # (…, n, 1)
    if before is not None:
        fade = decay ** torch.arange(1, tokens.shape[-2] + 1, device=tokens.device, dtype=working.dtype)[:, None]
        total = total + fade * before.total
        weight = weight + fade * before.weight
        number = number + before.counted
    mean = total / (weight.clamp(min=torch.finfo(weight.dtype).tiny) if shrink is None else weight + shrink)
    if shrink is None:
        mean = torch.where(inside & (number == 1), 0.0, mean)
    return mean, Running(total[..., -1:, :], weight[..., -1:, :], number[..., -1:, :])


def decayed_sums(x: Tensor, decay: float, chunk: int = CHUNK) -> Tensor:
    """s_i = Σ_{j≤i} β^(i−j) x_j along axis −2, for x (…, n, d).

    A triangular product within each chunk, and the same for the chunks' totals: O(n · chunk · d) multiplications,
    O(n d / chunk) more memory than the result, log n steps in a row.
    """
    n = x.shape[-2]
    if n > chunk:
        chunks = -(-n // chunk)
        x = torch.nn.functional.pad(x, (0, 0, 0, chunks * chunk - n)).unflatten(-2, (chunks, chunk))
        inner = decayed_sums(x, decay, chunk)  # (…, chunks, chunk, d)
        totals = decayed_sums(inner[..., -1, :], decay**chunk, chunk)  # (…, chunks, d)
        carried = torch.nn.functional.pad(totals[..., :-1, :], (0, 0, 1, 0)).unsqueeze(-2)
        fade = decay ** torch.arange(1, chunk + 1, device=x.device, dtype=x.dtype)[:, None]
        return (inner + fade * carried).flatten(-3, -2)[..., :n, :]
    step = torch.arange(n, device=x.device, dtype=x.dtype)
    distance = step[:, None] - step  # (n, n)
    return torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0) @ x


TokenMean = Full | Prefix | Ema
NAMED: dict[str, TokenMean] = {"full": Full(), "prefix": Prefix(), "ema": Ema()}
