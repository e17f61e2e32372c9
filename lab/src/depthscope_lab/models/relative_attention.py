"""Attention by relative position over [memory; segment] (Dai et al. 2019, §3.3).

score_ij = [(q_i + u)·k_j + (q_i + v)·W_R R_{i−j}] / √d_head, u and v shared by all blocks

The second term is the attention's bias. Its gradient is needed in training, which no fused kernel gives:
PyTorch then takes its unfused path, and the (n, m + n) matrix of every head exists. Without gradients the
same call is fused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Place(NamedTuple):
    """Where the tokens of a segment stand to those before them: the same for all blocks."""

    encodings: Tensor  # (1 + m + n, d): a row of zeros, then R for the distances m + n − 1 … 0
    hidden: Tensor  # (n, m + n): −inf where a token may not look, else 0
    u: Tensor  # (h, d/h)
    v: Tensor  # (h, d/h)


def sinusoids(distances: Tensor, width: int) -> Tensor:
    """R = [sin(t ω); cos(t ω)], ω_k = 10000^(−2k/d): distances (m,) → (m, d)."""
    half = torch.arange(0, width, 2, device=distances.device, dtype=distances.dtype)
    angles = distances[:, None] * torch.pow(10000.0, -half / width)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def shift_by_row(padded: Tensor) -> Tensor:
    """Turns scores by distance into scores by key, without a copy: (…, n, 1 + m) → (…, n, m).

    Column 1 + c of row i belongs to the distance m − 1 − c; the key j of row i is i − j + m − n away, which
    is column 1 + n − 1 − i + j: read as one long line, n entries are skipped and rows are one shorter.
    Entries for keys after the token are meaningless; they are hidden later.
    """
    n, m = padded.shape[-2], padded.shape[-1] - 1
    return padded.flatten(-2)[..., n:].unflatten(-1, (n, m))


class RelativeAttention(nn.Module):
    """Multi-head attention of a segment over itself and what was before it. No biases, as in the authors' code."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"expected heads that divide the width, got width {width} and {heads} heads")
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.query, self.key, self.value, self.position, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )

    def forward(self, x: Tensor, past: Tensor, place: Place) -> Tensor:
        """x (batch, n, d), past (batch, m, d) → (batch, n, d)."""
        seen = torch.cat([past, x], dim=1) if past.shape[1] else x  # (batch, m + n, d)
        q, k, v = (self._split(tokens) for tokens in (self.query(x), self.key(seen), self.value(seen)))
        r = self._split(self.position(place.encodings))  # (h, 1 + m + n, d/h)
        by_distance = (q + place.v[:, None]) * self.scale @ r.mT  # (batch, h, n, 1 + m + n)
        bias = shift_by_row(by_distance) + place.hidden
        y = F.scaled_dot_product_attention(q + place.u[:, None], k, v, attn_mask=bias, scale=self.scale)
        return self.output(y.transpose(-3, -2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)  # (…, h, n, d/h)
