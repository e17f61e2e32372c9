"""A self-attention network as a sum over paths (Dong, Cordonnier & Loukas 2021, Thm 2.1).

With its attention frozen at what one pass showed, a network of L layers and H heads is linear in its tokens, and its
output is a sum over paths: at each layer a path takes one of the heads, or the skip. Its *length* is the number of
heads on it: C(L, k)H^k paths have length k, (H + 1)^L there are in all.

    SAN(X) = Σ_path P_path X W_path + 1bᵀ,   P_path = P^L_{h_L} ⋯ P^1_{h_1},   W_path = W^1_{h_1} ⋯ W^L_{h_L},

with P_0 = W_0 = I for the skip. `path_terms` sums all paths of each length exactly, whatever their number. The other
reading, in which each path computes its attention anew from its own tokens (the paper's experiments), is not
linear, and its results are not the terms of the theorem: `recomputed_paths`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

LIMIT = 65_536  # paths that are enumerated without being asked for

Path = tuple[int, ...]  # (h_1, …, h_L): a head counted from 1 at each layer, or 0 for the skip


@dataclass(frozen=True)
class FrozenAttention:
    """One attention layer whose attention does not change: X → X·skip + Σ_h P_h (X W_V,h + 1b_V,hᵀ) W_O,h + 1b_Oᵀ."""

    attention: Tensor  # P (…, h, n, n)
    value: Tensor  # W_V (h, d, d_v)
    output: Tensor  # W_O (h, d_v, d)
    value_bias: Tensor | None = None  # (h, d_v)
    output_bias: Tensor | None = None  # (d)
    skip: bool = True  # whether the tokens themselves are added

    def __post_init__(self) -> None:
        p, v, o = (tuple(t.shape) for t in (self.attention, self.value, self.output))
        fits = len(p) > 2 and len(v) == len(o) == 3 and p[-1] == p[-2] and p[-3] == v[0] == o[0] and v[1:] == o[:0:-1]
        if not fits:
            raise ValueError(
                f"expected attention (…, h, n, n), value (h, d, d_v) and output (h, d_v, d), got {p}, {v} and {o}"
            )
        for name, bias, shape in (
            ("value_bias", self.value_bias, (v[0], v[2])),
            ("output_bias", self.output_bias, (v[1],)),
        ):
            if bias is not None and tuple(bias.shape) != shape:
                raise ValueError(f"expected {name} of shape {shape}, got {tuple(bias.shape)}")

    @property
    def heads(self) -> int:
        """How many there are."""
        return self.value.shape[0]

    def head(self, number: int, tokens: Tensor) -> Tensor:
        """P_h X W_h of one head, counted from 1, without biases: (…, n, d)."""
        if not 1 <= number <= self.heads:
            raise ValueError(f"expected a head from 1 to {self.heads}, or 0 for the skip, got {number}")
        h = number - 1
        return self.attention[..., h, :, :] @ (tokens @ self.value[h]) @ self.output[h]

    def all_heads(self, tokens: Tensor) -> Tensor:
        """Σ_h P_h X W_h without biases, of tokens (…, n, d) or of several such matrices at once (k, …, n, d)."""
        values = tokens @ self.value.transpose(0, 1).flatten(1)  # (…, n, h·d_v)
        mixed = self.attention @ values.unflatten(-1, (self.heads, -1)).transpose(-3, -2)  # (…, h, n, d_v)
        return mixed.transpose(-3, -2).flatten(-2) @ self.output.flatten(0, 1)

    def constant(self, like: Tensor) -> Tensor:
        """Σ_h P_h 1b_V,hᵀ W_O,h + 1b_Oᵀ, what does not depend on the tokens: (…, n, d)."""
        made = torch.zeros_like(like)
        if self.value_bias is not None:
            rows = self.attention.sum(dim=-1)  # 1 but for an attention whose sink is no token (…, h, n)
            made = made + torch.einsum(
                "...hn,hd->...nd", rows, (self.value_bias.unsqueeze(-2) @ self.output).squeeze(-2)
            )
        return made if self.output_bias is None else made + self.output_bias


def path_terms(tokens: Tensor, layers: Sequence[FrozenAttention]) -> Tensor:
    """The sum of all paths of each length 0, …, L, and last the constant part 1bᵀ: (L + 2, …, n, d) of (…, n, d).

    They add up to the network's output. By dynamic programming: with A_0 = X, every layer makes
    A_k ← skip·A_k + Σ_h P_h A_{k−1} W_h, and the constant part b ← skip·b + Σ_h P_h b W_h + what its biases add: O(L²)
    applications of a layer, and L + 2 token matrices. Without layers: X and 0. Where a layer has no skip, shorter paths
    end there, and their terms are 0.
    """
    _require_tokens(tokens, layers)
    terms, constant = tokens.unsqueeze(0), torch.zeros_like(tokens)
    for layer in layers:
        zero = torch.zeros_like(tokens).unsqueeze(0)
        moved = layer.all_heads(torch.cat([terms, constant.unsqueeze(0)]))
        longer, of_constant = torch.cat([zero, moved[:-1]]), moved[-1] + layer.constant(tokens)
        terms = longer + torch.cat([terms, zero]) if layer.skip else longer
        constant = of_constant + constant if layer.skip else of_constant
    return torch.cat([terms, constant.unsqueeze(0)])


def path_term(tokens: Tensor, layers: Sequence[FrozenAttention], heads: Sequence[int | None]) -> Tensor:
    """P_path X W_path of the one path (h_1, …, h_L): heads counted from 1, 0 or None for the skip; (…, n, d)."""
    _require_tokens(tokens, layers)
    if len(heads) != len(layers):
        raise ValueError(f"expected a head for each of {len(layers)} layers (0: the skip), got {len(heads)}")
    for place, (layer, head) in enumerate(zip(layers, heads, strict=True), start=1):
        if head:
            tokens = layer.head(head, tokens)
        elif not layer.skip:
            raise ValueError(f"layer {place} has no skip: expected a head from 1 to {layer.heads} there, got {head}")
    return tokens


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
    shares = torch.ones(1, dtype=torch.float64)
    for number in _heads_of_layers(depth, heads):
        longer = torch.zeros(len(shares) + 1, dtype=torch.float64)
        longer[:-1] += shares / (number + 1)
        longer[1:] += shares * (number / (number + 1))
        shares = longer
    return shares


def enumerate_paths(depth: int, heads: int | Sequence[int], *, skip: bool = True, limit: int = LIMIT) -> Iterator[Path]:
    """Every path (h_1, …, h_L) once, in the order of a counter: heads from 1, 0 for the skip.

    More than `limit` are refused.
    """
    widths = _heads_of_layers(depth, heads)
    _refuse_beyond(limit, math.prod(width + skip for width in widths))
    return _counted(widths, skip)


def recomputed_paths(
    tokens: Tensor,
    layers: Sequence[Sequence[Callable[[Tensor], Tensor]]],
    *,
    skips: Sequence[Callable[[Tensor], Tensor] | None] | bool = True,
    limit: int = LIMIT,
) -> Iterator[tuple[Path, Tensor]]:
    """Every path with its own tokens, attention computed anew from them: (path, tokens) one after the other.

    `layers` has for each layer a function for each head, tokens → what the head alone makes of them. `skips` has what
    stands on the skip of each layer, such as a norm; None, or True for all layers: the tokens as they are; False: no
    skips. Paths that begin alike share their beginning: Σ_l H(H + 1)^{l−1} calls instead of L(H + 1)^L, and L token
    matrices at a time. This is not linear: the results do not add up to the network's output. More than `limit` paths
    are refused.
    """
    passing: list[Callable[[Tensor], Tensor] | None]
    if isinstance(skips, bool):
        passing = [None] * len(layers)
    elif len(skips) != len(layers):
        raise ValueError(f"expected what stands on the skip of each of {len(layers)} layers, got {len(skips)}")
    else:
        passing = list(skips)
    has_skip = skips is not False
    _refuse_beyond(limit, math.prod(len(layer) + has_skip for layer in layers))

    def walk(path: Path, tokens: Tensor) -> Iterator[tuple[Path, Tensor]]:
        place = len(path)
        if place == len(layers):
            yield path, tokens
            return
        if has_skip:
            on_skip = passing[place]
            yield from walk((*path, 0), tokens if on_skip is None else on_skip(tokens))
        for number, head in enumerate(layers[place], start=1):
            yield from walk((*path, number), head(tokens))

    return walk((), tokens)


def _counted(widths: Sequence[int], skip: bool, path: Path = ()) -> Iterator[Path]:
    if len(path) == len(widths):
        yield path
        return
    for head in range(0 if skip else 1, widths[len(path)] + 1):
        yield from _counted(widths, skip, (*path, head))


def _heads_of_layers(depth: int, heads: int | Sequence[int]) -> list[int]:
    given = list(heads) if isinstance(heads, Iterable) else [heads]
    if not all(isinstance(number, SupportsIndex) for number in (depth, *given)):
        raise ValueError(f"expected a depth and numbers of heads that are whole, got {depth} and {heads}")
    widths = given if isinstance(heads, Iterable) else given * depth
    if depth < 0 or any(width < 0 for width in widths):
        raise ValueError(f"expected a depth and numbers of heads of at least 0, got {depth} and {heads}")
    if len(widths) != depth:
        raise ValueError(f"expected the number of heads of each of {depth} layers, got {len(widths)} numbers")
    return widths


def _refuse_beyond(limit: int, count: int) -> None:
    if count > limit:
        said = str(count) if count < 10**7 else f"{float(count):.1e}" if count < 10**300 else "more than 1e+300"
        raise ValueError(
            f"{said} paths are more than the limit of {limit}: path_terms sums all paths of each length exactly, "
            "with attention frozen and without enumerating them; or raise limit="
        )


def _require_tokens(tokens: Tensor, layers: Sequence[FrozenAttention]) -> None:
    for place, layer in enumerate(layers, start=1):
        n, d = layer.attention.shape[-1], layer.value.shape[1]
        if tokens.ndim < 2 or tokens.shape[-2:] != (n, d):
            raise ValueError(f"layer {place} takes tokens (…, {n}, {d}), got {tuple(tokens.shape)}")
        given, frozen = tuple(tokens.shape[:-2]), tuple(layer.attention.shape[:-3])
        fits = len(frozen) <= len(given) and all(b in (1, a) for a, b in zip(given[::-1], frozen[::-1], strict=False))
        if not fits:
            raise ValueError(
                f"layer {place} has the attention of sequences {frozen}, which takes tokens {(*frozen, n, d)}, got "
                f"{tuple(tokens.shape)}: expand the tokens, or take the attention of one sequence"
            )
    if not bool(torch.isfinite(tokens).all()):
        raise ValueError("the tokens have entries that are not finite (NaN or infinity): paths of them mean nothing")
