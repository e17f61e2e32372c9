"""A sweep in about a dozen operations of PyTorch, for ordinary tokens on the CPU where the kernel is not installed.

Tokens whose squares float32 cannot hold, tokens without a direction and sequences without a real token are left to the
exact form. What padding holds is replaced by the first real token of its sequence: shifted by that one it is 0, and
needs no mask in anything of the tokens' size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthscope.measures import OUTLIER_FACTOR, Scratch, TokenMatrix
from depthscope.measures.norms import SAFE_NORMS, mean_is_lost
from depthscope.measures.tokens import are_outliers, ratios_to_median

_LOW, _HIGH = SAFE_NORMS[torch.float32]


def can_sweep(tokens: Tensor) -> bool:
    """Whether these are float32 or half precision, in this computer's own memory."""
    usual = tokens.dtype in (torch.float32, torch.bfloat16, torch.float16) and tokens.device.type == "cpu"
    return usual and type(tokens) in (Tensor, torch.nn.Parameter) and tokens.numel() > 0


def sweep(
    tokens: Tensor,
    real: Tensor | None,
    out: Tensor,
    scratch: Scratch,
    keep: str,
    before: tuple[Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Fills `out` and returns the norms, the unit tokens and which of them have a direction; None: not to be had so."""
    x, n = tokens.detach().float(), tokens.shape[1]
    if real is not None and bool(real.all()):
        real = None
    count: Tensor | float = float(n)
    if real is not None:
        count = real.sum(dim=-1).double()  # (batch,)
        if not bool(count.all()):
            return None
        x = _filled(x, real, scratch.take("filled", x))
    rows = torch.linalg.vector_norm(x, dim=-1)  # (batch, n)
    least, most = (edge.item() for edge in torch.aminmax(rows))
    if not (least > _LOW and most < _HIGH):
        return None
    mean_norm, spread = _split(x, real, count, scratch)
    least_spread, most_spread = (edge.item() for edge in torch.aminmax(spread))
    if not (least_spread > _LOW and most_spread < _HIGH):  # equal tokens, or differences without their last bits
        return None
    if bool(mean_is_lost(mean_norm, spread, n, x.dtype).any()):
        return None
    unit = torch.div(x, rows.unsqueeze(-1), out=scratch.take(keep or "unit", x))
    unit_mean_norm, unit_spread = _split(unit, real, count, scratch)
    if bool(mean_is_lost(unit_mean_norm, unit_spread, n, x.dtype).any()):
        return None
    counts = torch.full_like(spread, count) if isinstance(count, float) else count
    ordinary, outliers = (counts, unit_mean_norm, unit_spread), torch.zeros_like(spread)
    norms = rows.double() if real is None else torch.where(real, rows.double(), 0.0)
    if most > OUTLIER_FACTOR * least:  # the median is not smaller than the least: else there can be none
        found = are_outliers(ratios_to_median(norms, real))
        if bool(found.any()):
            left = TokenMatrix(unit, ~found if real is None else real & ~found).norms
            ordinary, outliers = (left.count, left.mean_norm, left.deviation_norm), found.sum(dim=-1).double()
    turn = torch.full_like(spread, torch.nan) if before is None else _turn(unit, real, before, scratch)
    numbers = [counts, mean_norm, spread, counts, unit_mean_norm, unit_spread, *ordinary]
    torch.stack([*numbers, norms.amax(dim=-1), outliers, turn], out=out)
    return norms, unit, real


def _filled(x: Tensor, real: Tensor, buffer: Tensor) -> Tensor:
    """The tokens with the first real one of each sequence in the place of its padding: rows are copied, once."""
    batch, n, d = x.shape
    first = real.int().argmax(dim=-1, keepdim=True)  # (batch, 1)
    places = torch.where(real, torch.arange(n), first) + n * torch.arange(batch)[:, None]  # (batch, n)
    torch.index_select(x.reshape(-1, d), 0, places.reshape(-1), out=buffer.view(-1, d))
    return buffer


def _split(x: Tensor, real: Tensor | None, count: Tensor | float, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """‖Π₁X‖_F and ‖Π⊥X‖_F, float64, (batch,)."""
    # Padding equals the first real token: it may be subtracted wherever it stands.
    first = x[:, :1]
    shifted = torch.sub(x, first, out=scratch.take("work", x))
    # An error e of this mean enters ‖Π⊥X‖² only as n·e²: the tokens' own precision is enough.
    offset = shifted.sum(dim=1, keepdim=True)
    offset = offset / count if isinstance(count, float) else offset / count[:, None, None].to(x.dtype)
    spread = torch.linalg.vector_norm(shifted.sub_(offset), dim=-1).double()  # (batch, n)
    if real is not None:
        spread = torch.where(real, spread, 0.0)
    mean = (first.double() + offset.double()).squeeze(1)
    root = count**0.5 if isinstance(count, float) else count.sqrt()
    return torch.linalg.vector_norm(mean, dim=-1) * root, torch.linalg.vector_norm(spread, dim=-1)


def _turn(unit: Tensor, real: Tensor | None, before: tuple[Tensor, Tensor | None], scratch: Scratch) -> Tensor:
    """The mean angle to the unit tokens before, by 2·arcsin(‖u − v‖/2), in radians, (batch,)."""
    difference = torch.sub(unit, before[0].to(unit.dtype), out=scratch.take("work", unit))
    rows = torch.linalg.vector_norm(difference, dim=-1).double()
    angles = 2 * torch.arcsin((rows / 2).clamp(max=1))
    masks = [mask for mask in (real, before[1]) if mask is not None]
    if not masks:
        return angles.mean(dim=-1)
    both = masks[0] & masks[-1]
    return torch.where(both, angles, 0.0).sum(dim=-1) / both.sum(dim=-1)
