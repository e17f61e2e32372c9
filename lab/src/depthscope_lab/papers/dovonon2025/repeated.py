"""The update of Dovonon et al. 2025 with one attention A and one H in all blocks, X → X + AXH, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from depthscope.measures import frequency_ratio
from depthscope.theory import Dominance, dominance_of, pair_eigenvalues
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


TOKENS, WIDTH = 6, 4


DEPTH = 4096


SETTLED = 0.99  # by what, per block, the strongest that does not dominate is weaker: 1e-18 is left of it at the end


EQUAL = 1e-4  # of ‖HFC‖/‖LFC‖


ALIGNED = 1e-6  # 1 − the least cosine of two tokens


RATE_DEPTHS = (*range(64), *range(64, 1025, 16))


KINDS = ("positive", "negative", "kernel", "multiple", "skew", "any")


# The rows of the paper's table, as the dominating set decides them, and what follows for generic tokens.
MEAN, MEAN_TOO, ONE, LINE, SEVERAL = (
    "the mean alone",
    "the mean and others",
    "one other i",
    "several other i, one j",
    "several other i and j",
)


SETS = (MEAN, ONE, LINE, SEVERAL, MEAN_TOO)


def draw_weights(kind: str, trials: int, seed: tuple[int, ...]) -> Tensor:
    """H of a kind, (trials, d, d). All but "skew" and "any" have real eigenvalues.

    "positive": μ in [0, 1]. "negative": μ in [−1, 0). "kernel": half of μ zero, the others in [−1, −.3]. "multiple":
    H = sI with s in [−3, 1]. "skew": Hᵀ = −H, μ imaginary. "any": independent normal entries.
    """
    if kind in ("positive", "negative", "kernel"):
        sizes = draw_normal(trials, WIDTH, seed=(*seed, 1)).abs().clamp(max=1)
        signed = sizes if kind == "positive" else -sizes
        if kind == "kernel":
            signed = torch.where(torch.arange(WIDTH) < WIDTH // 2, 0.0, signed.clamp(max=-0.3))
        return with_spectrum(signed, (*seed, 2))
    if kind == "multiple":
        scale = torch.linspace(-3, 1, trials, dtype=torch.float64)
        return scale[:, None, None] * torch.eye(WIDTH, dtype=torch.float64)
    h = draw_normal(trials, WIDTH, WIDTH, seed=(*seed, 1))
    return h - h.mT if kind == "skew" else h


def cases(trials: int, seed: tuple[int, ...]) -> pd.DataFrame:
    """One row per case, `trials` of each kind of H and of A: the dominating set, what it says, and what was seen.

    `settled` is False where `DEPTH` blocks are too few for the largest eigenvalue to show. `rate` is the factor per
    block of ‖HFC‖/‖LFC‖, `limit` where that ends if one mode of A dominates: at this mode's own ratio. Neither is said
    where the other is.
    """
    kinds = [(kind, attention) for kind in KINDS for attention in ATTENTIONS]
    seeds = [(*seed, number) for number in range(len(kinds))]
    a = torch.cat([draw_attention(kind, trials, TOKENS, (*s, 0)) for (_, kind), s in zip(kinds, seeds, strict=True)])
    h = torch.cat([draw_weights(kind, trials, s) for (kind, _), s in zip(kinds, seeds, strict=True)])
    start = draw_normal(len(a), TOKENS, WIDTH, seed=seed)
    *curves, end = repeat(attend(a, h), start, (*RATE_DEPTHS, DEPTH), rescale=True)
    seen_rate = measured_rate(RATE_DEPTHS, torch.stack([frequency_ratio(x) for x in curves]))
    sigma = torch.linalg.svdvals(end)
    pairs = list(zip(a, h, strict=True))
    said = [dominance_of(*pair) for pair in pairs]
    frame = pd.DataFrame(
        {
            "kind": [kind for kind, _ in kinds for _ in range(trials)],
            "attention": [attention for _, attention in kinds for _ in range(trials)],
            "dominating": [dominating_set(one) for one in said],
            "input_said": [one.input_convergence for one in said],
            "angle_said": [one.angle_convergence for one in said],
            "rank_said": [-1 if one.rank is None else one.rank for one in said],
            "rate_said": [one.rate if one.input_convergence else torch.nan for one in said],
            "limit_said": [_limit(one, matrix) for one, matrix in zip(said, a, strict=True)],
            "input_seen": (frequency_ratio(end) < EQUAL).numpy(),
            "angle_seen": _aligned(end).numpy(),
            "rank_seen": (sigma > ALIGNED * sigma[:, :1]).sum(dim=1).numpy(),
            "rate_seen": seen_rate.numpy(),
            "limit_seen": frequency_ratio(end).numpy(),
            "settled": [_is_settled(*pair) for pair in pairs],
            "real_spectra": [_are_real(*pair) for pair in pairs],
        }
    )
    # Where the theory says nothing (angle None, rank −1) anything agrees.
    angle = frame["angle_said"].isna() | (frame["angle_said"] == frame["angle_seen"])
    rank = (frame["rank_said"] < 0) | (frame["rank_said"] == frame["rank_seen"])
    return frame.assign(agrees=(frame["input_said"] == frame["input_seen"]) & angle & rank)


def _limit(said: Dominance, a: Tensor) -> float:
    """‖HFC‖/‖LFC‖ of the one mode of A that dominates, if it is not the mean; its eigenvalue is then real."""
    if dominating_set(said) != ONE:
        return torch.nan
    values, vectors = torch.linalg.eig(a)
    mode = vectors[:, (values - 1).abs().argsort()[said.pairs[0][0]]].real
    return frequency_ratio(mode[:, None]).item()


def dominating_set(said: Dominance) -> str:
    """Which row of the table a case belongs to."""
    rows, columns = {i for i, _ in said.pairs}, {j for _, j in said.pairs}
    if 0 in rows:
        return MEAN if len(rows) == 1 else MEAN_TOO
    return ONE if len(rows) == 1 else LINE if len(columns) == 1 else SEVERAL


def _aligned(tokens: Tensor) -> Tensor:
    """Whether all tokens point one way. One that has vanished beside the others points nowhere."""
    directions = tokens / torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
    return (directions @ directions.mT).flatten(1).amin(dim=1) > 1 - ALIGNED


def _is_settled(a: Tensor, h: Tensor) -> bool:
    moduli = pair_eigenvalues(torch.linalg.eigvals(a), torch.linalg.eigvals(h)).abs().flatten()
    below = moduli[moduli < (1 - 1e-7) * moduli.max()]
    return not len(below) or bool(below.max() < SETTLED * moduli.max())


def _are_real(a: Tensor, h: Tensor) -> bool:
    return all(torch.linalg.eigvals(matrix).imag.abs().max().item() < 1e-9 for matrix in (a, h))
