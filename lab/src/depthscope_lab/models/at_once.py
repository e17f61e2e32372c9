"""A stack whose blocks are trained in one operation (`in_one.py`), and what a wiring must tell for that: a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from depthscope import stations
from depthscope.models import Attention, Block, Encoder, FeedForward, Station, Wiring, post_norm, pre_norm
from depthscope_lab.models import in_one
from depthscope_lab.models.in_one import Plan, is_heard

# Of the parts of a block, as `in_numbers` goes through them.
_KINDS = [nn.Linear] * 6 + [nn.LayerNorm] * 2 + [nn.ReLU] + [Station] * len(stations.BLOCK)


@dataclass(frozen=True, kw_only=True)
class PlannedWiring(Wiring):
    """A wiring that can also be said in numbers. `plan`: of a block that is wired so."""

    plan: Callable[[Any], Plan]


def plan_post_norm(block: Any) -> Plan:
    return Plan("post", block.alpha, norm_eps=block.norm1.eps)


def plan_pre_norm(block: Any) -> Plan:
    return Plan("pre", block.alpha, norm_eps=block.norm1.eps)


def plan_of(wiring: Wiring) -> Callable[[Any], Plan] | None:
    """How a wiring's blocks are said in numbers; None if they cannot be."""
    if isinstance(wiring, PlannedWiring):
        return wiring.plan
    return plan_post_norm if wiring is post_norm else plan_pre_norm if wiring is pre_norm else None


def in_numbers(block: Any, dtype: torch.dtype) -> tuple[Plan, list[Tensor]] | None:
    """A block in numbers, and its weights as `in_one.run` wants them; None if it has to be called.

    Every part must be what a block is built with, trained in this dtype, and heard by nobody.
    """
    if type(block) is not Block:
        return None
    parts: Any = block._modules  # asked in every step: twice as fast as through `__getattr__`
    attention, ffn, stations = parts.get("attention"), parts.get("ffn"), parts.get("stations")
    if [type(attention), type(ffn), type(stations)] != [Attention, FeedForward, nn.ModuleDict]:
        return None
    layers, passed, inner = [*ffn._modules.values()], [*stations._modules.values()], attention._modules
    linears = [*map(inner.get, ("query", "key", "value", "output")), *layers[::2]]
    norms = [parts.get("norm1"), parts.get("norm2")]
    kinds = [type(part) for part in (*linears, *norms, *layers[1::2], *passed)]
    if (plan_for := plan_of(block.wiring)) is None or kinds != _KINDS:
        return None
    if attention.causal or norms[0].eps != norms[1].eps:
        return None
    if any(map(is_heard, (block, attention, ffn, layers[1], stations, *linears, *norms, *passed))):
        return None
    plan = replace(plan_for(block), heads=attention.heads, scale=attention.scale)
    weights = [part._parameters.get(name) for part in (*linears, *norms) for name in ("weight", "bias")]
    weights += [getattr(block, name) for name in plan.gains]
    for one in weights:
        if type(one) is not nn.Parameter or one.dtype != dtype or not one.requires_grad:
            return None
    return plan, weights


class AtOnceEncoder(Encoder):
    """A stack that trains all blocks as one operation where that is possible (`in_one.py`): faster if they are narrow.

    The same up to rounding; where it is not possible, and with `at_once = False`, the blocks are called one by one.
    """

    at_once = True

    @classmethod
    def turn(cls, encoder: Encoder) -> None:
        """Makes an encoder one of this kind, in its place: its blocks, their keys and its hooks stay."""
        assert type(encoder) in (Encoder, cls)
        encoder.__class__ = cls

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (batch, n, d), mask (batch, n) true for real tokens → (batch, n, d)."""
        asked = self.at_once and self.training and mask is None and not self.second_stream
        if asked and (found := self._in_one(x)) is not None:
            return self.final_norm(in_one.run(x, *found, self))  # type: ignore[no-any-return]
        return super().forward(x, mask)

    def _in_one(self, x: Tensor) -> tuple[list[Plan], list[Tensor]] | None:
        """The blocks in numbers, and their weights; None if they are to be run one by one."""
        if not in_one.may_run(x):
            return None
        plans, weights = [], []
        for block in self.blocks:
            found = in_numbers(block, x.dtype)
            if found is None:
                return None
            plans.append(found[0])
            weights += found[1]
        return plans, weights
