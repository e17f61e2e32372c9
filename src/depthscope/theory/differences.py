"""φ(a + b) − φ(a) of activation functions, to full relative precision however small b is.

Subtracting φ(a) from φ(a + b) loses every digit of b below 1e-16·a. These forms never subtract nearly equal
numbers: identities for ReLU, tanh and sine; for the exact GELU an integral of the density where b is small, and a
difference of tails where it is not. The error of each entry is a few roundings of the larger of the terms that are
added; where these cancel (GELU near its minimum) the derivative itself passes through 0.

Shapes: a and b broadcast. a is finite; b may be as small as float64 can hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Gauss-Legendre on [−1, 1], 8 points: the density over a step with |b|(1 + |a|) ≤ 1 to 1e-15.
_NODES = (0.1834346424956498, 0.5255324099163290, 0.7966664774136267, 0.9602898564975363)
_WEIGHTS = (0.3626837833783620, 0.3137066458778873, 0.2223810344533745, 0.1012285362903763)


def relu_difference(a: Tensor, b: Tensor) -> Tensor:
    """max(a + b, 0) − max(a, 0): b where both are positive, 0 where both are not, else the part above 0."""
    end = a + b
    crossing = torch.where(a > 0, -a, end.clamp(min=0))  # from above 0 to below; or from below
    return torch.where((a > 0) & (end > 0), b, crossing)


def tanh_difference(a: Tensor, b: Tensor) -> Tensor:
    """tanh(a + b) − tanh(a) = sinh b / (cosh a · cosh(a + b)), with all exponents ≤ 0 so that nothing overflows."""
    end = a + b
    size = -2 * torch.sign(b) * torch.expm1(-2 * b.abs())
    tails = (1 + torch.exp(-2 * a.abs())) * (1 + torch.exp(-2 * end.abs()))
    return size * torch.exp(b.abs() - a.abs() - end.abs()) / tails


def sine_difference(a: Tensor, b: Tensor) -> Tensor:
    """sin(a + b) − sin(a) = 2 sin(b/2) cos(a + b/2)."""
    return 2 * torch.sin(b / 2) * torch.cos(a + b / 2)


def gelu_difference(a: Tensor, b: Tensor) -> Tensor:
    """(a + b)Φ(a + b) − aΦ(a) = a(Φ(a + b) − Φ(a)) + bΦ(a + b), Φ the normal distribution function."""
    return a * _normal_difference(a, b) + b * _normal(a + b)


def _normal(x: Tensor) -> Tensor:
    """Φ(x), right in the lower tail too: torch's own `ndtr` is 0 below −8.4."""
    return torch.special.erfc(-x * math.sqrt(0.5)) / 2


def _normal_difference(a: Tensor, b: Tensor) -> Tensor:
    """Φ(a + b) − Φ(a)."""
    end, middle, half = a + b, a + b / 2, b / 2
    near = torch.zeros_like(middle)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        for at in (middle + node * half, middle - node * half):
            near = near + weight * torch.exp(-at.square() / 2) / math.sqrt(2 * math.pi)
    upper = _normal(-a) - _normal(-end)  # right where both are positive
    lower = _normal(end) - _normal(a)
    return torch.where(b.abs() * (1 + a.abs()) <= 1, near * half, torch.where((a > 0) & (end > 0), upper, lower))


class Activation(NamedTuple):
    """An activation function, its difference without cancellation, and its Lipschitz constant."""

    function: Callable[[Tensor], Tensor]
    difference: Callable[[Tensor, Tensor], Tensor]  # (a, b) → φ(a + b) − φ(a)
    lipschitz: float


# The largest slope of GELU, at √2, is Φ(√2) + √2·(density at √2).
ACTIVATIONS = {
    "relu": Activation(torch.relu, relu_difference, 1.0),
    "tanh": Activation(torch.tanh, tanh_difference, 1.0),
    "sine": Activation(torch.sin, sine_difference, 1.0),
    "gelu": Activation(lambda a: a * _normal(a), gelu_difference, 1.1289042),
}


def activation_named(name: str) -> Activation:
    """The record of an activation; refused if there is none of this name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"expected an activation among {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]
