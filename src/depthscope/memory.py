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
# Limit and use, in the second and in the first version of cgroups.
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_memory() -> int:
    """Bytes that can be had without swapping, of the machine and of the container that this process is in.

    Without /proc/meminfo: all of the machine's memory.
    """
    return min(_of_machine(), *_left_in_cgroups())


def _of_machine() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_cgroups() -> list[int]:
    """What the limits of the process's own groups, and of those that they are in, leave."""
    left = []
    for folder in _own_cgroups():
        for limit, used in _LIMITS:
            with suppress(OSError, ValueError):  # not there, or "max": no limit
                most = int((folder / limit).read_text())
                left.append(max(0, most - int((folder / used).read_text()) + _reclaimable(folder)))
    return left or [_of_machine()]


def _own_cgroups() -> list[Path]:
    """Folders of the groups that count memory. Inside a container the outermost is what is mounted there."""
    found: dict[Path, None] = {_CGROUPS: None, _CGROUPS / "memory": None}
    with suppress(OSError, ValueError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = _CGROUPS / controllers
                group = root / path.lstrip("/")
                found.update(dict.fromkeys(parent for parent in (group, *group.parents) if root in parent.parents))
    return list(found)


def _reclaimable(folder: Path) -> int:
    """Files that the kernel keeps in memory only as long as nobody needs the room."""
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0


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
        sizes = [*([what] if what else []), *([f"{parameters:.3g} parameters in {_name(dtype)}"] if parameters else [])]
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
