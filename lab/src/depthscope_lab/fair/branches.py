"""Wirings as one cross: where the norms stand × how much a branch weighs (α) × how much of the mean is taken out (τ).

    post   y = LN(x + α·F(x))         pre   y = x + α·F(LN x)         layer-scale   y = x + g ⊙ F(LN x), g starts at α

and after each block y − τ·mean(y), the mean of all tokens or, in a causal one, of those so far.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.models import WIRINGS, Wiring
from depthscope.models.token_means import CausalMean, Full


def crossed(placement: str, alpha: float = 1.0, tau: float = 0.0, causal: bool = False) -> Wiring:
    """The wiring of a placement ("post", "pre", "layer-scale", …) with this branch weight and share of the mean."""
    base = WIRINGS[placement]
    inside, prepare = base.forward, base.prepare
    if placement == "layer-scale":
        prepare = partial(_start_gains, start=alpha)
    elif placement in _WEIGHED:
        inside = partial(_WEIGHED[placement], alpha=alpha)
    elif alpha != 1:
        raise ValueError(f"expected α = 1 for {placement!r}, whose branches have a weight of their own, got {alpha}")
    mean = CausalMean() if causal else Full()

    def forward(block: Any, x: Tensor, given: Any) -> Tensor:
        y = inside(block, x, given)
        return y - tau * mean.mean(y) if tau else y

    return replace(base, name=f"{placement}, α = {alpha:.4g}, τ = {tau:.4g}", forward=forward, prepare=prepare)


def _start_gains(block: Any, start: float) -> None:
    block.gain1, block.gain2 = (nn.Parameter(torch.full_like(block.norm1.weight.detach(), start)) for _ in range(2))


def _post(block: Any, x: Tensor, given: Any, alpha: float) -> Tensor:
    at = block.stations
    x = at["input"](x)
    y = block.norm1(at["after_attention"](x + at["attention_branch"](alpha * block.attend(x, given))))
    y = block.enter_ffn(y, given)
    return at["output"](block.norm2(at["after_ffn"](y + at["ffn_branch"](alpha * block.ffn(y)))))  # type: ignore[no-any-return]


def _pre(block: Any, x: Tensor, given: Any, alpha: float) -> Tensor:
    at = block.stations
    x = at["input"](x)
    y = at["after_attention"](x + at["attention_branch"](alpha * block.attend(x, given, block.norm1)))
    branch = alpha * block.ffn(block.enter_ffn(block.norm2(y), given))
    return at["output"](at["after_ffn"](y + at["ffn_branch"](branch)))  # type: ignore[no-any-return]


_WEIGHED = {"post": _post, "pre": _pre}
