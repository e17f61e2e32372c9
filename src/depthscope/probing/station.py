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
from depthscope.measures.norms import times_power_of_two
from depthscope.measures.tokens import ratios_to_median


@dataclass(eq=False, slots=True)
class Look:
    """What is kept of a token matrix (batch, n, d) after it has passed, where the tokens were."""

    shape: torch.Size
    epsilon: float  # of the format in which the tokens are stored
    wide: bool
    finds_outliers: bool
    measured: Tensor | None  # (batch, n), which tokens are measured; None: all
    directed: Tensor | None  # (batch, n), measured tokens that have a direction; None: all, unless the look is in doubt
    token_norms: Tensor  # (batch, n); where a token is not measured, that of the first one
    first: Tensor  # (batch, 1, d), the token by which all were shifted
    offset: Tensor  # (batch, 1, d), from there to the mean
    distances: Tensor  # (batch, n), of the tokens from their mean
    unit_first: Tensor  # (batch, 1, d), the token whose unit token all unit tokens were shifted by
    unit_offset: Tensor  # (batch, 1, d), from there to the mean of the unit tokens that are no outliers
    unit_sum: Tensor | None  # (batch, 1, d), of all unit tokens, shifted; None: without outliers
    unit_distances: Tensor  # (batch, n), of the unit tokens from that mean
    turns: Tensor | None  # (batch, n), ‖u − v‖ to the unit tokens v of the look `before`
    before: Look | None  # at what entered the block; only until the numbers of this look are made
    exponent: Tensor | None  # (batch,), by which power of two everything but unit tokens was divided
    unit: Tensor | None  # (batch, n, d), the unit tokens if they are kept: in a buffer that later looks use again

    @property
    def ratios(self) -> Tensor:
        """(batch, n), norms over the median; nan elsewhere."""
        return ratios_to_median(self.token_norms, self.measured)


def look(
    tokens: Tensor,
    real: Tensor | None,
    scratch: Scratch,
    *,
    keep: str = "",
    before: Look | None = None,
    outliers: bool = False,
    wide: bool = False,
) -> Look:
    """Looks at tokens (batch, n, d); `real` (batch, n) is true for those that are measured.

    `keep` names the buffer of the unit tokens, which stay there until that name is used again, "" where they are not
    needed; `before` is what they are compared with. `outliers` says that there may be some. Tensors on Apple's GPU,
    which has no float64, are moved to the CPU.
    """
    x, exponent, directed = tokens.detach(), None, None
    if x.device.type == "mps":
        x = x.cpu()
    if wide:
        x = x.double()
        largest = x.abs().amax(dim=(-2, -1))
        exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent, 0).double()  # (batch,)
        x = times_power_of_two(x, -exponent[:, None, None])
    elif x.dtype == torch.float64 or torch.get_float32_matmul_precision() != "highest":
        x = x.double()  # a product may be rounded to fewer digits where the user allows it: not in float64
    else:
        x = x.float()
    batch, n, _ = x.shape
    norms = torch.linalg.vector_norm(x, dim=-1)
    if real is not None:
        real = (real.to(x.device) != 0).expand(batch, n)
    if wide:
        directed = norms != 0 if real is None else real & (norms != 0)  # true for nan, which makes the result nan
    if real is not None:
        x, norms = _filled(x, norms, real, scratch.take("filled", x))
    unit_first = first = x[:, :1].clone()
    work = scratch.take("work", x)
    count = None if real is None else real.sum(dim=-1).clamp(min=1)[:, None, None]
    offset, distances = _centred(x, first, count, work)
    divisors = norms
    if directed is not None:
        x, divisors = _filled(x, norms, directed, scratch.take("directed", x))
        unit_first, divisors = x[:, :1].clone(), divisors.clamp(min=torch.finfo(x.dtype).tiny)
    unit = torch.div(x, divisors.unsqueeze(-1), out=scratch.take(keep or "unit", x))
    unit_sum = turns = None
    if outliers or wide:
        # Distances are from the mean of the others: that of all would be the mean of the outliers' directions too.
        torch.sub(unit, unit[:, :1], out=work)
        weights = torch.ones(batch, 2, n, dtype=x.dtype, device=x.device)
        ordinary = torch.le(ratios_to_median(norms, real), OUTLIER_FACTOR, out=weights[:, 0])
        sums = torch.bmm(weights, work)
        unit_offset, unit_sum = sums[:, :1] / ordinary.sum(dim=-1).clamp(min=1)[:, None, None], sums[:, 1:]
        unit_distances = torch.linalg.vector_norm(work.sub_(unit_offset), dim=-1)
    else:
        unit_offset, unit_distances = _centred(unit, unit[:, :1], count, work)
    if before is None or before.unit is None or (before.shape, before.unit.device) != (x.shape, x.device):
        before = None
    else:
        turns = torch.linalg.vector_norm(torch.sub(unit, before.unit, out=work), dim=-1)
    return Look(
        x.shape,
        torch.finfo(tokens.dtype).eps,
        wide,
        outliers or wide,
        real,
        real if directed is None else directed,
        norms,
        first,
        offset,
        distances,
        unit_first,
        unit_offset,
        unit_sum,
        unit_distances,
        turns,
        before,
        exponent,
        unit if keep else None,
    )


def _centred(x: Tensor, first: Tensor, count: Tensor | None, work: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the tokens, counted from the first one, and their distances from it.

    An error e of the mean enters ‖Π⊥X‖² only as n·e²: the tokens' own precision is enough.
    """
    torch.sub(x, first, out=work)
    offset = work.mean(dim=1, keepdim=True) if count is None else work.sum(dim=1, keepdim=True) / count
    return offset, torch.linalg.vector_norm(work.sub_(offset), dim=-1)


def _filled(x: Tensor, norms: Tensor, mask: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens with the first one in the mask put first, and in the place of all that are not in it."""
    batch, n, d = x.shape
    places = torch.where(mask, torch.arange(n, device=x.device), mask.int().argmax(dim=-1, keepdim=True))  # (batch, n)
    rows = places + n * torch.arange(batch, device=x.device)[:, None]
    torch.index_select(x.reshape(-1, d), 0, rows.reshape(-1), out=buffer.view(-1, d))
    return buffer, norms.gather(1, places)
