"""What a block is worth: the loss when it, or a run of blocks, is skipped."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.passes import (
    Batch,
    Change,
    Machine,
    Tokenizer,
    Visit,
    batches,
    call,
    find_anatomy,
    uncompiled,
    undisturbed,
)
from depthscope.probing.gradients import Loss
from depthscope.progress import Tick


def skip_loss(
    model: nn.Module,
    inputs: Any,
    *,
    run: int = 1,
    blocks: str | None = None,
    loss: Loss | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Tick | None = None,
) -> pd.DataFrame:
    """The change of the loss when each run of `run` consecutive blocks passes its input on unchanged.

    Columns first_block, last_block, loss, change; the first row, 0 to 0, is the whole model. `loss(output)`
    takes what the model returns; by default its own `.loss` (for causal language models the labels
    are the ids themselves). Costs one pass per row and batch. Block influence alone misleads: a block that
    turns its tokens little may still cost much to skip.
    """
    model, _ = uncompiled(model)
    anatomy, calls = _prepared(model, inputs, tokenizer, blocks)
    with undisturbed(model):
        depth, whole = _mean_loss(model, anatomy, calls, loss, frozenset())
        if not 1 <= run <= depth:
            raise ValueError(f"expected a run of 1 to {depth} blocks, the model's depth, got {run}")
        rows = [(0, 0, whole, 0.0)]
        for first in range(1, depth - run + 2):
            skipped = frozenset(range(first, first + run))
            _, value = _mean_loss(model, anatomy, calls, loss, skipped)
            rows.append((first, first + run - 1, value, value - whole))
            if progress is not None:
                progress()
    return pd.DataFrame(rows, columns=["first_block", "last_block", "loss", "change"])


def mean_loss(model: nn.Module, inputs: Any, *, loss: Loss | None = None, tokenizer: Tokenizer | None = None) -> float:
    """The mean loss over the batches, as `skip_loss` takes it, with all blocks."""
    model, _ = uncompiled(model)
    anatomy, calls = _prepared(model, inputs, tokenizer, None)
    with undisturbed(model):
        return _mean_loss(model, anatomy, calls, loss, frozenset())[1]


def _prepared(
    model: nn.Module, inputs: Any, tokenizer: Tokenizer | None, blocks: str | None
) -> tuple[Anatomy, list[Batch]]:
    calls = list(batches(model, inputs, tokenizer))
    if not calls:
        raise ValueError("expected at least one batch, got none")
    anatomy = find_anatomy(model, lambda: calls[0], blocks)
    return anatomy, [_with_labels(anatomy, batch) for batch in calls]


def _mean_loss(
    model: nn.Module, anatomy: Anatomy, calls: list[Batch], loss: Loss | None, skipped: frozenset[int]
) -> tuple[int, float]:
    """The number of blocks that ran, and the mean loss over the batches without the skipped ones."""

    def pass_on(visit: Visit, _tokens: Tensor) -> Tensor | None:
        return visit.entered if visit.number in skipped else None

    values = []
    with Machine(model, anatomy, Change("output", pass_on)) as machine:
        for batch in calls:
            returned = call(model, batch)
            value = getattr(returned, "loss", None) if loss is None else loss(returned)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ValueError("the model returns no loss: pass labels in the batch, or loss=")
            values.append(value.double())
    return machine.blocks_run, torch.stack(values).mean().item()


def _with_labels(anatomy: Anatomy, batch: Batch) -> Batch:
    """The ids as labels, for causal models of Hugging Face; elsewhere the loss would see the answer."""
    ids = batch.kwargs.get("input_ids")
    if ids is None or "labels" in batch.kwargs or not anatomy.causal:
        return batch
    mask = batch.kwargs.get("attention_mask")
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    return Batch(batch.args, batch.kwargs | {"labels": labels})
