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
from depthscope.hooks import Ablation, Listen, Machine, Visit, undisturbed
from depthscope.measures import composite_norm, composite_residual
from depthscope_lab.papers.subjects import as_batch

VARIANTS = ("SAN", "SAN+MLP", "SAN+skip", "full")


def left_out(family: str, variant: str) -> tuple[str, ...]:
    """What is left out of a model of this family to make it this variant, as in the authors' code."""
    no_mlp = ("ffn_linears",) if family == "albert" else ("ffn_step",)
    skip = () if variant in ("SAN+skip", "full") else ("attention_skip",)
    return skip + (() if variant in ("SAN+MLP", "full") else no_mlp)


class Residuals(NamedTuple):
    """y of blocks 0 … L, each (L + 1, samples); block 0 is what enters block 1."""

    plain: Tensor  # as the authors' code computes it, in the model's own precision
    exact: Tensor  # of the same tokens, without rounding of our own


def plain_residual(x: Tensor) -> Tensor:
    """y as in the authors' code: the mean is rounded, and equal tokens keep a residual of some machine epsilons."""
    return composite_norm(x - x.mean(dim=-2, keepdim=True)) / composite_norm(x)


def residuals_of(model: nn.Module, ids: Tensor, without: tuple[str, ...] = (), batch: int = 4) -> Residuals:
    """y of every block of a model that reads ids (samples, n), without these parts of its blocks."""
    anatomy = anatomy_of(model)
    passes: list[list[tuple[Tensor, Tensor]]] = []

    def see(visit: Visit, station: str, tokens: Tensor, _source: Tensor) -> None:
        if station == "output" or visit.number == 1:
            passes[-1].append((plain_residual(tokens).double(), composite_residual(tokens)))

    cut: Any = Ablation(model, anatomy, without) if without else nullcontext()
    with undisturbed(model), cut, Machine(model, anatomy, Listen({"input", "output"}, see)):
        for part in ids.split(batch):
            passes.append([])
            model(**as_batch(part))
    by_measure = ([torch.stack(found) for found in zip(*blocks, strict=True)] for blocks in passes)
    return Residuals(*(torch.cat(found, dim=1) for found in zip(*by_measure, strict=True)))
