"""A token matrix, and the quantities that every measure of it is made of.

All of our numbers go to a limit: tokens become equal, differences go to 0. So the centring
happens here, once, in a form that stays right in the limit:

1. subtract the first real token (identical tokens give exactly 0, and by Sterbenz' lemma the
   difference of nearly equal floating-point numbers is exact);
2. subtract the mean of what is left;
3. take norms, never `1 - something`.

A float32 input keeps five digits of its diversity at any degree of collapse, without a float64
copy of the tokens (`benchmarks/measures.py` shows what that saves).

The size of the tokens does not matter to that either. Differences below the smallest normal number are
rounded to few bits, and sums can overflow: sequences so small or so large are done again in float64, scaled
by a power of two (`TokenMatrix.rescaled`). What remains is that the norms themselves are float64. Float32
and half precision are far inside its range. Float64 tokens keep their digits as long as ‖Π₁X‖ and ‖Π⊥X‖ are
normal float64 numbers, 2.2e-308 to 1.8e308. Below, a norm is rounded to a multiple of 5e-324, and what is
made of norms (t_sim, t_div, growth) has that error; above, it is nan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from depthscope.measures.norms import (
    SAFE_NORMS,
    TokenNorms,
    mean_is_lost,
    norm_of_rows,
    norms_and_safety,
    times_power_of_two,
)
from depthscope.transfers import may_be_any

# A token whose norm exceeds this many times the median is an outlier: an attention sink or massive
# activation. Sinks seen in pretrained language models reach about 190 times, ordinary tokens 2 to 3.
OUTLIER_FACTOR = 10.0

T = TypeVar("T")


class TokenMatrix:
    """Tokens X (…, n, d) with the mask of the real ones; what the measures share is computed once.

    Every measure takes a plain tensor or a `TokenMatrix`. Pass the latter when several measures look
    at the same tokens: centring, norms and spectrum are then shared between them.

    Leading axes are batch axes. `mask` (…, n) is true for real tokens and broadcasts over leading
    axes; what padding holds, NaN included, never matters. Half precision is widened to float32,
    which is exact. Results are float64. Tensors on Apple's GPU, which has no float64, are moved to the CPU.
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
        if values.dtype not in SAFE_NORMS:
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

    def _split(self) -> tuple[Tensor, Tensor]:
        """The mean (…, d) in float64, nan without real tokens, and the deviations (…, n, d)."""
        if self.mask is None:
            first = self.values[..., :1, :]  # (…, 1, d)
        else:
            index = self.mask.int().argmax(dim=-1)[..., None, None]  # (…, 1, 1)
            first = self.values.gather(-2, index.expand(*index.shape[:-1], self.values.shape[-1]))
        shifted = self.values - first
        if self.mask is not None:
            shifted.masked_fill_(~self.mask.unsqueeze(-1), 0.0)
        # An error e of this mean enters ‖Π⊥X‖² only as n·e²: the tokens' own precision is enough.
        n = self.values.shape[-2] if self.mask is None else self.count[..., None, None].to(shifted.dtype)
        offset = shifted.sum(dim=-2, keepdim=True) / n
        deviations = shifted.sub_(offset)  # in place: `shifted` is ours, and a pass over memory is what it costs
        if self.mask is not None:
            deviations.masked_fill_(~self.mask.unsqueeze(-1), 0.0)
        return (first.double() + offset.double()).squeeze(-2), deviations

    @cached_property
    def _mean_and_spread(self) -> tuple[Tensor, Tensor]:
        """The mean (…, d) and ‖Π⊥X‖_F (…); the deviations themselves are not kept."""
        mean, deviations = self._split()
        rows, safe = norms_and_safety(deviations)
        norm = self._small_norm(rows)
        if not safe:
            low, high = SAFE_NORMS[self.values.dtype]
            doubtful = (norm != 0) & ~((norm > low) & (norm < high))  # overflow, or a mean without its last bits
            if may_be_any(doubtful):
                careful_mean, deviations = self.rescaled._split()  # right for any finite input
                careful, k = norm_of_rows(norm_of_rows(deviations)), self._exponent
                mean = torch.where(doubtful.unsqueeze(-1), times_power_of_two(careful_mean, k.unsqueeze(-1)), mean)
                norm = torch.where(doubtful, times_power_of_two(careful, k), norm)
        lost = mean_is_lost(self._root * self._small_norm(mean), norm, self.values.shape[-2], self.values.dtype)
        if may_be_any(lost):
            plain = self.rescaled.values.sum(dim=-2) / self.count.unsqueeze(-1)
            mean = torch.where(lost.unsqueeze(-1), times_power_of_two(plain, self._exponent.unsqueeze(-1)), mean)
        return mean, norm if self.mask is None else torch.where(self.count > 0, norm, torch.nan)

    @property
    def _root(self) -> Tensor | float:
        """√n."""
        return self.count.sqrt() if self.mask is not None else self.values.shape[-2] ** 0.5

    @cached_property
    def _exponent(self) -> Tensor:
        """k with 2^(k−1) ≤ max |x_ij| < 2^k, as float64, (…); 0 for a zero matrix and where an entry is not finite."""
        largest = self.values.detach().abs().amax(dim=(-2, -1)).double()
        return torch.where(largest.isfinite(), torch.frexp(largest).exponent, 0).double()

    @cached_property
    def rescaled(self) -> TokenMatrix:
        """2^(−k)·X in float64, with k for each sequence so that its largest entry is between 1/2 and 1.

        For measures that are free of scale: nothing underflows that matters, and nothing overflows.
        """
        tokens = TokenMatrix(times_power_of_two(self.values.double(), -self._exponent[..., None, None]), self.mask)
        tokens.stored_dtype = self.stored_dtype
        return tokens

    @property
    def mean(self) -> Tensor:
        """x̄, the mean of the real tokens, float64, (…, d); nan where there is none."""
        return self._mean_and_spread[0]

    @cached_property
    def deviations(self) -> Tensor:
        """Π⊥X: the tokens minus their mean, in their own precision and range, (…, n, d); 0 at padding.

        Those of `rescaled` are right at any size.
        """
        return self._split()[1]

    @cached_property
    def norms(self) -> TokenNorms:
        """The norms alone, which most measures take in place of the tokens."""
        mean, deviation_norm = self._mean_and_spread
        mean_norm = self._root * self._small_norm(mean)
        epsilon = torch.finfo(self.stored_dtype).eps
        return TokenNorms(self.values.shape[-2], self.count, mean_norm, deviation_norm, epsilon)

    @property
    def mean_norm(self) -> Tensor:
        """‖Π₁X‖_F = √n ‖x̄‖, float64, (…)."""
        return self.norms.mean_norm

    @property
    def deviation_norm(self) -> Tensor:
        """‖Π⊥X‖_F, float64, (…); nan without real tokens."""
        return self.norms.deviation_norm

    @property
    def norm(self) -> Tensor:
        """‖X‖_F, float64, (…); nan where an entry is not finite, or where float64 cannot hold the norm."""
        return self.norms.norm

    @property
    def has_mean(self) -> Tensor:
        """False where the mean is zero or rounding noise: see `TokenNorms.has_mean`."""
        return self.norms.has_mean

    def _small_norm(self, values: Tensor) -> Tensor:
        """Norm over the last axis of float64 numbers that were made from the tokens.

        What float32 can hold, float64 can square; float64 tokens need the careful way.
        """
        careful = self.values.dtype == torch.float64
        return norm_of_rows(values) if careful else torch.linalg.vector_norm(values, dim=-1)

    @cached_property
    def _token_norms(self) -> tuple[Tensor, bool]:
        return norms_and_safety(self.values)

    @property
    def token_norms(self) -> Tensor:
        """‖x_i‖ for each token, float64, (…, n); 0 at padding."""
        return self._token_norms[0]

    @cached_property
    def norm_ratios(self) -> Tensor:
        """‖x_i‖ over the median norm of the real tokens, float64, (…, n); nan at padding."""
        return ratios_to_median(self.token_norms, self.mask)

    @cached_property
    def largest_norm(self) -> Tensor:
        """The norm of the largest token, float64, (…)."""
        return self.token_norms.amax(dim=-1)

    @cached_property
    def has_outliers(self) -> bool:
        """Whether any sequence has one; cheaper than finding them. Another device than the CPU is not asked: true."""
        if self.mask is not None or self.values.device.type != "cpu":
            return may_be_any(self.outliers)
        return bool((self.largest_norm > OUTLIER_FACTOR * self.token_norms.nanmedian(dim=-1).values).any())

    @cached_property
    def outliers(self) -> Tensor:
        """Real tokens with more than `OUTLIER_FACTOR` times the median norm, (…, n)."""
        return are_outliers(self.norm_ratios)

    @property
    def ordinary(self) -> TokenMatrix:
        """The tokens that are no outliers; the very same matrix where there are none."""
        return self._without_outliers if self.has_outliers else self  # one that kept itself would never be freed

    @cached_property
    def _without_outliers(self) -> TokenMatrix:
        return TokenMatrix(self.values, self.real & ~self.outliers)

    @cached_property
    def directions(self) -> TokenMatrix:
        """The tokens scaled to length 1. Zero tokens have no direction: they count as padding."""
        norms, safe = self._token_norms
        if self.mask is None and safe:
            unit_tokens = TokenMatrix(self.values / norms.unsqueeze(-1).to(self.values.dtype))
        else:
            low, high = SAFE_NORMS[self.values.dtype]
            real = self.real & (norms != 0)  # nan stays, and makes the result nan
            values, here = self.values, self.values.device.type == "cpu"
            extreme = real & ((norms < low) | (norms > high)) & values.isfinite().all(dim=-1)
            if may_be_any(extreme):
                wide = values.double() if here else values  # there every token comes here, and a few need it
                values = wide / torch.where(extreme, wide.abs().amax(dim=-1), 1.0).unsqueeze(-1)
                norms = norm_of_rows(values)
            unit = values / torch.where(real, norms, 1.0).unsqueeze(-1).to(values.dtype)
            unit_tokens = TokenMatrix(unit, None if self.mask is None and here and real.all() else real)
        unit_tokens.stored_dtype = self.stored_dtype
        return unit_tokens


def ratios_to_median(token_norms: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖x_i‖ over the median norm of the real tokens, float64, (…, n); nan at padding."""
    norms = token_norms if mask is None else torch.where(mask, token_norms, torch.nan)
    return norms / norms.nanmedian(dim=-1, keepdim=True).values


def are_outliers(norm_ratios: Tensor) -> Tensor:
    """Which of the tokens with these ratios to the median norm are outliers, (…, n)."""
    return norm_ratios.isfinite() & (norm_ratios > OUTLIER_FACTOR)


def _real_tokens(mask: Tensor, values: Tensor) -> Tensor:
    """The mask as booleans in the tokens' shape, (…, n)."""
    shape = values.shape[:-1]
    fits = mask.ndim in (1, len(shape)) and all(m in (1, n) for m, n in zip(mask.shape[:-1], shape, strict=False))
    if not fits or mask.shape[-1] != shape[-1]:
        raise ValueError(
            f"expected a mask of shape (…, n) that fits the tokens' {tuple(shape)}, got {tuple(mask.shape)}"
        )
    return (mask.to(values.device) != 0).expand(shape)


def norms_of(tokens: Tokens, mask: Tensor | None = None) -> TokenNorms:
    """The norms of a tensor or `TokenMatrix`, or the argument itself if it is norms already."""
    return tokens if isinstance(tokens, TokenNorms) else TokenMatrix.of(tokens, mask).norms


Tokens = Tensor | TokenMatrix | TokenNorms
