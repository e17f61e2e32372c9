"""Whether a model fits into this machine, asked before any of its weights exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

_SPARE = 1.2  # weights and a modest share for activations: a probe keeps no gradients and no hidden states
_BLOCK = 50_000  # bytes of a block's Python objects, whatever the width of its weights
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def available_memory() -> int:
    """Bytes that can be had without swapping, of the machine and of the container that this process is in.

    Without /proc/meminfo: all of the machine's memory.
    """
    left = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if _MEMINFO.exists():
        named = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        left = [int(named["MemAvailable"].split()[0]) * 1024]
    group = _CGROUPS
    with suppress(OSError, ValueError):
        group = _CGROUPS / _OWN_CGROUPS.read_text().strip().removeprefix("0::").lstrip("/")
    for folder in (group, *group.parents):  # a group has no more than those that it is in
        with suppress(OSError, ValueError):  # not there, or "max": no limit
            most, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # Files that the kernel keeps in memory only as long as nobody needs it count as left.
            left.append(max(0, most - used + int(kept.get("inactive_file", 0))))
    return min(left)


def count_parameters(model: nn.Module) -> int:
    """Shared weights count once. Works on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def counting(what: str) -> Iterator[None]:
    """While sizes are found out on the meta device: one line if they are beyond what torch can count with."""
    try:
        yield
    except (RuntimeError, OverflowError, TypeError) as error:
        if not any(word in str(error).lower() for word in ("overflow", "too large", "too big")):
            raise
        raise ValueError(f"expected sizes that torch can count with, got {what}") from None


def require_memory(parameters: int, dtype: torch.dtype = torch.float32, *, what: str = "", blocks: int = 0) -> None:
    """Refuses a model that this machine cannot hold: better one line now than the kernel's killer later.

    `what` tells of the sizes that were asked for. Blocks cost something whatever their width.
    """
    with counting(what):
        needed, available = _SPARE * parameters * dtype.itemsize + float(_BLOCK * blocks), available_memory()
    if needed > available:
        counted = f"{parameters:.3g} parameters in {str(dtype).removeprefix('torch.')}" if parameters else ""
        sizes = filter(None, (what, counted))
        raise ValueError(
            f"expected a model that fits into memory, got {', '.join(sizes)}: "
            f"{needed / 1e9:.1f} GB needed, {available / 1e9:.1f} GB available; "
            "take fewer blocks, a smaller width or a smaller dtype"
        )


def require_room(size: int, what: str, instead: str) -> None:
    """Refuses input of so many bytes that this machine cannot hold."""
    with counting(what):
        needed = size / 1e9
    if size > (available := available_memory()):
        raise ValueError(
            f"expected input that fits into memory, got {what}: {needed:.3g} GB needed, "
            f"{available / 1e9:.1f} GB available; {instead}"
        )
