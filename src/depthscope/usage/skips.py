"""What the later blocks, the output and the loss make of it when a block passes its input on unchanged.

After Csordás, Manning & Potts 2025 (arXiv 2505.13898): where a block is built upon, the later ones change what they do
without it. One pass per block and batch, and one with all blocks to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.hooks import Machine, Visit, leave_out, pass_on
from depthscope.inputs import Batch, call
from depthscope.measures import median
from depthscope.probing.skipping import LossOf, one_number
from depthscope.progress import Tick
from depthscope.usage.followed import Means, listen_to_blocks

Instead = Callable[[Visit], Tensor]  # the tokens that leave a block in place of its own, in the layout of the model
OUTPUT, LOSS = "output", "loss"


@dataclass(frozen=True)
class Exchanged:
    """What became of a pass whose blocks were exchanged one by one; row i: without, or instead of, block i + 1."""

    later: np.ndarray  # (L, L): how far block j + 1 changes what it adds; nan where j ≤ i
    output: np.ndarray  # (L): how far the last block's output moves
    loss: np.ndarray | None  # (L): the change of the loss; None without a loss
    whole: float | None  # the loss with all blocks


class _Record:
    """What every block adds to its followed tokens in one pass, and what leaves the last one."""

    def __init__(self, most: int | None):
        self.added: dict[int, Tensor] = {}  # (k, d)
        self.output: Tensor | None = None
        self.last: Visit | None = None
        self.site = listen_to_blocks(most, self._see)

    def _see(self, visit: Visit, entered: Tensor, left: Tensor) -> None:
        self.last, self.output = visit, left
        self.added[visit.number] = left - entered


def without_each(
    model: nn.Module,
    anatomy: Anatomy,
    calls: list[Batch],
    loss_of: LossOf | None,
    *,
    most: int | None,
    depth: int,
    progress: Tick | None = None,
) -> Exchanged:
    """The effect of skipping each block. `loss_of` as `calls_with_loss` makes it; None: no loss is taken."""
    instead = dict.fromkeys(range(1, depth + 1), pass_on)
    return exchange_each(model, anatomy, calls, instead, loss_of, most=most, depth=depth, progress=progress)


def exchange_each(
    model: nn.Module,
    anatomy: Anatomy,
    calls: list[Batch],
    instead: Mapping[int, Instead],
    loss_of: LossOf | None,
    *,
    most: int | None,
    depth: int,
    progress: Tick | None = None,
) -> Exchanged:
    """One block at a time returns something else, in a pass of its own; of blocks that `instead` lacks all is nan."""
    means = Means()
    for batch in calls:
        whole, loss = _pass(model, anatomy, batch, None, {}, loss_of, most)
        weight = float(len(whole.output)) if whole.output is not None else 0.0
        if loss is not None:
            means.add(0, LOSS, loss, 1.0)
        for block in instead:
            found, changed = _pass(model, anatomy, batch, block, instead, loss_of, most)
            for other, added in found.added.items():
                if other > block and added.shape == whole.added[other].shape:
                    means.add(block, f"{other}", _moved(added, whole.added[other]), weight)
            if found.output is not None and whole.output is not None:
                means.add(block, OUTPUT, _moved(found.output, whole.output), weight)
            if changed is not None:
                means.add(block, LOSS, changed, 1.0)
            if progress is not None:
                progress()
    blocks = range(1, depth + 1)
    later = np.array([[means.get(b, f"{other}") for other in blocks] for b in blocks])
    base = means.get(0, LOSS) if loss_of is not None else None
    losses = None if base is None else np.array([means.get(b, LOSS) - base for b in blocks])
    return Exchanged(later, np.array([means.get(b, OUTPUT) for b in blocks]), losses, base)


def _pass(
    model: nn.Module,
    anatomy: Anatomy,
    batch: Batch,
    block: int | None,
    instead: Mapping[int, Instead],
    loss_of: LossOf | None,
    most: int | None,
) -> tuple[_Record, Tensor | None]:
    record = _Record(most)
    changed = leave_out({block}, instead[block]) if block is not None else leave_out(())
    with Machine(model, anatomy, changed, record.site):
        returned = call(model, batch)
    loss = None
    if loss_of is not None and record.last is not None:
        loss = one_number(loss_of(batch, returned, record.last))
    return record, loss


def _moved(now: Tensor, before: Tensor) -> Tensor:
    """The median over tokens of ‖now − before‖ / ‖before‖; a token that nothing was added to, and is not, is left out,
    and so is one whose numbers are not finite."""
    size = torch.linalg.vector_norm(before.double(), dim=-1)
    distance = torch.linalg.vector_norm(now.double() - before.double(), dim=-1)
    return median(torch.where(size > 0, distance / size, torch.nan))
