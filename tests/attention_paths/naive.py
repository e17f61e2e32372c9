"""The path sum of a whole model, the slow and obvious way: every path by itself, from what one pass showed.

What is frozen is taken from the model's own modules, by hooks: attention and projections as the anatomy has them, the
input of each norm and of each activation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, BlockAnatomy, anatomy_of
from depthscope.hooks import Listen, ListenToAttention, Machine, undisturbed
from depthscope.inputs import batches, call


@dataclass
class Seen:
    """What one block showed in a pass."""

    block: BlockAnatomy
    entered: dict[str, Tensor] = field(default_factory=dict)
    heads: list[Tensor] = field(default_factory=list)  # (batch, n, n) each


def look(model: nn.Module, inputs: Any) -> list[Seen]:
    anatomy: Anatomy = anatomy_of(model)
    seen: list[Seen] = []

    def hear(visit, station, tokens, _source):
        if station == "input":
            seen.append(Seen(visit.block))
        seen[-1].entered[station] = tokens.clone()

    def hear_attention(_visit, _kind, heads, _values):
        seen[-1].heads = [head.attention.dense() for head in heads]

    stations = {"input", "after_attention", "ffn_input", "after_ffn", "output"}
    with undisturbed(model), Machine(model, anatomy, Listen(stations, hear), ListenToAttention(hear_attention)):
        call(model, next(batches(model, inputs)))
    return seen


def frozen_norm(norm: Any, entered: Tensor, x: Tensor, constant: bool) -> Tensor:
    scale = norm.weight / (entered.var(dim=-1, keepdim=True, correction=0) + norm.eps).sqrt()
    return (x - x.mean(dim=-1, keepdim=True)) * scale + (norm.bias if constant else 0)


def frozen_ffn(first: Callable, activation: Callable, last: Callable, entered: Tensor, x: Tensor, constant: bool):
    """Linear, activation, linear; `constant`: with the biases."""
    zero = torch.zeros_like(x)
    u0 = first(entered)
    u = first(x) if constant else first(x) - first(zero)
    gated = u * activation(u0) / u0
    return last(gated) if constant else last(gated) - last(torch.zeros_like(gated))


def through(
    seen: Seen, x: Tensor, head: int | None, constant: bool, ffn: tuple[Callable, ...], placement: str
) -> Tensor:
    """One block with one choice: a head from 1, 0 for the skip; None: all of it, as the model does it."""
    projections, at = seen.block.projections(), seen.entered
    norms = [lambda y, c, n=norm, e=e: frozen_norm(n, e, y, c) for norm, e in _norms(seen, placement)]
    read = norms[0](x, constant) if placement == "pre" else x
    branches = []
    for h, attention in enumerate(seen.heads):
        values = read @ projections.value[h]
        if constant and projections.value_bias is not None:
            values = values + projections.value_bias[h]
        branches.append(attention @ values @ projections.output[h])
    if head is None:
        y = x + sum(branches) + (projections.output_bias if constant else 0)
    else:
        y = branches[head - 1] if head else x
    if placement == "pre":
        return y + frozen_ffn(*ffn, at["ffn_input"], norms[1](y, constant), constant)
    y = norms[0](y, constant)
    return norms[1](y + frozen_ffn(*ffn, at["ffn_input"], y, constant), constant)


def _norms(seen: Seen, placement: str) -> list[tuple[nn.Module, Tensor]]:
    places = ("input", "after_attention") if placement == "pre" else ("after_attention", "after_ffn")
    return [(norm, seen.entered[place]) for norm, place in zip(seen.block.norms, places, strict=True)]


def all_paths(model: nn.Module, inputs: Any, ffn_of: Callable[[nn.Module], tuple[Callable, ...]]) -> Tensor:
    """(L + 2, batch, n, d): the sums by length, the constant part last."""
    seen = look(model, inputs)
    placement = seen[0].block.placement
    x = seen[0].entered["input"]
    terms = torch.zeros(len(seen) + 2, *x.shape, dtype=x.dtype)
    for path in product(*(range(len(block.heads) + 1) for block in seen)):
        y = x
        for block, head in zip(seen, path, strict=True):
            y = through(block, y, head, False, ffn_of(block.block.module), placement)
        terms[sum(head > 0 for head in path)] += y
    y = torch.zeros_like(x)
    for block in seen:
        y = through(block, y, None, True, ffn_of(block.block.module), placement)
    terms[-1] = y
    return terms
