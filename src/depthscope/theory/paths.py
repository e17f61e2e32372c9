"""A self-attention network as a sum over paths (Dong, Cordonnier & Loukas 2021, Thm 2.1).

With its attention frozen at what one pass showed, a network of L layers and H heads is linear in its tokens, and its
output is a sum over paths: at each layer a path takes one of the heads, or the skip. Its *length* is the number of
heads on it: C(L, k)H^k paths have length k, (H + 1)^L there are in all.

    SAN(X) = Σ_path P_path X W_path + 1bᵀ,   P_path = P^L_{h_L} ⋯ P^1_{h_1},   W_path = W^1_{h_1} ⋯ W^L_{h_L},

with P_0 = W_0 = I for the skip. `depthscope.paths` sums all paths of each length exactly, in any model, whatever their
number. The other reading, in which each path computes its attention anew from its own tokens (the paper's
experiments), is not linear, and its results are not the terms of the theorem: `recomputed_paths`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

LIMIT = 65_536  # paths that are computed without being asked for

Path = tuple[int, ...]  # (h_1, …, h_L): a head counted from 1 at each layer, or 0 for the skip


def path_counts(depth: int, heads: int | Sequence[int]) -> tuple[int, ...]:
    """How many paths have length 0, …, L: C(L, k)H^k, exact integers.

    Where layers have different numbers of heads, a list of them: the coefficients of Π_l (1 + H_l z).
    """
    counts = [1]
    for number in _heads_of_layers(depth, heads):
        counts = [a + number * b for a, b in zip([*counts, 0], [0, *counts], strict=True)]
    return tuple(counts)


def path_length_shares(depth: int, heads: int | Sequence[int]) -> Tensor:
    """The share of each length among all paths, (L + 1) in float64: Binomial(L, H/(H + 1)).

    With a number of heads for each layer: the law of a sum of independent Bernoulli(H_l/(H_l + 1)). Only products and
    sums of positive numbers, so that the smallest shares have all their digits.
    """
    shares, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for number in _heads_of_layers(depth, heads):
        shares = torch.cat([shares / (number + 1), zero]) + torch.cat([zero, shares * (number / (number + 1))])
    return shares


def _heads_of_layers(depth: int, heads: int | Sequence[int]) -> list[int]:
    of_layers = list(heads) if isinstance(heads, Iterable) else [heads]
    if not all(isinstance(number, SupportsIndex) for number in (depth, *of_layers)):
        raise ValueError(f"expected a depth and numbers of heads that are whole, got {depth} and {heads}")
    widths = of_layers if isinstance(heads, Iterable) else of_layers * depth
    if depth < 0 or any(width < 0 for width in widths):
        raise ValueError(f"expected a depth and numbers of heads of at least 0, got {depth} and {heads}")
    if len(widths) != depth:
        raise ValueError(f"expected the number of heads of each of {depth} layers, got {len(widths)} numbers")
    return widths


def recomputed_paths(
    tokens: Tensor, layers: Sequence[Sequence[Callable[[Tensor], Tensor]]], *, limit: int = LIMIT
) -> Iterator[tuple[Path, Tensor]]:
    """Every path with its own tokens, attention computed anew from them: (path, tokens) one after the other.

    `layers` has for each layer a function for each head, tokens → what the head alone makes of them; a skip passes the
    tokens as they are. Paths that begin alike share their beginning: Σ_l H(H + 1)^{l−1} calls instead of L(H + 1)^L,
    and L token matrices at a time. This is not linear: the results do not add up to the network's output. More than
    `limit` paths are refused.
    """
    count = math.prod(len(layer) + 1 for layer in layers)
    if count > limit:
        number = str(count) if count < 10**7 else f"{float(count):.1e}" if count < 10**300 else "more than 1e+300"
        raise ValueError(f"{number} paths are more than the limit of {limit}: raise limit= to compute them all")

    def walk(path: Path, tokens: Tensor) -> Iterator[tuple[Path, Tensor]]:
        if len(path) == len(layers):
            yield path, tokens
            return
        yield from walk((*path, 0), tokens)
        for number, head in enumerate(layers[len(path)], start=1):
            yield from walk((*path, number), head(tokens))

    return walk((), tokens)
