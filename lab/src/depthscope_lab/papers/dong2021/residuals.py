"""What is left of the tokens beside their mean, block by block, in a model with or without parts of its blocks.

y = ‖X − 1x̄ᵀ‖_{1,∞} / ‖X‖_{1,∞} with the composite norm ‖A‖_{1,∞} = √(‖A‖₁‖A‖_∞) and x̄ the mean of the tokens, which
is what Dong et al. plot (their theorems have the best x in its place).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.anatomy import anatomy_of
from depthscope.measures import composite_norm, composite_residual
from depthscope.passes import Listen, Machine, Surgery, Visit, undisturbed
from depthscope.progress import Tick


class Residuals(NamedTuple):
    """y of blocks 0 … L, each (L + 1, samples); block 0 is what enters block 1."""

    plain: Tensor  # as the authors' code computes it, in the model's own precision
    exact: Tensor  # of the same tokens, without rounding of our own


def plain_residual(x: Tensor) -> Tensor:
    """y as in the authors' code: the mean is rounded, and equal tokens keep a residual of some machine epsilons."""
    return composite_norm(x - x.mean(dim=-2, keepdim=True)) / composite_norm(x)


def residuals_of(
    model: nn.Module, ids: Tensor, without: tuple[str, ...] = (), batch: int = 4, tick: Tick = lambda: None
) -> Residuals:
    """y of every block of a model that reads ids (samples, n), without these parts of its blocks."""
    anatomy = anatomy_of(model)
    rows: list[list[tuple[Tensor, Tensor]]] = []

    def see(visit: Visit, station: str, tokens: Tensor, _source: Tensor) -> None:
        if station == "output" or visit.number == 1:
            rows[-1].append((plain_residual(tokens).double(), composite_residual(tokens)))

    cut = Surgery(model, anatomy, without) if without else nullcontext()
    with undisturbed(model), cut, Machine(model, anatomy, Listen({"input", "output"}, see)):
        for part in ids.split(batch):
            rows.append([])
            call: Any = {"input_ids": part, "attention_mask": torch.ones_like(part)}
            model(**call)
            tick()
    plain, exact = (
        torch.cat([torch.stack([pair[place] for pair in batch_rows]) for batch_rows in rows], dim=1) for place in (0, 1)
    )
    return Residuals(plain, exact)
