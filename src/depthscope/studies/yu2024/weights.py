"""The weights of many independent blocks at once: every tensor has a leading axis of trials.

Drawing is what random blocks cost most: 2.9 million numbers per block at d = 512. They are drawn in place, in
buffers that are used again from block to block, by NumPy's SFC64 (half the time of torch's serial generator
here), one stream per matrix, so that two threads draw at once and the numbers do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Linear(NamedTuple):
    """x ↦ xWᵀ + b, in `nn.Linear`'s layout."""

    weight: Tensor  # (trials, out, in)
    bias: Tensor | None  # (trials, 1, out)


class Weights(NamedTuple):
    """One post-norm block per trial. The norms have no weights: at initialisation they are 1 and 0."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear | None
    expand: Linear
    contract: Linear


@dataclass(frozen=True)
class Law:
    """How the elements of one matrix are distributed, with mean 0."""

    variance: Callable[[int, int, int], float]  # of (fan_in, fan_out, heads)
    gaussian: bool = False  # else uniform
    bias: bool = False  # biases from U(−1, 1)/√fan_in, as `nn.Linear` has them; else 0


DEFAULT = Law(lambda fan_in, _out, _h: 1 / (3 * fan_in), bias=True)  # nn.Linear's own
SCORES = Law(lambda fan_in, _out, _h: 1 / (3 * fan_in))  # U(−1, 1)/√d, Yu & Zhang 2024, below eq. 2
XAVIER = Law(lambda fan_in, fan_out, _h: 2 / (fan_in + fan_out))
HE = Law(lambda fan_in, _out, _h: 2 / fan_in, gaussian=True)
UNIT = Law(lambda fan_in, _out, _h: 1 / fan_in, gaussian=True)  # dσ² = 1, the theorem's
TEXT = Law(lambda fan_in, _out, h: h / fan_in, gaussian=True)  # N(0, h/d), §2.4's


@dataclass(frozen=True)
class Setting:
    """How a block's matrices are drawn; `output=None`: no W_O, as in Prop. 2.9."""

    score: Law  # W_q and W_k
    value: Law
    output: Law | None
    ffn: Law


SETTINGS: dict[str, Setting] = {
    "theorem": Setting(SCORES, UNIT, None, DEFAULT),
    "paper_text": Setting(SCORES, TEXT, None, DEFAULT),
    "xavier": Setting(XAVIER, XAVIER, None, XAVIER),
    "pytorch_default": Setting(DEFAULT, DEFAULT, None, DEFAULT),
    "theorem, He FFN": Setting(SCORES, UNIT, None, HE),
    "paper_text, W_O, Xavier FFN": Setting(SCORES, TEXT, DEFAULT, XAVIER),
}


class Sampler:
    """Draws the weights of `trials` independent blocks, again and again into the same buffers.

    The tensors of one draw are overwritten by the next: whoever needs two blocks at once takes two samplers.
    """

    def __init__(
        self,
        setting: str,
        *,
        trials: int,
        width: int,
        heads: int,
        seed: int | tuple[int, ...],
        dtype: torch.dtype = torch.float32,
    ):
        laws, ffn_width = SETTINGS[setting], 4 * width
        shapes = {  # (law, fan_in, fan_out); the large ones first, so that two threads end together
            "expand": (laws.ffn, width, ffn_width),
            "contract": (laws.ffn, ffn_width, width),
            "value": (laws.value, width, width),
            "query": (laws.score, width, width),
            "key": (laws.score, width, width),
            "output": (laws.output, width, width),
        }
        streams = generators(seed, len(shapes))
        self._jobs: list[Callable[[], None]] = []
        linears: dict[str, Linear | None] = {}
        for (name, (law, fan_in, fan_out)), stream in zip(shapes.items(), streams, strict=True):
            if law is None:
                linears[name] = None
                continue
            weight = torch.empty(trials, fan_out, fan_in, dtype=dtype)
            bias = torch.empty(trials, 1, fan_out, dtype=dtype) if law.bias else None
            linears[name] = Linear(weight, bias)
            scale = math.sqrt(law.variance(fan_in, fan_out, heads))
            self._jobs.append(_filler(linears[name], law.gaussian, scale, fan_in, stream))
        self._weights = Weights(**linears)  # type: ignore[arg-type]

    def draw(self) -> Weights:
        """Fresh weights, in the buffers of the last draw."""
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(job) for job in self._jobs]:
                done.result()
        return self._weights


def generators(seed: int | tuple[int, ...], count: int) -> list[np.random.Generator]:
    """Independent streams of one seed."""
    return [np.random.Generator(np.random.SFC64(stream)) for stream in np.random.SeedSequence(seed).spawn(count)]


def fill_gaussian(values: Tensor, deviation: float, stream: np.random.Generator) -> None:
    """values ~ N(0, deviation²), in place."""
    flat = values.numpy()
    stream.standard_normal(out=flat, dtype=flat.dtype)
    values.mul_(deviation)


def fill_uniform(values: Tensor, bound: float, stream: np.random.Generator) -> None:
    """values ~ U(−bound, bound), in place."""
    flat = values.numpy()
    stream.random(out=flat, dtype=flat.dtype)
    torch.add(torch.tensor(-bound, dtype=values.dtype), values, alpha=2 * bound, out=values)  # one pass over memory


def _filler(
    linear: Linear | None, gaussian: bool, deviation: float, fan_in: int, stream: np.random.Generator
) -> Callable[[], None]:
    """A call that draws one matrix of every trial, from its own stream."""
    assert linear is not None

    def fill() -> None:
        if gaussian:
            fill_gaussian(linear.weight, deviation, stream)
        else:
            fill_uniform(linear.weight, math.sqrt(3) * deviation, stream)
        if linear.bias is not None:
            fill_uniform(linear.bias, 1 / math.sqrt(fan_in), stream)

    return fill
