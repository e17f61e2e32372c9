"""The loops of a sweep, compiled where numba is installed: see `depthscope.compiling`."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from depthscope.compiling import Compiled, Loops, compiled, over_sequences, wanted
from depthscope.measures import OUTLIER_FACTOR
from depthscope.probing.sweep.loops import sweep_rows

_NOTHING = {kind: np.zeros((0,) * axes, kind) for kind, axes in (("bool", 2), ("float32", 3), ("float64", 2))}

_FIELDS = 12  # numbers of a sequence, `FIELDS` of the package


def kernel() -> Compiled:
    """The compiled loops; the environment is asked each time."""
    return _compiled() if wanted() else Compiled(None)


@cache
def _compiled() -> Compiled:
    # Sums may be taken in another order, which makes them fast; nan and infinity keep their meaning.
    return compiled(sweep_rows, _try, fastmath={"reassoc"})


def _try(loops: Loops) -> None:
    """One token: only a call compiles, or reads the cache, and shows whether that works."""
    out = torch.empty(_FIELDS, 1, dtype=torch.float64)
    sweep(loops, torch.ones(1, 1, 1), None, out, None, None)
    if out[0].item() != 1:
        raise RuntimeError(f"the compiled loops count {out[0].item():g} tokens where there is 1")


def can_sweep(tokens: Tensor) -> bool:
    """Whether the kernel reads these: float32 and what fits into it, in this computer's own memory."""
    return (
        type(tokens) in (Tensor, torch.nn.Parameter)
        and tokens.device.type == "cpu"
        and tokens.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and tokens.layout is torch.strided
        and tokens.numel() > 0
    )


def sweep(
    loops: Loops,
    tokens: Tensor,
    real: Tensor | None,
    out: Tensor,
    kept: Tensor | None,
    before: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Fills `out` (fields, batch) and `kept`, and returns the norms of the tokens (batch, n)."""
    batch, n, _ = tokens.shape
    norms = torch.empty(batch, n, dtype=torch.float64)
    tokens_before, norms_before = (None, None) if before is None else before
    is_stored = tokens.is_contiguous() and not tokens.is_neg()
    is_plain = tokens.dtype is torch.float32 and is_stored and not tokens.requires_grad
    given = (
        tokens.numpy() if is_plain else tokens.detach().float().contiguous().resolve_neg().numpy(),
        _NOTHING["bool"] if real is None else real.contiguous().numpy(),
        _NOTHING["float32"] if tokens_before is None else tokens_before.numpy(),
        _NOTHING["float64"] if norms_before is None else norms_before.numpy(),
        _NOTHING["float32"] if kept is None else kept.numpy(),
        OUTLIER_FACTOR,
        norms.numpy(),
        out.numpy(),
    )
    over_sequences(loops, given, batch, tokens.numel())
    return norms
