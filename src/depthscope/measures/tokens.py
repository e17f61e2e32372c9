"""A token matrix, and the quantities that every measure of it is made of.

All of our numbers go to a limit: tokens become equal, differences go to 0. So the centring
happens here, once, in a form that stays right in the limit:

1. subtract the first real token (identical tokens give exactly 0, and by Sterbenz' lemma the
   difference of nearly equal floating-point numbers is exact);
2. subtract the mean of what is left;
3. take norms, never `1 - something`.

A float32 input keeps five digits of its diversity at any degree of collapse, without a float64
copy of the tokens (`benchmarks/measures.py` shows what that saves).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

# A token whose norm exceeds this many times the median is an outlier: an attention sink or massive
# activation. Sinks seen in pretrained language models reach about 190 times, ordinary tokens 2 to 3.
OUTLIER_FACTOR = 10.0

T = TypeVar("T")

# Row norms inside these bounds are computed without harmful under- or overflow of the squares.
_SAFE_NORMS = {torch.float32: (1e-14, 1e18), torch.float64: (1e-140, 1e150)}


def norm_of_rows(values: Tensor) -> Tensor:
    """Euclidean norm over the last axis, in float64, right for any finite input.

    The fast path squares in the input's own precision. The few rows whose norm comes out zero, tiny,
    huge or not finite are scaled by their largest entry and done again in float64.
    Shapes: (…, k) → (…).
    """
    norms = torch.linalg.vector_norm(values, dim=-1).double()
    low, high = _SAFE_NORMS[values.dtype]
    doubtful = ~((norms > low) & (norms < high))  # also true for nan
    if doubtful.any():
        rows = values[doubtful].double()  # (rows, k)
        largest = rows.abs().amax(dim=-1, keepdim=True)
        scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        careful = scale.squeeze(-1) * torch.linalg.vector_norm(rows / scale, dim=-1)
        norms = norms.masked_scatter(doubtful, careful)
    return norms


class TokenNorms(NamedTuple):
    """What a step needs to know of a station: norms instead of tokens, so that tokens need not be kept."""

    tokens: int  # n, padding included
    mean_norm: Tensor
    deviation_norm: Tensor
    norm: Tensor
    has_mean: Tensor


class TokenMatrix:
    """Tokens X (…, n, d) with the mask of the real ones; what the measures share is computed once.

    Every measure takes a plain tensor or a `TokenMatrix`. Pass the latter when several measures look
    at the same tokens: centring, norms and spectrum are then shared between them.

    Leading axes are batch axes. `mask` (…, n) is true for real tokens and broadcasts over leading
    axes; what padding holds, NaN included, never matters. Half precision is widened to float32,
    which is exact. Results are float64. Tensors on Apple's GPU, which has no float64, are moved to
    the CPU.
    """

    def __init__(self, values: Tensor, mask: Tensor | None = None):
        if not isinstance(values, Tensor) or not values.is_floating_point():
            kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"expected a floating-point tensor of tokens (…, n, d), got {kind}; convert it first")
        if values.ndim < 2 or 0 in values.shape[-2:]:
            raise ValueError(
                f"expected tokens (…, n, d) with at least one token and one feature, got shape {tuple(values.shape)}"
            )
        if values.device.type == "mps":
            values = values.cpu()
        self.stored_dtype = values.dtype
        if values.dtype not in _SAFE_NORMS:
            values = values.float()
        if mask is not None:
            mask = _real_tokens(mask, values)
        self._shared: dict[Callable[[TokenMatrix], Any], Any] = {}
        self.mask = mask  # (…, n) or None
        self.values = values if mask is None else torch.where(mask.unsqueeze(-1), values, 0.0)  # (…, n, d)

    @classmethod
    def of(cls, tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> TokenMatrix:
        """The argument itself if it is a `TokenMatrix` already; it then carries its own mask."""
        if not isinstance(tokens, TokenMatrix):
            return cls(tokens, mask)
        if mask is not None:
            raise ValueError("this TokenMatrix already carries a mask; pass mask= only with a plain tensor")
        return tokens

    def once(self, compute: Callable[[TokenMatrix], T]) -> T:
        """compute(self), computed once: for what several measures share."""
        if compute not in self._shared:
            self._shared[compute] = compute(self)
        return self._shared[compute]

    @cached_property
    def real(self) -> Tensor:
        """True for real tokens, (…, n)."""
        if self.mask is not None:
            return self.mask
        return torch.ones(self.values.shape[:-1], dtype=torch.bool, device=self.values.device)

    @cached_property
    def count(self) -> Tensor:
        """Number of real tokens, float64, (…)."""
        if self.mask is not None:
            return self.mask.sum(dim=-1).double()
        batch, n = self.values.shape[:-2], self.values.shape[-2]
        return torch.full(batch, float(n), dtype=torch.float64, device=self.values.device)

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        """The mean (…, 1, d) in float64, nan without real tokens, and the deviations (…, n, d)."""
        if self.mask is None:
            first = self.values[..., :1, :]  # (…, 1, d)
            shifted = self.values - first
        else:
            index = self.mask.int().argmax(dim=-1)[..., None, None]  # (…, 1, 1)
            first = self.values.gather(-2, index.expand(*index.shape[:-1], self.values.shape[-1]))
            shifted = torch.where(self.mask.unsqueeze(-1), self.values - first, 0.0)
        # An error e of this mean enters ‖Π⊥X‖² only as n·e²: the tokens' own precision is enough.
        offset = shifted.sum(dim=-2, keepdim=True) / self.count[..., None, None].to(shifted.dtype)
        deviations = shifted.sub_(offset)  # in place: `shifted` is ours, and a pass over memory is what it costs
        if self.mask is not None:
            deviations = torch.where(self.mask.unsqueeze(-1), deviations, 0.0)
        return first.double() + offset.double(), deviations

    @property
    def mean(self) -> Tensor:
        """x̄, the mean of the real tokens, float64, (…, d); nan where there is none."""
        return self._split[0].squeeze(-2)

    @property
    def deviations(self) -> Tensor:
        """Π⊥X: the tokens minus their mean, (…, n, d); 0 at padding."""
        return self._split[1]

    @cached_property
    def mean_norm(self) -> Tensor:
        """‖Π₁X‖_F = √n ‖x̄‖, float64, (…)."""
        return self.count.sqrt() * norm_of_rows(self.mean)

    @cached_property
    def deviation_norm(self) -> Tensor:
        """‖Π⊥X‖_F, float64, (…); nan without real tokens."""
        norm = norm_of_rows(norm_of_rows(self.deviations))
        return torch.where(self.count > 0, norm, torch.nan)

    @cached_property
    def norm(self) -> Tensor:
        """‖X‖_F by Pythagoras from its two parts, float64, (…); nan where an entry is not finite."""
        return torch.where(self.deviation_norm.isnan(), torch.nan, torch.hypot(self.mean_norm, self.deviation_norm))

    @property
    def norms(self) -> TokenNorms:
        """The norms alone; `growth` and `escalation_rate` take them in place of the tokens."""
        return TokenNorms(self.values.shape[-2], self.mean_norm, self.deviation_norm, self.norm, self.has_mean)

    @cached_property
    def token_norms(self) -> Tensor:
        """‖x_i‖ for each token, float64, (…, n); 0 at padding."""
        return norm_of_rows(self.values)

    @cached_property
    def norm_ratios(self) -> Tensor:
        """‖x_i‖ over the median norm of the real tokens, float64, (…, n); nan at padding."""
        norms = torch.where(self.real, self.token_norms, torch.nan)
        return norms / norms.nanmedian(dim=-1, keepdim=True).values

    @cached_property
    def outliers(self) -> Tensor:
        """Real tokens with more than `OUTLIER_FACTOR` times the median norm, (…, n)."""
        return self.norm_ratios.isfinite() & (self.norm_ratios > OUTLIER_FACTOR)

    @cached_property
    def has_mean(self) -> Tensor:
        """False where the mean is zero or rounding noise: ‖Π₁X‖_F ≤ ε‖X‖_F, (…).

        ε is the machine epsilon of the stored format. This is the state after de-escalation with
        τ = 1: subtracting a rounded mean x̄ leaves up to ε‖x̄‖/2 per token, so a ratio to ‖Π₁X‖ would
        say something about the rounding, not about the tokens.
        """
        return self.mean_norm > torch.finfo(self.stored_dtype).eps * self.norm

    @cached_property
    def directions(self) -> TokenMatrix:
        """The tokens scaled to length 1. Zero tokens have no direction: they count as padding."""
        norms = self.token_norms
        low, high = _SAFE_NORMS[self.values.dtype]
        real = self.real & (norms != 0)  # nan stays, and makes the result nan
        extreme = real & norms.isfinite() & ((norms < low) | (norms > high))
        values = self.values.double() if extreme.any() else self.values
        unit = values / torch.where(real, norms, 1.0).unsqueeze(-1).to(values.dtype)
        unit_tokens = TokenMatrix(unit, None if self.mask is None and real.all() else real)
        unit_tokens.stored_dtype = self.stored_dtype
        return unit_tokens


def _real_tokens(mask: Tensor, values: Tensor) -> Tensor:
    """The mask as booleans in the tokens' shape, (…, n)."""
    shape = values.shape[:-1]
    try:
        return (mask.to(values.device) != 0).expand(shape)
    except RuntimeError:
        raise ValueError(
            f"expected a mask of shape (…, n) that fits the tokens' {tuple(shape)}, got {tuple(mask.shape)}"
        ) from None
