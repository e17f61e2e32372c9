"""What one sweep over the rows of an attention matrix finds out; the matrix itself is never there.

A sweep makes P once, some rows at a time (`AttentionOperator.tiles`), at the cost of one attention pass; memory is
O(n). Attention is that of one head, (batch, n, m); `real` (batch, n) is true for real tokens: rows and, of a square P,
columns of padding are left out.

What a head gives to the first token: with more than `SINK_MASS` it is a *sink head* (Gu et al. 2024, arXiv 2410.10781;
the sink rate of 2510.06477 is the share of such heads). The largest attention logit is what grows when training becomes
unstable (Dehghani et al. 2023, arXiv 2302.05442).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.operators import AttentionOperator, ScoredAttention, Tile

SINK_MASS = 0.3  # Gu et al. 2024, §3: no head at initialisation passes it, and sink heads give 0.5 and more


@dataclass(frozen=True)
class Survey:
    """What one sweep finds out. All but `peaks`, `triangular` and `real` are float64."""

    mean_row: Tensor  # p̄ (batch, m): the attention that each token draws
    spread: Tensor  # ‖Π⊥P‖_F (batch,); nan where an entry is not finite, or no token real
    entropy: Tensor  # (batch,): the mean over the real rows of −Σ_j p_ij log p_ij; nan where spread is
    peaks: Tensor | None  # (batch, n): the largest number that the softmax of each row read; None if it was not seen
    diagonal: Tensor  # (batch, n), of a square matrix
    triangular: Tensor  # (batch,), bool: whether no token attends to a later one
    real: Tensor  # (batch, n), bool


def survey(attention: AttentionOperator, real: Tensor | None = None) -> Survey:
    """One sweep; takes cross-attention too, which has no diagonal.

    Rows may be nearly equal, so each is compared with the first real one, in float64: equal rows have no spread at all.
    ‖Π⊥P‖² = Σ‖p_i − p_1‖² − ‖Σ(p_i − p_1)‖²/n, which loses a factor n of float64's precision at most.
    """
    *batch, n, m = attention.shape
    if n == 0:
        raise ValueError(f"expected attention with at least one query, got shape {tuple(attention.shape)}")
    is_causal = isinstance(attention, ScoredAttention) and attention.causal
    peaks: list[Tensor] = []
    for tile in attention.tiles():
        here = slice(tile.first, tile.last)
        if tile.first == 0:
            device = tile.rows.device
            rows_real = torch.ones((*batch, n), dtype=torch.bool, device=device) if real is None else real.to(device)
            first, total, diagonal = (
                torch.zeros((*batch, size), dtype=torch.float64, device=device) for size in (m, m, n)
            )
            squares, entropy = (torch.zeros(batch, dtype=torch.float64, device=device) for _ in range(2))
            triangular = torch.full(batch, n == m, dtype=torch.bool, device=device)
        own = rows_real[..., here]  # (batch, rows)
        if (of_tile := tile.peaks) is not None:
            peaks.append(of_tile)
        # Of whole rows, also where a model looks at what the user calls padding.
        entropy += torch.where(own, row_entropies(tile), 0.0).sum(dim=-1)
        rows = tile.rows.double()
        if real is not None:
            kept = own[..., None] & rows_real[..., None, : tile.seen] if n == m else own[..., None]
            rows = torch.where(kept, rows, 0.0)
        if n == m:
            diagonal[..., here] = rows.diagonal(offset=tile.first, dim1=-2, dim2=-1)
            if not is_causal:
                triangular &= ~rows[..., tile.first :].triu(1).flatten(-2).any(dim=-1)
        begins = own.any(dim=-1) & ~rows_real[..., : tile.first].any(dim=-1)
        index = own.int().argmax(dim=-1)[..., None, None].expand(*batch, 1, tile.seen)
        candidate = rows.gather(-2, index).squeeze(-2)
        first[..., : tile.seen] = torch.where(begins.unsqueeze(-1), candidate, first[..., : tile.seen])
        apart = torch.where(own.unsqueeze(-1), rows - first[..., None, : tile.seen], 0.0)
        total[..., : tile.seen] += apart.sum(dim=-2)
        squares += apart.square().sum(dim=(-2, -1))
    count = rows_real.sum(dim=-1).double()
    usable = (count > 0) & squares.isfinite()
    mean = total / count.clamp(min=1).unsqueeze(-1)
    spread = (squares - count * mean.square().sum(dim=-1)).clamp(min=0).sqrt()
    return Survey(
        first + mean,
        torch.where(usable, spread, torch.nan),
        torch.where(usable, entropy / count, torch.nan),
        torch.cat(peaks, dim=-1) if peaks else None,
        diagonal,
        triangular,
        rows_real,
    )


def row_entropies(tile: Tile) -> Tensor:
    """−Σ_j p_ij log p_ij of the rows of a tile, float64, (…, rows).

    Where the scores s are at hand, as Σ_j p_ij (t_i − s_ij) + log Z_i with the largest score t_i, whose p_ij is 1/Z_i:
    all of it is positive, and there is one logarithm in a row, not one in every entry.
    """
    rows, scores, peaks = tile.rows, tile.scores, tile.peaks
    if scores is None or peaks is None:
        return torch.special.entr(rows).sum(dim=-1, dtype=torch.float64)
    below = (peaks.unsqueeze(-1) - scores).masked_fill_(rows == 0, 0.0)  # where a query may not look: 0 · ∞
    spent = (rows.unsqueeze(-2) @ below.unsqueeze(-1)).squeeze(-1).squeeze(-1)
    return spent.double() - rows.amax(dim=-1).double().log()


class FirstToken(NamedTuple):
    """Of one head, float64, (batch): nan where there is nothing to say."""

    mass: Tensor  # mean over the real queries but the first of what they give to the first real token
    largest_logit: Tensor  # over real queries and what they may look at; nan if the scores were not seen


def first_token(attention: AttentionOperator, real: Tensor | None = None, scores: Tensor | None = None) -> FirstToken:
    """Both numbers of one head (batch, n, n) in one sweep, some rows at a time.

    `scores` (batch, n, n) is what an eager softmax read; a `ScoredAttention` makes its own. The first query is left out
    of the mass: in a causal model it can look at nothing but itself. With fewer than two real tokens there is no mass.
    """
    batch, n, m = attention.shape
    if n != m:
        raise ValueError(f"expected the attention of tokens to each other (batch, n, n), got {(batch, n, m)}")
    device = attention.key.device if isinstance(attention, ScoredAttention) else attention.dense().device
    rows = torch.ones((batch, n), dtype=torch.bool, device=device) if real is None else (real != 0).to(device)
    first, counted = rows.int().argmax(dim=-1), rows & (rows.cumsum(dim=-1) > 1)
    mass = torch.zeros(batch, dtype=torch.float64, device=device)
    peaks = [] if scores is None else [scores.amax(dim=-1)]
    for tile in attention.tiles():
        column = first.clamp(max=tile.seen - 1)[:, None, None].expand(batch, tile.last - tile.first, 1)
        share = tile.rows.gather(-1, column).squeeze(-1).double()
        mass += torch.where(counted[:, tile.first : tile.last], share, 0.0).sum(dim=-1)
        if scores is None and (of_tile := tile.peaks) is not None:
            peaks.append(of_tile)
    many = counted.sum(dim=-1)
    return FirstToken(
        mass=torch.where(many > 0, mass / many.clamp(min=1), torch.nan),
        largest_logit=largest_logit(torch.cat(peaks, dim=-1), rows) if peaks else torch.full_like(mass, torch.nan),
    )


def row_peaks(attention: AttentionOperator, scores: Tensor | None = None) -> Tensor | None:
    """The largest number that the softmax of each query reads, (batch, n); None where the scores were not seen."""
    if scores is not None:
        return scores.amax(dim=-1)
    return attention.peaks() if isinstance(attention, ScoredAttention) else None


def largest_logit(peaks: Tensor, real: Tensor | None = None) -> Tensor:
    """The largest of the rows' peaks (batch, n) over the real queries; nan where none may look anywhere."""
    peaks = peaks.double()
    if real is not None:
        peaks = torch.where(real.to(peaks.device) != 0, peaks, -torch.inf)
    largest = peaks.amax(dim=-1)
    return torch.where(largest.isfinite(), largest, torch.nan)
