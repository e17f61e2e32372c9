"""Whether a model fits into this machine, asked before any of its weights exist."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

_SPARE = 1.2  # weights and a modest share for activations: a probe keeps no gradients and no hidden states
_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int:
    """Bytes that can be had without swapping. Without /proc/meminfo: all of the machine's memory."""
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def count_parameters(model: nn.Module) -> int:
    """Shared weights count once. Works on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters())


def require_memory(parameters: int, dtype: torch.dtype = torch.float32) -> None:
    """Refuses a model that this machine cannot hold: better one line now than the kernel's killer later."""
    needed, available = _SPARE * parameters * dtype.itemsize, available_memory()
    if needed > available:
        raise ValueError(
            f"expected a model that fits into memory, got {parameters:.3g} parameters in {_name(dtype)}: "
            f"{needed / 1e9:.1f} GB needed, {available / 1e9:.1f} GB available; "
            "take fewer blocks, a smaller width or a smaller dtype"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
