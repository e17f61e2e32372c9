"""One layer again and again, with one attention A and one H in all blocks: what is drawn for it, and its repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from depthscope_lab.papers.simulation.randomness import generators

F64 = torch.float64
Kind = Literal["similar", "free", "causal"]


def draw_normal(*shape: int, seed: tuple[int, ...]) -> Tensor:
    (stream,) = generators(seed, 1)
    return torch.from_numpy(stream.standard_normal(shape))


def draw_attention(kind: Kind, trials: int, tokens: int, seed: tuple[int, ...]) -> Tensor:
    """Row-stochastic matrices (trials, n, n), all positive where the future is seen.

    "similar": softmax(XXᵀ/√d) of random tokens with d = 8. It is similar to a positive semidefinite matrix, so that its
    eigenvalues are real, in [0, 1]. "free": the softmax of independent normal scores of deviation 2, whose eigenvalues
    are complex. "causal": the same over earlier tokens, whose eigenvalues are its diagonal.
    """
    if kind == "similar":
        x = draw_normal(trials, tokens, 8, seed=seed)
        return (x @ x.mT / 8**0.5).softmax(dim=-1)
    scores = 2 * draw_normal(trials, tokens, tokens, seed=seed)
    if kind == "causal":
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    return scores.softmax(dim=-1)


def with_spectrum(eigenvalues: Tensor, seed: tuple[int, ...]) -> Tensor:
    """Symmetric matrices QΛQᵀ (trials, d, d) with these real eigenvalues (trials, d), Q drawn anew for each."""
    basis = torch.linalg.qr(draw_normal(*eigenvalues.shape, eigenvalues.shape[-1], seed=seed)).Q
    return basis @ torch.diag_embed(eigenvalues) @ basis.mT


def repeat(step: Callable[[Tensor], Tensor], tokens: Tensor, depths: Sequence[int], *, rescale: bool) -> list[Tensor]:
    """The tokens (trials, n, d) after each of these depths, which ascend.

    `rescale`: to unit norm after every 8 blocks, which a linear step allows: nothing overflows, and ratios stay.
    """
    found, x, at = [], tokens, 0
    for depth in depths:
        for block in range(at + 1, depth + 1):
            x = step(x)
            if rescale and block % 8 == 0:
                norm = torch.linalg.matrix_norm(x, keepdim=True)
                x = x / torch.where(norm > 0, norm, 1)
        found.append(x)
        at = depth
    return found
