"""What a head gives to the first token, and the largest number that its softmax reads; without the n × n matrix.

A head that gives more than `SINK_MASS` of its attention to the first token is a *sink head* (Gu et al. 2024, arXiv
2410.10781; the sink rate of 2510.06477 is the share of such heads). The largest attention logit is what grows when
training becomes unstable (Dehghani et al. 2023, arXiv 2302.05442).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.operators import AttentionOperator, ScoredAttention

SINK_MASS = 0.3  # Gu et al. 2024, §3: no head at initialisation passes it, and sink heads give 0.5 and more


class FirstToken(NamedTuple):
    """Of one head, float64, (batch): nan where there is nothing to say."""

    mass: Tensor  # mean over the real queries but the first of what they give to the first real token
    largest_logit: Tensor  # over real queries and what they may look at; nan if the scores were not seen


def first_token(attention: AttentionOperator, real: Tensor | None = None, scores: Tensor | None = None) -> FirstToken:
    """Both numbers of one head (batch, n, n) in one go, some rows at a time.

    `real` (batch, n) is true for real tokens. `scores` (batch, n, n) is what an eager softmax read; a `ScoredAttention`
    makes its own. The first query is left out of the mass: in a causal model it can look at nothing but itself. With
    fewer than two real tokens there is no mass.
    """
    batch, n, m = attention.shape
    if n != m:
        raise ValueError(f"expected the attention of tokens to each other (batch, n, n), got {(batch, n, m)}")
    first, counted, rows = _places(real, batch, n, attention)
    total = torch.zeros(batch, dtype=torch.float64, device=first.device)
    largest = torch.full((batch,), -torch.inf, dtype=torch.float64, device=first.device)
    seen = isinstance(attention, ScoredAttention) or scores is not None
    pieces = attention.pieces() if isinstance(attention, ScoredAttention) else [(0, n)]
    for begin, end in pieces:
        column = first[:, None, None].expand(batch, end - begin, 1)
        if isinstance(attention, ScoredAttention):
            read = attention.scores(begin, end)
            peak = read.amax(dim=-1)  # (batch, rows)
            safe = torch.where(peak.isfinite(), peak, 0.0)
            to_first = (read.gather(-1, column).squeeze(-1) - safe).exp()
            share = to_first / read.sub_(safe.unsqueeze(-1)).exp_().sum(dim=-1)
        else:
            share = attention.dense().gather(-1, column).squeeze(-1)
            peak = share if scores is None else scores.amax(dim=-1)
        total += torch.where(counted[:, begin:end], share.double(), 0.0).sum(dim=-1)
        if seen:
            highest = torch.where(rows[:, begin:end], peak.double(), -torch.inf).amax(dim=-1)
            largest = torch.maximum(largest, highest)
    many = counted.sum(dim=-1)
    return FirstToken(
        mass=torch.where(many > 0, total / many.clamp(min=1), torch.nan),
        largest_logit=torch.where(largest.isfinite(), largest, torch.nan),
    )


def _places(real: Tensor | None, batch: int, n: int, attention: AttentionOperator) -> tuple[Tensor, Tensor, Tensor]:
    """The first real token (batch), the queries that are counted and those that are real (batch, n)."""
    device = attention.key.device if isinstance(attention, ScoredAttention) else attention.dense().device
    rows = torch.ones(batch, n, dtype=torch.bool, device=device) if real is None else (real != 0).to(device)
    return rows.int().argmax(dim=-1), rows & (rows.cumsum(dim=-1) > 1), rows
