"""A sweep without a question to the device: a GPU goes on while the model does, and is asked once, after the pass.

Everything is in float64, which holds the square of any float32 number, and every case is a mask, not a branch. A GPU
computes a few passes over a station's tokens in no time that counts; a wait for it at every station would. Written for
CUDA, and tested on the CPU alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthscope.measures.tokens import are_outliers, ratios_to_median


def can_sweep(tokens: Tensor) -> bool:
    """Whether these are float32 or half precision, on a device that has float64."""
    usual = tokens.dtype in (torch.float32, torch.bfloat16, torch.float16) and type(tokens) is Tensor
    return usual and tokens.device.type not in ("cpu", "mps", "meta") and tokens.numel() > 0


def sweep(
    tokens: Tensor, real: Tensor | None, out: Tensor, before: tuple[Tensor, Tensor | None] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fills `out` and returns the norms, the unit tokens and which of them have a direction."""
    if real is None:
        real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    x = torch.where(real.unsqueeze(-1), tokens.detach().double(), 0.0)
    norms = torch.linalg.vector_norm(x, dim=-1)  # (batch, n)
    directed = real & (norms != 0)  # nan stays, and makes the result nan
    unit = x / torch.where(directed, norms, 1.0).unsqueeze(-1)
    found = are_outliers(ratios_to_median(norms, real))
    parts = [_split(x, real), _split(unit, directed), _split(unit, directed & ~found)]
    turn = torch.full_like(norms[:, 0], torch.nan)
    if before is not None:
        both = directed if before[1] is None else directed & before[1]
        rows = torch.linalg.vector_norm(unit - before[0], dim=-1)
        turn = torch.where(both, 2 * torch.arcsin((rows / 2).clamp(max=1)), 0.0).sum(dim=-1) / both.sum(dim=-1)
    numbers = [number for part in parts for number in part]
    torch.stack([*numbers, norms.amax(dim=-1), found.sum(dim=-1).double(), turn], out=out)
    return norms, unit, directed


def _split(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many tokens there are, ‖Π₁X‖_F and ‖Π⊥X‖_F, (batch,); both norms are nan without a token."""
    count = mask.sum(dim=-1).double()
    n = count[:, None, None]
    index = mask.int().argmax(dim=-1)[:, None, None].expand(-1, 1, x.shape[-1])
    first = x.gather(1, index)  # (batch, 1, d)
    inside = mask.unsqueeze(-1)
    shifted = torch.where(inside, x - first, 0.0)
    offset = shifted.sum(dim=1, keepdim=True) / n
    spread = torch.linalg.vector_norm(torch.where(inside, shifted - offset, 0.0), dim=(1, 2))
    mean_norm = count.sqrt() * torch.linalg.vector_norm(first + offset, dim=-1).squeeze(-1)
    return count, mean_norm, torch.where(count > 0, spread, torch.nan)
