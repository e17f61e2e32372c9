"""Several models of one shape as one model: the seeds and rates of a variant are trained together.

A narrow model spends much of its time between its products. Here the products of all members are one batched product,
and everything without weights (attention, remedies, stations) runs unchanged on one batch: that of member 1, then that
of member 2, …. So tokens have the shape (members · samples, n, d) everywhere, and only what has weights needs to know
whose they are.

All weights are one matrix `weights` (members, parameters); what a module calls its weight is a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import Attention, Block, CausalLM

_SHORT = 8  # tokens up to which compiled attention is written out: its kernel takes ten times as long there


class Stacked(nn.Module):
    """The members as one model. `forward` gets their batches one after the other, and gives their outputs likewise.

    Args:
        models: Of one shape and wiring; they differ in their weights alone. They stay as they are.
        compile: Compiles a block (once: all blocks share what was compiled), for about half of the time of a step.

    Raises:
        ValueError: Members differ in their shapes, or have weights in a module that is not known here.
    """

    def __init__(self, models: Sequence[nn.Module], *, compile: bool = False):
        super().__init__()
        shapes = [{name: tuple(weight.shape) for name, weight in model.named_parameters()} for model in models]
        if not models or any(other != shapes[0] for other in shapes):
            raise ValueError("expected members of one shape: at least one, with weights of the same names and sizes")
        self.members = len(models)
        self.shapes = shapes[0]
        rows = [torch.cat([weight.detach().flatten() for weight in model.parameters()]) for model in models]
        self.weights = nn.Parameter(torch.stack(rows))  # (members, parameters)
        self.model = deepcopy(models[0])
        self._places = [self._take_over(name) for name in self.shapes]
        for module in self.model.modules():
            if (kind := _stacked_kind(module)) is not None:
                module.__class__ = kind
                module.__dict__["members"] = self.members
        if compile:
            for block in self.model.modules():
                if isinstance(block, Block):
                    block.compile(dynamic=False)

    def forward(self, *inputs: Tensor) -> Any:
        """inputs (members · samples, …) → outputs (members · samples, …)."""
        samples = len(inputs[0]) // self.members
        parts = self.weights.split([shape_size(shape) for shape in self.shapes.values()], dim=1)
        for part, shape, put in zip(parts, self.shapes.values(), self._places, strict=True):
            put(part.view(self.members, *shape), samples)
        return self.model(*inputs)

    def member(self, number: int) -> dict[str, Tensor]:
        """The weights of one member by name, as its own model has them."""
        row = self.weights.detach()[number].split([shape_size(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(row, self.shapes.items(), strict=True)}

    def _take_over(self, path: str) -> Callable[[Tensor, int], None]:
        """Takes a weight out of its module; gives what puts the members' weights into its place."""
        owner, _, name = path.rpartition(".")
        module = self.model.get_submodule(owner)
        shape = self.shapes[path]
        del module._parameters[name]
        place = module.__dict__
        if _stacked_kind(module) is not None and name in ("weight", "bias"):
            return lambda part, _samples: place.__setitem__(name, part)
        if len(shape) > 3 or (len(shape) == 3 and shape[0] != 1):
            raise ValueError(
                f"expected weights of known modules (linear, norm, embedding, convolution), or one row or matrix for "
                f"every sample, got {path} {shape}"
            )
        rows = (1,) * (2 - len(shape)) + shape[-2:]

        def put(part: Tensor, samples: int) -> None:  # one matrix (1 or n, 1 or d) for every sample
            each = part.view(-1, 1, *rows).expand(-1, samples, -1, -1)
            place[name] = each.flatten(0, 1)

        return put


def _stacked_kind(module: Any) -> Any:
    """The type whose products are the members'; of a type derived from a known one a mixture. None: it has none."""
    kind: Any = type(module)
    return _stacked_type(kind)


@cache  # one type for all blocks: what is compiled for one serves the others
def _stacked_type(kind: Any) -> Any:
    for stacked in _KINDS:
        if issubclass(kind, stacked.__mro__[1]):
            return stacked if kind is stacked.__mro__[1] else type(f"Stacked{kind.__name__}", (kind, stacked), {})
    return None


def shape_size(shape: Sequence[int]) -> int:
    """How many numbers a shape holds."""
    return int(torch.Size(shape).numel())


def _dealt(x: Tensor, members: int) -> Tensor:
    """(members · samples, …, d) → (members, samples · …, d)."""
    return x.reshape(members, -1, x.shape[-1])


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """xWᵀ + b by each member's W (members, out, in) and b (members, out)."""
    dealt = _dealt(x, len(weight))
    y = torch.bmm(dealt, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), dealt, weight.mT)
    return y.view(*x.shape[:-1], weight.shape[1])


class _Linear(nn.Linear):
    members: int

    def forward(self, x: Tensor) -> Tensor:
        return _products(x, self.weight, self.bias)


class _LayerNorm(nn.LayerNorm):
    members: int

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        if self.weight is None:
            return y
        y = _dealt(y, self.members) * self.weight.unsqueeze(1)
        return (y if self.bias is None else y + self.bias.unsqueeze(1)).view_as(x)


class _Embedding(nn.Embedding):
    members: int

    def forward(self, ids: Tensor) -> Tensor:
        first = torch.arange(self.members, device=ids.device) * self.num_embeddings
        places = (ids.reshape(self.members, -1) + first[:, None]).view_as(ids)
        return F.embedding(places, self.weight.flatten(0, 1))


class _Conv2d(nn.Conv2d):
    members: int

    def forward(self, images: Tensor) -> Tensor:
        """Members as groups of channels."""
        beside = images.unflatten(0, (self.members, -1)).transpose(0, 1).flatten(1, 2)
        bias = None if self.bias is None else self.bias.flatten()
        weight, groups = self.weight.flatten(0, 1), self.members * self.groups
        y = F.conv2d(beside, weight, bias, self.stride, self.padding, self.dilation, groups)
        return y.unflatten(1, (self.members, -1)).transpose(0, 1).flatten(0, 1)


class _CausalLM(CausalLM):
    """Its positions are rows of a table, and its head is the table of its letters."""

    members: int

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        places = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
        x = self.encoder(self.embedding(ids) + self.positions(places), mask)
        return _products(x, self.embedding.weight, None)


class _Attention(Attention):
    """The same as one fused kernel; written out for few tokens where a compiler makes one loop of it."""

    members: int

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None or self.causal or x.shape[-2] > _SHORT or not torch.compiler.is_compiling():
            return super().forward(x, mask)
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)) for project in (self.query, self.key, self.value))
        scores = (q.unsqueeze(2) * k.unsqueeze(1)).sum(-1) * self.scale  # (…, n, n, h)
        heads = (scores.softmax(2).unsqueeze(-1) * v.unsqueeze(1)).sum(2)  # (…, n, h, d/h)
        return self.output(heads.flatten(-2))


_KINDS: tuple[Any, ...] = (_Linear, _LayerNorm, _Embedding, _Conv2d, _CausalLM, _Attention)
