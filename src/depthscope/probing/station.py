"""Stage one: what is done with the tokens at a station while the model runs.

A dozen operations on the tokens, no branch on a value, and nothing is fetched: a GPU goes on while the model does. Kept
are a few numbers per token and a few vectors per sequence; `finish.py` makes everything of them once the pass is over.

Right in the limit: tokens are shifted by the first real one before their mean is subtracted, and unit tokens likewise,
so that equal tokens give exactly 0. Padding is replaced by that same token: it adds nothing. What is kept shows whether
there are outliers, and whether float32 may not be enough or a token has no direction (`doubt`). A second pass then
looks again: with `outliers`, which takes half a dozen operations more, or `wide`, also in float64 and with the largest
number of each sequence near 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from depthscope.measures import OUTLIER_FACTOR, Scratch
from depthscope.measures.norms import SAFE_NORMS, times_power_of_two
from depthscope.measures.tokens import are_outliers, ratios_to_median


@dataclass(eq=False)
class Look:
    """What is kept of a token matrix (batch, n, d) after it has passed, where the tokens were."""

    shape: torch.Size
    epsilon: float  # of the format in which the tokens are stored
    wide: bool
    measured: Tensor | None  # (batch, n), which tokens are measured; None: all
    directed: Tensor | None  # (batch, n), measured tokens that have a direction; None: all, unless the look is in doubt
    finds_outliers: bool
    token_norms: Tensor  # (batch, n); where a token is not measured, that of the first one
    found: Tensor | None  # (batch, n), the ratios by which outliers were found that are not measured
    first: Tensor  # (batch, 1, d), the token by which all were shifted
    offset: Tensor  # (batch, 1, d), from there to the mean
    distances: Tensor  # (batch, n), of the tokens from their mean
    unit_first: Tensor  # (batch, 1, d), the token whose unit token all unit tokens were shifted by
    unit_offset: Tensor  # (batch, 1, d), from there to the mean of the unit tokens that are no outliers
    unit_sum: Tensor | None  # (batch, 1, d), of all unit tokens, shifted; None: without outliers
    unit_distances: Tensor  # (batch, n), of the unit tokens from that mean
    turns: Tensor | None  # (batch, n), ‖u − v‖ to the unit tokens that entered the block
    directed_before: Tensor | None  # (batch, n), which of those had a direction
    exponent: Tensor | None  # (batch,), by which power of two everything but unit tokens was divided
    unit: Tensor | None  # (batch, n, d), the unit tokens if they are kept: in a buffer that later looks use again
    compared: int | None  # the `id` of the look at the unit tokens that entered the block

    @property
    def kind(self) -> tuple[object, ...]:
        """Looks of one kind are finished together."""
        masked = self.measured is not None, self.directed is not None
        dtype, device = self.token_norms.dtype, self.token_norms.device
        return self.shape, dtype, device, self.epsilon, self.wide, self.finds_outliers, masked

    @property
    def ratios(self) -> Tensor:
        """(batch, n), norms over the median, also of outliers that are not measured; nan elsewhere."""
        return ratios_to_median(self.token_norms, self.measured) if self.found is None else self.found

    @property
    def outliers(self) -> Tensor | None:
        """(batch, n), those that are not measured because they are outliers."""
        return None if self.found is None else are_outliers(self.found)

    def forget(self) -> None:
        """What is finished is needed no more."""
        nothing = self.token_norms[:0]
        self.first = self.offset = self.distances = self.unit_first = self.unit_offset = self.unit_distances = nothing
        self.unit_sum = self.turns = self.directed_before = self.exponent = None


def look(
    tokens: Tensor,
    real: Tensor | None,
    scratch: Scratch,
    *,
    keep: str = "",
    before: Look | None = None,
    outliers: bool = False,
    without_outliers: bool = False,
    wide: bool = False,
) -> Look:
    """Looks at tokens (batch, n, d); `real` (batch, n) is true for real tokens.

    `outliers` says that there may be some.
    `keep` names the buffer of the unit tokens, which stay there until that name is used again, "" where they are not
    needed; `before` is what they are compared with. `without_outliers` leaves outliers out of everything. Tensors on
    Apple's GPU, which has no float64, are moved to the CPU.
    """
    x, exponent = _as_numbers(tokens, wide)
    batch, n, _ = x.shape
    norms, found, directed = torch.linalg.vector_norm(x, dim=-1), None, None
    if real is not None:
        real = (real.to(x.device) != 0).expand(batch, n)
    if without_outliers:
        found = ratios_to_median(norms, real)
        real = ~are_outliers(found) if real is None else real & ~are_outliers(found)
    if wide:
        directed = norms != 0 if real is None else real & (norms != 0)  # true for nan, which makes the result nan
    if real is not None:
        x, norms = _filled(x, norms, real, scratch)
    unit_first = first = x[:, :1].clone()
    work = scratch.take("work", x)
    count: Tensor | int = n if real is None else real.sum(dim=-1).clamp(min=1)[:, None, None]
    offset, distances = _centred(x, first, count, work)
    divisors = norms.unsqueeze(-1)
    if directed is not None:
        x, divisors = _filled(x, norms, directed, scratch, "directed")
        unit_first, divisors = x[:, :1].clone(), divisors.clamp(min=torch.finfo(x.dtype).tiny).unsqueeze(-1)
    unit = torch.div(x, divisors, out=scratch.take(keep or "unit", x))
    unit_sum, finds = None, outliers or without_outliers or wide
    if finds:
        # Distances are from the mean of the others: that of all would be the mean of the outliers' directions too.
        torch.sub(unit, unit[:, :1], out=work)
        weights = torch.ones(batch, 2, n, dtype=x.dtype, device=x.device)
        ordinary = torch.le(ratios_to_median(norms, real), OUTLIER_FACTOR, out=weights[:, 0])
        sums = torch.bmm(weights, work)
        unit_offset = sums[:, :1] / ordinary.sum(dim=-1).clamp(min=1)[:, None, None]
        unit_distances, unit_sum = torch.linalg.vector_norm(work.sub_(unit_offset), dim=-1), sums[:, 1:]
    else:
        unit_offset, unit_distances = _centred(unit, unit[:, :1], count, work)
    turns = None
    if before is not None and before.unit is not None and (before.shape, before.unit.device) == (x.shape, x.device):
        turns = torch.linalg.vector_norm(torch.sub(unit, before.unit, out=work), dim=-1)
    return Look(
        x.shape,
        torch.finfo(tokens.dtype).eps,
        wide,
        real,
        directed if directed is not None else real,
        finds,
        norms,
        found,
        first,
        offset,
        distances,
        unit_first,
        unit_offset,
        unit_sum,
        unit_distances,
        turns,
        before.directed if turns is not None and before is not None else None,
        exponent,
        unit if keep else None,
        id(before) if turns is not None else None,
    )


def _centred(x: Tensor, first: Tensor, count: Tensor | int, work: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the tokens, counted from the first one, and their distances from it.

    An error e of the mean enters ‖Π⊥X‖² only as n·e²: the tokens' own precision is enough.
    """
    torch.sub(x, first, out=work)
    offset = work.mean(dim=1, keepdim=True) if isinstance(count, int) else work.sum(dim=1, keepdim=True) / count
    return offset, torch.linalg.vector_norm(work.sub_(offset), dim=-1)


def safe_norms(dtype: torch.dtype, *, wide: bool) -> tuple[float, float]:
    """Between which bounds norms were computed without harm."""
    return (0.0, torch.inf) if wide else SAFE_NORMS[dtype]


def _as_numbers(tokens: Tensor, wide: bool) -> tuple[Tensor, Tensor | None]:
    """The tokens in a format for sums, and by which power of two they were divided."""
    tokens = tokens.detach()
    if tokens.device.type == "mps":
        tokens = tokens.cpu()
    if not wide:
        # A product may be rounded to fewer digits where the user allows it: not in float64.
        exact = tokens.dtype == torch.float64 or torch.get_float32_matmul_precision() != "highest"
        return tokens.double() if exact else tokens.float(), None
    x = tokens.double()
    largest = x.abs().amax(dim=(-2, -1))
    exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent, 0).double()  # (batch,)
    return times_power_of_two(x, -exponent[:, None, None]), exponent


def _filled(x: Tensor, norms: Tensor, mask: Tensor, scratch: Scratch, name: str = "filled") -> tuple[Tensor, Tensor]:
    """The tokens with the first one in the mask put first, and in the place of all that are not in it."""
    batch, n, d = x.shape
    places = torch.where(mask, torch.arange(n, device=x.device), mask.int().argmax(dim=-1, keepdim=True))  # (batch, n)
    rows = places + n * torch.arange(batch, device=x.device)[:, None]
    buffer = scratch.take(name, x)
    torch.index_select(x.reshape(-1, d), 0, rows.reshape(-1), out=buffer.view(-1, d))
    return buffer, norms.gather(1, places)
