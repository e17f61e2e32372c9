"""Several sequences in one row, told apart by `position_ids` that begin again: found, and put into rows of their own.

Hugging Face's causal models keep such sequences from seeing each other if they are given no mask and no cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.discovery.causality import Trial
from depthscope.inputs.batches import Batch

_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # where sequences end, said once more


def pieces_of(kwargs: dict[str, Any]) -> Tensor | None:
    """(batch, n) the number of each token's sequence in its row, from 0; None if no row has more than one.

    A new sequence begins where the position is not one more than the position before.
    """
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[1] < 2:
        return None
    if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
        return None
    pieces = nn.functional.pad((positions.diff(dim=-1) != 1).long().cumsum(dim=-1), (1, 0))
    return pieces if bool(pieces.any()) else None


def are_apart(model: nn.Module, anatomy: Anatomy, batch: Batch, pieces: Tensor) -> bool:
    """Whether the model keeps the pieces of a row from each other: a change of the first does not reach the others."""
    trial = Trial(model, anatomy, batch)
    first = (pieces == 0).expand(trial.before.real.shape)
    return trial.reaches(first, ~first) is False


def unpacked(batch: Batch, pieces: Tensor) -> Batch:
    """The same sequences, one to a row, filled up on the right, with the mask that says so."""
    batch = Batch(batch.args, {name: value for name, value in batch.kwargs.items() if name not in _ENDS})
    size = max(value.shape[0] for value in batch.kwargs.values() if isinstance(value, Tensor) and value.ndim > 1)
    pieces = pieces.expand(size, -1)
    where = [(row, pieces[row] == piece) for row in range(size) for piece in range(int(pieces[row].max()) + 1)]
    most = max(int(chosen.sum()) for _, chosen in where)

    def rows(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if value.ndim < 2 or value.shape[1] != pieces.shape[1] or value.shape[0] not in (1, size):
            raise ValueError(
                f"position_ids begin again in a row: several sequences in one, and {name} {tuple(value.shape)} cannot "
                "be told apart with them; pass one sequence to a row, with an attention_mask"
            )
        whole = value.expand(size, *value.shape[1:])
        filled = value.new_full((len(where), most, *value.shape[2:]), -100 if name == "labels" else 0)
        for index, (row, chosen) in enumerate(where):
            filled[index, : int(chosen.sum())] = whole[row, chosen]
        return filled

    kwargs = {name: rows(name, value) for name, value in batch.kwargs.items()}
    lengths = torch.tensor([int(chosen.sum()) for _, chosen in where], device=pieces.device)
    mask = torch.arange(most, device=pieces.device) < lengths.unsqueeze(-1)
    return Batch(batch.args, kwargs | {"attention_mask": mask.long()})
