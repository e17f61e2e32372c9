"""The mean of a token's sequence: over all of it, or only over what came before the token. The one place for it.

`Full` is Yu & Zhang's (eq. 21). In a causal model it lets a position see later ones; `Prefix` and `Ema` do not.
Their matrices C are row-stochastic and lower triangular, so C1 = 1 and the similar part is scaled by 1 − τ as in
the paper, except at the first token (see `CausalMean`). Remedies subtract these means by hooks (`depthscope.remedies`),
the lab's Transformer-XL as a part of the model that goes on from segment to segment.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

MeanKind = Literal["causal", "full"]
CHUNK = 256  # tokens per triangular product: of the size of attention's own, and cheaper than more passes over X


class Running(NamedTuple):
    """What a causal mean remembers of the tokens before: per sequence, so that a cache can carry it."""

    total: Tensor  # (…, 1, d) Σ_j β^(i−j) x_j
    weight: Tensor  # (…, 1, 1) Σ_j β^(i−j)


@dataclass(frozen=True)
class Full:
    """The mean over all real tokens of the sequence."""

    kind: ClassVar[MeanKind] = "full"

    def mean(self, tokens: Tensor, counted: Tensor | None = None) -> Tensor:
        """tokens (…, n, d), counted (…, n) true for tokens in the mean → (…, 1, d); 0 if there are none."""
        if counted is None:
            total = tokens.sum(dim=-2, keepdim=True, dtype=accumulator(tokens))
            return total / max(tokens.shape[-2], 1)
        inside = counted.unsqueeze(-1)
        # where, not a product: padding may hold nan
        total = torch.where(inside, tokens, 0.0).sum(dim=-2, keepdim=True, dtype=accumulator(tokens))
        return total / inside.sum(dim=-2, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class CausalMean:
    """Base of the means that see no later token: m_i = Σ_{j≤i} β^(i−j) x_j / (Σ_{j≤i} β^(i−j) + κ).

    With `shrink=None` κ is 0 and a token that would be its own mean, the first, is left alone: τ = 1 would make
    it a zero row, whose gradient under LayerNorm is huge. With κ > 0 it is shrunk by τ/(1 + κ) like any other.
    i − j counts positions: a token that is left out in the middle still lets time pass.
    """

    shrink: float | None = field(default=None, kw_only=True)
    kind: ClassVar[MeanKind] = "causal"

    def __post_init__(self) -> None:
        if self.shrink is not None and not 0 < self.shrink < float("inf"):
            raise ValueError(f"expected shrink above 0, or None to leave the first token alone, got {self.shrink}")

    @property
    def beta(self) -> float:
        """How fast earlier tokens are forgotten."""
        return 1.0

    def mean(self, tokens: Tensor, counted: Tensor | None = None) -> Tensor:
        """tokens (…, n, d), counted (…, n) true for tokens in the mean → (…, n, d); 0 where none has come yet."""
        return self.running_mean(tokens, counted)[0]

    def running_mean(
        self, tokens: Tensor, counted: Tensor | None = None, before: Running | None = None
    ) -> tuple[Tensor, Running]:
        """The same after the tokens that `before` stands for, and what the next ones need."""
        x = tokens.to(accumulator(tokens))
        inside = torch.ones_like(x[..., :1], dtype=torch.bool) if counted is None else counted.unsqueeze(-1)
        known = x if counted is None else torch.where(inside, x, 0.0)  # not a product: padding may hold nan
        with no_autocast(tokens.device):
            total = decayed_sums(known, self.beta)
            weight = decayed_sums(inside.to(x.dtype), self.beta)  # (…, n, 1)
        if before is not None:
            fade = _fade(x.shape[-2], self.beta, x.device, x.dtype)
            total, weight = total + fade * before.total, weight + fade * before.weight
        return total / self.divisor(weight, inside), Running(total[..., -1:, :], weight[..., -1:, :])

    def divisor(self, weight: Tensor, inside: Tensor) -> Tensor:
        """What totals become means by, of weights (…, n, 1); infinite for a token that is left alone, or has none."""
        if self.shrink is not None:
            return weight + self.shrink
        return weight.masked_fill((weight == 0) | ((weight == 1) & inside), torch.inf)


@dataclass(frozen=True)
class Prefix(CausalMean):
    """The mean of the tokens up to and including the position: β = 1. The first token: see `CausalMean`."""


@dataclass(frozen=True)
class Ema(CausalMean):
    """The exponential moving average, bias-corrected: β = `decay`. The first token: see `CausalMean`."""

    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay < 1:
            raise ValueError(f"expected a decay between 0 and 1, got {self.decay}; a decay of 1 is Prefix()")

    @property
    def beta(self) -> float:
        """How fast earlier tokens are forgotten."""
        return self.decay


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Keeps sums in the dtype that was chosen for them: a product in bfloat16 is no float32 sum."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def accumulator(tokens: Tensor) -> torch.dtype:
    """float32 or better."""
    return torch.float64 if tokens.dtype == torch.float64 else torch.float32


def decayed_sums(x: Tensor, decay: float, chunk: int = CHUNK) -> Tensor:
    """s_i = Σ_{j≤i} β^(i−j) x_j along axis −2, for x (…, n, d).

    A triangular product within each chunk, and the same for the chunks' totals: O(n · chunk · d) multiplications,
    O(n d / chunk) more memory than the result, log n steps in a row.
    """
    n = x.shape[-2]
    if n <= chunk:
        return _decays(n, decay, x.device, x.dtype) @ x
    chunks = -(-n // chunk)
    x = pad(x, (0, 0, 0, chunks * chunk - n)).unflatten(-2, (chunks, chunk))
    inner = decayed_sums(x, decay, chunk)  # (…, chunks, chunk, d)
    totals = decayed_sums(inner[..., -1, :], decay**chunk, chunk)  # (…, chunks, d)
    carried = pad(totals[..., :-1, :], (0, 0, 1, 0)).unsqueeze(-2)
    return (inner + _fade(chunk, decay, x.device, x.dtype) * carried).flatten(-3, -2)[..., :n, :]


def _decays(n: int, decay: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """β^(i−j) for j ≤ i, else 0; (n, n)."""
    step = torch.arange(n, device=device, dtype=dtype)
    return (decay ** (step[:, None] - step).clamp(min=0)).tril()


def _fade(n: int, decay: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """β^i, what is left after i more tokens; (n, 1)."""
    return decay ** torch.arange(1, n + 1, device=device, dtype=dtype)[:, None]


TokenMean = Full | Prefix | Ema
NAMED: dict[str, TokenMean] = {"full": Full(), "prefix": Prefix(), "ema": Ema()}
