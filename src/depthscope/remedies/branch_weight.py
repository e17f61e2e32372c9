"""The weight α of the branches that keeps the gradient from growing over the depth: prescribed, then tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from depthscope.probing import Profile
from depthscope.theory import GROWTH, Gains, OddsMap, prescribe

TRIALS = 4  # each a forward and a backward pass


def first_sequences(inputs: Any, most: int = 2) -> Any:
    """A piece of the batch: the gradient's growth over many blocks is nearly the same for every sequence."""
    if not isinstance(inputs, Mapping):
        return inputs[:most]
    size = next(v.shape[0] for v in inputs.values() if isinstance(v, Tensor) and v.ndim)
    return {
        name: value[:most] if isinstance(value, Tensor) and value.ndim and value.shape[0] == size else value
        for name, value in inputs.items()
    }


def gradient_growth(profile: Profile, part: str = "") -> float:
    """By what factor the gradient grows per block of a part on its way to the input: (g₁/g_L)^(1/(L−1))."""
    norms = [norm for norm in profile.curve("output_gradient", part=part) if not math.isnan(norm)]
    return (norms[0] / norms[-1]) ** (1 / (len(norms) - 1)) if len(norms) > 1 else 1.0


def prescribed_weight(about: Mapping[str, Any], odds: OddsMap, level: float, depth: int) -> float:
    """What theory prescribes for post-norm blocks of this ρ and c; 1 where it has nothing to say of them.

    `about`: `placement` and `tokens`, from a profile's metadata.
    """
    if about["placement"] != "post":
        return 1.0
    try:
        return prescribe(depth, Gains.of_odds(odds, about["tokens"] or 0), level=level).alpha
    except ValueError:  # no FFN of ReLU brings about such a c, or no α is small enough
        return 1.0


def growth_by_weight(growth: Callable[[float], float], depth: int, prescribed: float) -> dict[float, float]:
    """α → growth, until the growth over the whole depth is allowed: 1, what is prescribed, then as the growth says.

    The logarithm of the growth falls about like α².
    """
    tried = {1.0: growth(1.0)}
    alpha = 1.0
    while math.log(tried[alpha]) * depth > math.log(GROWTH) and len(tried) < TRIALS:
        aim = math.log(GROWTH) / 2 / depth  # well inside what is allowed
        guess = alpha * math.sqrt(aim / math.log(tried[alpha]))
        alpha = float(f"{prescribed if len(tried) == 1 and prescribed < 1 else guess:.2g}")
        if alpha in tried:
            break
        tried[alpha] = growth(alpha)
    return tried
