"""A trained network taken apart by length of path, in the two ways that are both called "paths".

*Frozen*: attention, the scales of the norms and the gates of the FFN stay as they are in the whole network. All is
linear then, and the sums over all paths of each length are the terms of Thm 2.1: with the constant part that the biases
make they add up to what leaves the last block (`frozen_terms`).

*Recomputed*: what the authors' code evaluates. Every path is a network of its own, which computes its attention and its
norms from its own tokens (`recomputed_sums`); these are no terms of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.attention_paths import paths
from depthscope.models import Block
from depthscope.theory import recomputed_paths
from depthscope_lab.papers.dong2021.path_model import Network


@torch.no_grad()
def frozen_terms(network: Network, inputs: Tensor) -> Tensor:
    """The sum of all paths of each length 0, …, L, and last the constant part: (L + 2, batch, n, d)."""
    terms = paths(network.encoder, network.embed(inputs), keep_terms=True).terms
    assert terms is not None
    return terms


def plain_norm(x: Tensor) -> Tensor:
    """LayerNorm without learnt weights: what the authors put behind each head of a path and behind the sum."""
    return F.layer_norm(x, x.shape[-1:])


def alone(block: Block, head: int, x: Tensor) -> Tensor:
    """What one head (from 1) makes of a path's own tokens in the authors' evaluation: no skip, and a norm of its own.

    plain_norm(P_h(x)(xW_V,h + b_V,h)W_O,h + b_O), and the block's FFN with its skip and norm, if there is one.
    """
    attention = block.attention
    own = slice((head - 1) * (size := x.shape[-1] // attention.heads), head * size)
    assert isinstance(attention.output, nn.Linear)
    q, k, v = (
        F.linear(x, project.weight[own], project.bias[own])
        for project in (attention.query, attention.key, attention.value)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, scale=attention.scale)
    y = plain_norm(F.linear(mixed, attention.output.weight[:, own], attention.output.bias))
    return y if isinstance(block.ffn, nn.Identity) else block.norm2(y + block.ffn(y))


def _steps(network: Network) -> list[list[Callable[[Tensor], Tensor]]]:
    return [[partial(alone, block, head + 1) for head in range(network.shape.heads)] for block in network.blocks]


@torch.no_grad()
def recomputed_sums(network: Network, inputs: Tensor) -> Tensor:
    """The sum over *all* paths of each length of what leaves a path, attention recomputed: (L + 1, batch, n, d)."""
    x = network.embed(inputs)
    sums = torch.zeros(network.shape.depth + 1, *x.shape, dtype=x.dtype)
    for path, tokens in recomputed_paths(x, _steps(network)):
        sums[sum(head > 0 for head in path)] += tokens
    return sums


@torch.no_grad()
def sampled_sum(network: Network, inputs: Tensor, length: int, paths: int, generator: torch.Generator) -> Tensor:
    """The same over a few paths drawn with replacement, as the authors draw them: (batch, n, d)."""
    start, steps, depth = network.embed(inputs), _steps(network), network.shape.depth
    total = torch.zeros_like(start)
    for _ in range(paths):
        x = start
        for layer in torch.randperm(depth, generator=generator)[:length].sort().values.tolist():
            x = steps[layer][int(torch.randint(network.shape.heads, (), generator=generator))](x)
        total += x
    return total


@dataclass(frozen=True)
class Reading:
    """Which of the frozen terms are given to the readout, when one length is asked about."""

    name: str
    keeps: Callable[[int, int], bool]  # (length, asked about)
    constant: bool


READINGS = (
    Reading("alone", lambda length, asked: length == asked, constant=False),
    Reading("with constant", lambda length, asked: length == asked, constant=True),
    Reading("up to", lambda length, asked: length <= asked, constant=True),
    Reading("from", lambda length, asked: length >= asked, constant=True),
    Reading("without", lambda length, asked: length != asked, constant=True),
)


def read(terms: Tensor, reading: Reading, asked: int) -> Tensor:
    """The part of the frozen terms (L + 2, …) that a reading gives to the readout: (batch, n, d)."""
    kept = [reading.keeps(length, asked) for length in range(len(terms) - 1)]
    return terms[torch.tensor([*kept, reading.constant])].sum(dim=0)


def projection_shares(terms: Tensor) -> Tensor:
    """⟨A_k, X⟩/⟨X, X⟩ over all entries, X = Σ_k A_k: what each term adds to the whole, in its direction; the sum is 1.

    A share may be negative (a term that works against the whole) or above 1. Without any X, nan.
    """
    whole = terms.sum(dim=0)
    return (terms * whole).flatten(1).sum(dim=1) / whole.square().sum()


def accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    """The share of tokens that are labelled rightly, of every sequence: (batch)."""
    return (scores.argmax(dim=-1) == labels).double().mean(dim=-1)


def in_parts(make: Callable[[Tensor], Tensor], inputs: Tensor, size: int) -> Tensor:
    """`make` of some sequences at a time, joined along its second axis: the first is for lengths."""
    parts: Sequence[Tensor] = [make(part) for part in inputs.split(size)]
    return torch.cat(list(parts), dim=1)
