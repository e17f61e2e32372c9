"""The loops, compiled by numba where it is installed (`pip install 'depthscope[fast]'`): no compiler is needed.

The first call on a machine compiles, for two or three seconds; the machine code is then kept in the user's cache
(`NUMBA_CACHE_DIR`, else `$XDG_CACHE_HOME/depthscope`, else `~/.cache/depthscope`), never in the installed package.
Where that cannot be written to, every process compiles for itself. `DEPTHSCOPE_KERNEL=off` leaves all of it out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthscope.measures import OUTLIER_FACTOR
from depthscope.probing.sweep.loops import sweep_rows

_NOTHING = {kind: np.zeros((0,) * axes, kind) for kind, axes in (("bool", 2), ("float32", 3), ("float64", 2))}

_FIELDS = 12  # numbers of a sequence, `FIELDS` of the package
WORTH_A_THREAD = 2**20  # numbers: about a millisecond for one thread


class Kernel(NamedTuple):
    """The compiled loops, or why there are none."""

    sweep: Callable[..., None] | None
    trouble: str = ""  # "" where numba is not installed, or not wanted: nothing is wrong then


def kernel() -> Kernel:
    """The compiled loops; the environment is asked each time."""
    wanted = os.environ.get("DEPTHSCOPE_KERNEL", "on").strip().lower() not in ("off", "0", "no", "false")
    return _compiled() if wanted else Kernel(None)


@cache
def _compiled() -> Kernel:
    if find_spec("numba") is None:
        return Kernel(None)
    trouble = ""
    for folder in dict.fromkeys((_cache_folder(), "")):  # what is in a cache may be broken: then without one
        try:
            compiled = _compile(folder)
            if compiled is not None:
                _try(compiled)
            return Kernel(compiled)
        except Exception as error:  # an installation that does not fit: the eager form does the same
            trouble = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Kernel(None, trouble)


def _compile(folder: str) -> Callable[..., None] | None:
    """The loops, to be compiled at their first call; None where the user has told numba to compile nothing."""
    import numba  # type: ignore[import-not-found,import-untyped,unused-ignore]

    config: Any = numba.config  # which reads its names from the environment
    if config.DISABLE_JIT:
        return None
    before = config.CACHE_DIR
    config.CACHE_DIR = folder or before  # read where a function is decorated
    try:
        # Sums may be taken in another order, which makes them fast; nan and infinity keep their meaning.
        return numba.njit(cache=bool(folder), nogil=True, fastmath={"reassoc"}, error_model="numpy", boundscheck=False)(
            sweep_rows
        )
    finally:
        config.CACHE_DIR = before


def _try(compiled: Callable[..., None]) -> None:
    """One token: only a call compiles, or reads the cache, and shows whether that works."""
    out = torch.empty(_FIELDS, 1, dtype=torch.float64)
    sweep(compiled, torch.ones(1, 1, 1), None, out, None, None)
    if out[0].item() != 1:
        raise RuntimeError(f"the compiled loops count {out[0].item():g} tokens where there is 1")


def _cache_folder() -> str:
    """Where machine code may be kept; "" if nowhere."""
    try:
        own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "depthscope" / "kernels"
        folder = Path(os.environ.get("NUMBA_CACHE_DIR") or own)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return ""


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
    compiled: Callable[..., None],
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
    is_plain = tokens.dtype is torch.float32 and tokens.is_contiguous() and not tokens.requires_grad
    given = (
        tokens.numpy() if is_plain else tokens.detach().float().contiguous().numpy(),
        _NOTHING["bool"] if real is None else real.contiguous().numpy(),
        _NOTHING["float32"] if tokens_before is None else tokens_before.numpy(),
        _NOTHING["float64"] if norms_before is None else norms_before.numpy(),
        _NOTHING["float32"] if kept is None else kept.numpy(),
        OUTLIER_FACTOR,
        norms.numpy(),
        out.numpy(),
    )
    parts = min(torch.get_num_threads(), batch) if tokens.numel() >= WORTH_A_THREAD else 1
    if parts == 1:
        compiled(*given, 0, batch)
        return norms
    edges = [batch * part // parts for part in range(parts + 1)]
    others = [_threads().submit(compiled, *given, *edge) for edge in pairwise(edges[1:])]
    compiled(*given, 0, edges[1])
    for other in others:
        other.result()
    return norms


@cache
def _threads() -> ThreadPoolExecutor:
    """Those that share a large sweep with the one that asks for it."""
    return ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1), thread_name_prefix="depthscope-sweep")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a process that was forked has none of them
