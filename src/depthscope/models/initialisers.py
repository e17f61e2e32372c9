"""How the weights of a block are drawn. Each initialiser is a value to pass in: `BlockConfig(initialise=xavier)`.

A `Law` says how one matrix is distributed, a `Scheme` which law each matrix of a block has.

Yu & Zhang 2024 contradict themselves here. Their theorem takes dσ² = 1; §2.4 says N(0, h/d) for the
heads' W_k, which gives dσ² = h and ξ₁/ξ₂ ≈ 1 + h in step 1, not the ≈ 2 of their Fig. 2. `theorem`
fits the figure, `paper_text` is what the text says. Both leave the FFN at PyTorch's default ("other
weight matrices are initialized using the default method") and take W_q, W_k from U(−1, 1)/√d (eq. 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from depthscope.registry import Registry

if TYPE_CHECKING:
    from depthscope.models.attention import Attention

Initialiser = Callable[["Attention", nn.Module, torch.Generator | None], None]


@dataclass(frozen=True)
class Law:
    """How the elements of one matrix are distributed, with mean 0."""

    variance: Callable[[int, int, int], float]  # of (fan_in, fan_out, heads)
    gaussian: bool = False  # else uniform
    bias: bool = False  # biases from U(−1, 1)/√fan_in, as `nn.Linear` has them; else 0

    def deviation(self, fan_in: int, fan_out: int, heads: int) -> float:
        """The standard deviation σ; a uniform law has the bound √3 σ (`uniform_bound`)."""
        return math.sqrt(self.variance(fan_in, fan_out, heads))


DEFAULT = Law(lambda fan_in, _out, _h: 1 / (3 * fan_in), bias=True)  # nn.Linear's own: U(−1, 1)/√fan_in
SCORES = Law(lambda fan_in, _out, _h: 1 / (3 * fan_in))  # U(−1, 1)/√d, Yu & Zhang 2024, below eq. 2
XAVIER = Law(lambda fan_in, fan_out, _h: 2 / (fan_in + fan_out))  # Glorot & Bengio 2010
HE = Law(lambda fan_in, _out, _h: 2 / fan_in, gaussian=True)  # He et al. 2015
UNIT = Law(lambda fan_in, _out, _h: 1 / fan_in, gaussian=True)  # dσ² = 1, the theorem's
TEXT = Law(lambda fan_in, _out, h: h / fan_in, gaussian=True)  # N(0, h/d), §2.4's


@dataclass(frozen=True)
class Scheme:
    """The law of each matrix of a block; `output=None` is for blocks without W_O, as in Prop. 2.9."""

    score: Law  # W_q and W_k
    value: Law
    output: Law | None
    ffn: Law


SCHEMES: dict[str, Scheme] = {
    "theorem": Scheme(SCORES, UNIT, UNIT, DEFAULT),
    "paper_text": Scheme(SCORES, TEXT, UNIT, DEFAULT),
    "xavier": Scheme(XAVIER, XAVIER, XAVIER, XAVIER),
    "pytorch_default": Scheme(DEFAULT, DEFAULT, DEFAULT, DEFAULT),
}


def pytorch_default(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    """`nn.Linear`'s own: weights and biases from U(−1, 1)/√fan_in, so dσ² = 1/3."""
    draw_block(SCHEMES["pytorch_default"], attention, ffn, generator)


def xavier(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    """Glorot & Bengio 2010, uniform: variance 2/(fan_in + fan_out), so dσ² = 1 for W_V; biases 0."""
    draw_block(SCHEMES["xavier"], attention, ffn, generator)


def theorem(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    """dσ² = 1: W_V (and W_O, if there is one) from N(0, 1/d). Fits Yu & Zhang's Fig. 2."""
    draw_block(SCHEMES["theorem"], attention, ffn, generator)


def paper_text(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    """dσ² = h: W_V from N(0, h/d), as Yu & Zhang's §2.4 says; W_O, which their text does not know, as in `theorem`."""
    draw_block(SCHEMES["paper_text"], attention, ffn, generator)


def draw_block(scheme: Scheme, attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draws every matrix of a block by its law, in place: W_q, W_k, W_V, W_O, then the FFN's in their order."""
    laws = {attention.query: scheme.score, attention.key: scheme.score, attention.value: scheme.value}
    if isinstance(attention.output, nn.Linear):
        if scheme.output is None:
            raise ValueError("expected a scheme with a law for W_O, since this attention has one; got output=None")
        laws[attention.output] = scheme.output
    laws |= {module: scheme.ffn for module in ffn.modules() if isinstance(module, nn.Linear)}
    for linear, law in laws.items():
        draw_linear(law, linear, attention.heads, generator)


def draw_linear(law: Law, linear: nn.Linear, heads: int, generator: torch.Generator | None = None) -> None:
    """Draws the weights of one matrix, then its biases, in place."""
    deviation = law.deviation(linear.in_features, linear.out_features, heads)
    if law.gaussian:
        nn.init.normal_(linear.weight, std=deviation, generator=generator)
    else:
        bound = uniform_bound(deviation)
        nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    if linear.bias is not None and law.bias:
        bound = bias_bound(linear.in_features)
        nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
    elif linear.bias is not None:
        nn.init.zeros_(linear.bias)


def uniform_bound(deviation: float) -> float:
    """U(−b, b) has the standard deviation b/√3."""
    return math.sqrt(3) * deviation


def bias_bound(fan_in: int) -> float:
    """`nn.Linear`'s biases are from U(−1, 1)/√fan_in, whatever its weights are from."""
    return 1 / math.sqrt(fan_in)


INITIALISERS: Registry[Initialiser] = Registry(
    "initialiser", "depthscope.initialisers", [pytorch_default, xavier, theorem, paper_text], name_of=None
)
