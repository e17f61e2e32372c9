"""Memory that a model uses again in every training step.

What a deep stack keeps for its backward pass is freed behind it, and goes back to the system. In the next step every
page of it is asked for again, which takes longer than to write the numbers. So the memory of a stack stays with its
model, and goes with it.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class _Spare(NamedTuple):
    memory: Tensor  # flat
    idle: int  # how many hold it if nobody uses it


_CAN_ASK = hasattr(torch._C, "_storage_Use_Count")  # PyTorch's own; without it nothing is used again
_lock = Lock()
_spares: WeakKeyDictionary[nn.Module, _Spare] = WeakKeyDictionary()


def matrix(rows: int, columns: int, dtype: torch.dtype, owner: nn.Module | None) -> Tensor:
    """An empty matrix, in memory that its owner has used before, unless any tensor still stands there."""
    size = rows * columns
    if owner is None or not _CAN_ASK:
        return torch.empty(rows, columns, dtype=dtype, device="cpu")
    with _lock:
        spare = _spares.get(owner)
        fits = spare is not None and spare.memory.dtype == dtype and len(spare.memory) >= size
        if spare is None or not fits or _holders(spare.memory) > spare.idle:
            _spares.pop(owner, None)
            memory = torch.empty(size, dtype=dtype, device="cpu")
            spare = _spares[owner] = _Spare(memory, _holders(memory))
        return spare.memory[:size].view(rows, columns)  # held from here on


def _holders(memory: Tensor) -> int:
    return int(torch._C._storage_Use_Count(memory.untyped_storage()._cdata))
