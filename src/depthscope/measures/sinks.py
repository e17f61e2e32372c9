"""What a head gives to the first token, and the largest number that its softmax reads; without the n × n matrix.

A head that gives more than `SINK_MASS` of its attention to the first token is a *sink head* (Gu et al. 2024, arXiv
2410.10781; the sink rate of 2510.06477 is the share of such heads). The largest attention logit is what grows when
training becomes unstable (Dehghani et al. 2023, arXiv 2302.05442).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.heads import scored
from depthscope.measures.operators import AttentionOperator

SINK_MASS = 0.3  # Gu et al. 2024, §3: no head at initialisation passes it, and sink heads give 0.5 and more


class FirstToken(NamedTuple):
    """Of one head, float64, (batch): nan where there is nothing to say."""

    mass: Tensor  # mean over the real queries but the first of what they give to the first real token
    largest_logit: Tensor  # over real queries and what they may look at; nan if the scores were not seen


def first_token(attention: AttentionOperator, real: Tensor | None = None, scores: Tensor | None = None) -> FirstToken:
    """Both numbers of one head (batch, n, n) in one sweep, some rows at a time.

    `real` (batch, n) is true for real tokens. `scores` (batch, n, n) is what an eager softmax read; a `ScoredAttention`
    makes its own. The first query is left out of the mass: in a causal model it can look at nothing but itself. With
    fewer than two real tokens there is no mass.
    """
    batch, n, m = attention.shape
    if n != m:
        raise ValueError(f"expected the attention of tokens to each other (batch, n, n), got {(batch, n, m)}")
    rows = _real_rows(attention, real)
    first, counted = rows.int().argmax(dim=-1), rows & (rows.cumsum(dim=-1) > 1)
    total = torch.zeros(batch, dtype=torch.float64, device=rows.device)
    peaks = torch.full((batch, n), torch.nan, dtype=torch.float64, device=rows.device)
    if scores is not None:
        peaks[:] = scores.amax(dim=-1)
    for tile in attention.tiles():
        here = slice(tile.first, tile.last)
        column = first.clamp(max=tile.seen - 1)[:, None, None].expand(batch, tile.last - tile.first, 1)
        share = tile.rows.gather(-1, column).squeeze(-1)
        total += torch.where(counted[:, here], share.double(), 0.0).sum(dim=-1)
        if scores is None and (of_tile := tile.peaks) is not None:
            peaks[:, here] = of_tile.double()
    many = counted.sum(dim=-1)
    return FirstToken(
        mass=torch.where(many > 0, total / many.clamp(min=1), torch.nan),
        largest_logit=largest_logit(peaks, rows),
    )


def row_peaks(attention: AttentionOperator, scores: Tensor | None = None) -> Tensor | None:
    """The largest number that the softmax of each query reads, (batch, n); None where the scores were not seen."""
    if scores is not None:
        return scores.amax(dim=-1)
    made_of = scored(attention)
    return None if made_of is None else made_of.peaks()


def largest_logit(peaks: Tensor, real: Tensor | None = None) -> Tensor:
    """The largest of the rows' peaks (batch, n) over the real queries; nan where none may look anywhere."""
    peaks = peaks.double()
    if real is not None:
        peaks = torch.where(real.to(peaks.device) != 0, peaks, -torch.inf)
    largest = peaks.amax(dim=-1)
    return torch.where(largest.isfinite(), largest, torch.nan)


def _real_rows(attention: AttentionOperator, real: Tensor | None) -> Tensor:
    """Which queries are real, (batch, n)."""
    made_of = scored(attention)
    device = attention.dense().device if made_of is None else made_of.key.device
    return torch.ones(attention.shape[:-1], dtype=torch.bool, device=device) if real is None else (real != 0).to(device)
