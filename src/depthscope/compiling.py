"""Plain loops, compiled by numba where it is installed (`pip install 'depthscope[fast]'`): no compiler is needed.

The first call on a machine compiles, for a second or two; the machine code is then kept in the user's cache
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

import torch

Loops = Callable[..., None]
WORTH_A_THREAD = 2**20  # numbers: a few tenths of a millisecond for one thread


class Compiled(NamedTuple):
    """Compiled loops, or why there are none."""

    loops: Loops | None
    trouble: str = ""  # "" where numba is not installed, or not wanted: nothing is wrong then


def wanted() -> bool:
    """Whether compiled loops may be used; the environment is asked each time."""
    return os.environ.get("DEPTHSCOPE_KERNEL", "on").strip().lower() not in ("off", "0", "no", "false")


def compiled(loops: Loops, attempt: Callable[[Loops], None], **options: Any) -> Compiled:
    """The loops, compiled. Only a call compiles, or reads the cache: `attempt` makes one, and raises if it is wrong.

    `options` are numba's. What does not work, for whatever reason, is left to the forms in PyTorch's operations.
    """
    if find_spec("numba") is None:
        return Compiled(None)
    trouble = ""
    for folder in dict.fromkeys((_cache_folder(), "")):  # what is in a cache may be broken: then without one
        try:
            found = _decorated(loops, folder, options)
            if found is not None:
                attempt(found)
            return Compiled(found)
        except Exception as error:  # an installation that does not fit
            trouble = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Compiled(None, trouble)


def _decorated(loops: Loops, folder: str, options: dict[str, Any]) -> Loops | None:
    """The loops, to be compiled at their first call; None where the user has told numba to compile nothing."""
    import numba  # type: ignore[import-not-found,import-untyped,unused-ignore]

    config: Any = numba.config  # which reads its names from the environment
    if config.DISABLE_JIT:
        return None
    before = config.CACHE_DIR
    config.CACHE_DIR = folder or before  # read where a function is decorated
    try:
        options = {"nogil": True, "error_model": "numpy", "boundscheck": False, **options}
        return numba.njit(cache=bool(folder), **options)(loops)
    finally:
        config.CACHE_DIR = before


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


def over_sequences(loops: Loops, given: tuple[Any, ...], batch: int, numbers: int) -> None:
    """loops(*given, first, last) over all sequences; where it pays they are shared among as many threads as PyTorch."""
    parts = min(torch.get_num_threads(), batch) if numbers >= WORTH_A_THREAD else 1
    if parts == 1:
        loops(*given, 0, batch)
        return
    edges = [batch * part // parts for part in range(parts + 1)]
    others = [_threads().submit(loops, *given, *edge) for edge in pairwise(edges[1:])]
    loops(*given, 0, edges[1])
    for other in others:
        other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    """Those that share the work with the one that asks for it."""
    return ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1), thread_name_prefix="depthscope-loops")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a process that was forked has none of them
