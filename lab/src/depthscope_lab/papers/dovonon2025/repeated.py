"""The update of Dovonon et al. 2025 with one attention A and one H in all blocks, X → X + AXH, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from depthscope.measures import frequency_ratio
from depthscope_lab.papers.simulation.randomness import generators

F64 = torch.float64
Kind = Literal["similar", "free", "causal"]
ATTENTIONS: tuple[Kind, ...] = ("similar", "free", "causal")
RANGE = 1e-12  # of ‖HFC‖/‖LFC‖, and its inverse: beyond it one of the two is rounding noise of the other


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


def attend(attention: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
    """X → X + AXH."""
    return lambda x: x + attention @ x @ weights


def repeat(step: Callable[[Tensor], Tensor], tokens: Tensor, depths: Sequence[int], *, rescale: bool) -> list[Tensor]:
    """The tokens (trials, n, d) behind each of these depths, which ascend.

    `rescale`: to unit norm behind every 8 blocks, which a linear step allows: nothing overflows, and ratios stay.
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


def ratios(step: Callable[[Tensor], Tensor], tokens: Tensor, depths: Sequence[int]) -> Tensor:
    """‖HFC‖/‖LFC‖ behind each depth, (depths, trials), under a linear step."""
    return torch.stack([frequency_ratio(x) for x in repeat(step, tokens, depths, rescale=True)])


def measured_rate(depths: Sequence[int], found: Tensor) -> Tensor:
    """The factor per block of ‖HFC‖/‖LFC‖ (depths, trials), by least squares over the later half of what can be seen.

    A curve can be seen as long as it is within `RANGE` and its inverse. nan where fewer than 4 depths are left.
    """
    rates = torch.full(found.shape[1:], torch.nan, dtype=F64)
    for trial, curve in enumerate(found.unbind(dim=1)):
        seen = ((curve > RANGE) & (curve < 1 / RANGE)).int().cumprod(dim=0).bool()
        kept = torch.nonzero(seen).flatten()
        kept = kept[len(kept) // 2 :]
        if len(kept) >= 4:
            at = torch.tensor(depths, dtype=F64)[kept]
            logs = curve[kept].to(F64).log()
            centred = at - at.mean()
            rates[trial] = ((centred * logs).sum() / centred.square().sum()).exp()
    return rates
