"""How the weights of a block are drawn. Each initialiser is a value to pass in: `BlockConfig(initialise=xavier)`.

Yu & Zhang 2024 contradict themselves here. Their theorem takes dσ² = 1; §2.4 says N(0, h/d) for the
heads' W_k, which gives dσ² = h and ξ₁/ξ₂ ≈ 1 + h in step 1, not the ≈ 2 of their Fig. 2. `theorem`
fits the figure, `paper_text` is what the text says. Both leave the FFN at PyTorch's default ("other
weight matrices are initialized using the default method") and take W_q, W_k from U(−1, 1)/√d (eq. 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from depthscope.models.attention import Attention

Initialiser = Callable[["Attention", nn.Module, torch.Generator | None], None]


def pytorch_default(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    """`nn.Linear`'s own: weights and biases from U(−1, 1)/√fan_in, so dσ² = 1/3."""
    for linear in _linears(attention, ffn):
        _draw_linear(linear, generator)


def xavier(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    """Glorot & Bengio 2010, uniform: variance 2/(fan_in + fan_out), so dσ² = 1 for W_V; biases 0."""
    for linear in _linears(attention, ffn):
        nn.init.xavier_uniform_(linear.weight, generator=generator)
        _zero_bias(linear)


def theorem(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    """dσ² = 1: W_V (and W_O, if there is one) from N(0, 1/d). Fits Yu & Zhang's Fig. 2."""
    _draw_attention(attention, value_gain=1.0, generator=generator)
    for linear in _linears(ffn):
        _draw_linear(linear, generator)


def paper_text(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    """dσ² = h: W_V from N(0, h/d), as Yu & Zhang's §2.4 says; W_O, which their text does not know, as in `theorem`."""
    _draw_attention(attention, value_gain=float(attention.heads), generator=generator)
    for linear in _linears(ffn):
        _draw_linear(linear, generator)


def _draw_attention(attention: Attention, value_gain: float, generator: torch.Generator | None) -> None:
    d = attention.value.in_features
    bound = 1 / math.sqrt(d)
    for linear in (attention.query, attention.key):
        nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    nn.init.normal_(attention.value.weight, std=math.sqrt(value_gain / d), generator=generator)
    if isinstance(attention.output, nn.Linear):
        nn.init.normal_(attention.output.weight, std=math.sqrt(1 / d), generator=generator)
    for linear in _linears(attention):
        _zero_bias(linear)


def _draw_linear(linear: nn.Linear, generator: torch.Generator | None) -> None:
    draw = partial(nn.init.uniform_, a=-1 / math.sqrt(linear.in_features), b=1 / math.sqrt(linear.in_features))
    draw(linear.weight, generator=generator)
    if linear.bias is not None:
        draw(linear.bias, generator=generator)


def _zero_bias(linear: nn.Linear) -> None:
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _linears(*modules: nn.Module) -> list[nn.Linear]:
    return [m for module in modules for m in module.modules() if isinstance(m, nn.Linear)]
