"""What the later blocks, the output and the loss become when a block passes its input on unchanged.

After Csordás, Manning & Potts 2025 (arXiv 2505.13898): where a block is built upon, the later ones change what they do
without it. One pass per block and batch, and one with all blocks to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.hooks import Listen, Machine, Visit, full_precision, leave_out
from depthscope.inputs import Batch, call
from depthscope.measures import median
from depthscope.probing.skipping import LossOf, one_number
from depthscope.progress import Tick
from depthscope.usage.sampling import Means, SampledTokens


@dataclass(frozen=True)
class Skipped:
    """What became of the passes without one block; row i: without block i + 1."""

    later: np.ndarray  # (L, L): how far block j + 1 changes what it adds; nan where j ≤ i
    output: np.ndarray  # (L): how far the last block's output moves
    loss: np.ndarray | None  # (L): the change of the loss; None without a loss


@dataclass
class _Pass:
    """What every block adds to its sampled tokens in one pass, what leaves the last one, and the loss."""

    added: dict[int, Tensor] = field(default_factory=dict)  # (k, d)
    output: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # (k, d)
    last: Visit | None = None
    loss: Tensor | None = None


def without_each(
    model: nn.Module,
    anatomy: Anatomy,
    calls: list[Batch],
    loss_of: LossOf | None,
    *,
    sample: int | None,
    depth: int,
    progress: Tick = lambda: None,
) -> Skipped:
    """The effect of skipping each block. `loss_of` as `calls_with_loss` makes it; None: no loss is taken."""
    means, blocks = Means(), range(1, depth + 1)
    for batch in calls:
        whole = _run(model, anatomy, batch, None, loss_of, sample)
        weight = float(len(whole.output))
        if whole.loss is not None:
            means.add(0, "loss", whole.loss, 1.0)
        for block in blocks:
            found = _run(model, anatomy, batch, block, loss_of, sample)
            for other, added in found.added.items():
                if other > block and added.shape == whole.added[other].shape:
                    means.add(block, f"{other}", _moved(added, whole.added[other]), weight)
            means.add(block, "output", _moved(found.output, whole.output), weight)
            if found.loss is not None:
                means.add(block, "loss", found.loss, 1.0)
            progress()
    return Skipped(
        np.array([[means.get(block, f"{other}") for other in blocks] for block in blocks]),
        np.array([means.get(block, "output") for block in blocks]),
        None if loss_of is None else np.array([means.get(block, "loss") for block in blocks]) - means.get(0, "loss"),
    )


def _run(
    model: nn.Module, anatomy: Anatomy, batch: Batch, skipped: int | None, loss_of: LossOf | None, sample: int | None
) -> _Pass:
    found, sampled, entered = _Pass(), SampledTokens(sample), list[Tensor]()

    def hear(visit: Visit, station: str, tokens: Tensor, _source: Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad(), full_precision(tokens):
            here = sampled.of(tokens, visit.real)
            here = here.to(torch.promote_types(here.dtype, torch.float32))
        if station == "input":
            entered[:] = [here]
        elif entered:
            found.last, found.output, found.added[visit.number] = visit, here, here - entered[0]

    with Machine(model, anatomy, leave_out({skipped} if skipped else ()), Listen({"input", "output"}, hear)):
        returned = call(model, batch)
    if loss_of is not None and found.last is not None:
        found.loss = one_number(loss_of(batch, returned, found.last))
    return found


def _moved(now: Tensor, before: Tensor) -> Tensor:
    """The median over tokens of ‖now − before‖ / ‖before‖; a token whose `before` is 0 or not finite is left out."""
    size = torch.linalg.vector_norm(before.double(), dim=-1)
    distance = torch.linalg.vector_norm(now.double() - before.double(), dim=-1)
    return median(torch.where(size > 0, distance / size, torch.nan))
