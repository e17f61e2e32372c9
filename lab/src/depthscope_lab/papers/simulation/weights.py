"""The weights of many independent blocks at once: every tensor has a leading axis of trials.

The laws are those of `depthscope.models.initialisers`. Drawing is what random blocks cost most: 2.9 million numbers
per block at d = 512. They are drawn in place, in buffers that are used again from block to block, one stream per
matrix, so that two threads draw at once and the numbers do not depend on it. Or they are drawn where they are used
(`Passing`), and never leave the processor's cache.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthscope.models.initialisers import DEFAULT, HE, SCHEMES, XAVIER, Law, Scheme, bias_bound, uniform_bound
from depthscope_lab.papers.simulation.randomness import (
    chunks,
    fill_gaussian,
    fill_uniform,
    generators,
    levels,
    standard_normal_tokens,
)

PIECE = 2**18  # numbers drawn at once, where they are drawn for one use: 1 MB


class Linear(NamedTuple):
    """x ↦ xWᵀ + b, in `nn.Linear`'s layout."""

    weight: Tensor  # (trials, out, in)
    bias: Tensor | None  # (trials, 1, out)

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def __call__(self, rows: Tensor) -> Tensor:
        """(trials, m, in) → (trials, m, out)."""
        transposed = self.weight.mT
        return rows @ transposed if self.bias is None else torch.baddbmm(self.bias, rows, transposed)


class Passing(NamedTuple):
    """The same with W ~ U(−bound, bound) on 65 536 levels (`levels`), which exists only while it is multiplied with.

    Every use draws W anew: right for weights that are used once. With W = (K + ½)·step, K whole numbers,
    xWᵀ + b is step·xKᵀ, and step/2 times the sum of x, + b: no pass over W brings it to scale.
    """

    shape: tuple[int, int, int]  # (trials, out, in)
    bound: float
    stream: np.random.Generator
    bias: Tensor | None  # (trials, 1, out)

    def __call__(self, rows: Tensor) -> Tensor:
        """(trials, m, in) → (trials, m, out)."""
        (trials, out, given), step = self.shape, self.bound / 32768
        shift = rows.sum(dim=-1, keepdim=True)  # (trials, m, 1)
        bias = rows.new_zeros(trials, 1, out) if self.bias is None else self.bias
        result = torch.add(bias, shift, alpha=step / 2)
        drawn = rows.new_empty(min(out, max(PIECE // given, 1)), given)
        for x, y in zip(rows, result, strict=True):
            for part in y.split(len(drawn), dim=-1):
                part.addmm_(x, levels(drawn[: part.shape[-1]], self.stream).mT, alpha=step)
        return result


class Weights(NamedTuple):
    """One post-norm block per trial. The norms have no weights: at initialisation they are 1 and 0.

    Of a sampler with `passing=True` the uniform ones are `Passing`, which have no `weight` to look at.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear | None
    expand: Linear
    contract: Linear


# By name, the schemes of models.initialisers without W_O, as in Prop. 2.9; and two that only studies use.
SETTINGS: dict[str, Scheme] = {
    **{name: replace(scheme, output=None) for name, scheme in SCHEMES.items()},
    "theorem, He FFN": replace(SCHEMES["theorem"], output=None, ffn=HE),
    "paper_text, W_O, Xavier FFN": replace(SCHEMES["paper_text"], output=DEFAULT, ffn=XAVIER),
}


class Sampler:
    """Draws the weights of `trials` independent blocks, again and again into the same buffers.

    The tensors of one draw are overwritten by the next: whoever needs two blocks at once takes two samplers.
    `passing`: what is uniform is drawn at each use, coarsely (`Passing`). With `value_inputs=n` a Gaussian W_V of d
    inputs is drawn as one of n < d, for `attend(…, values_of=root(x))`.
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
        passing: bool = False,
        value_inputs: int | None = None,
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
        self._jobs: list[tuple[Linear | Passing, Law, float, np.random.Generator]] = []
        linears: dict[str, Linear | Passing | None] = {}
        for (name, (law, fan_in, fan_out)), stream in zip(shapes.items(), streams, strict=True):
            if law is None:
                linears[name] = None
                continue
            deviation, given = law.deviation(fan_in, fan_out, heads), fan_in
            if name == "value" and value_inputs is not None:
                if not law.gaussian:
                    raise ValueError(f"expected a setting whose W_V is Gaussian for value_inputs, got {setting!r}")
                given = value_inputs
            bias = torch.empty(trials, 1, fan_out, dtype=dtype) if law.bias else None
            linear: Linear | Passing
            if passing and not law.gaussian:
                linear = Passing((trials, fan_out, given), uniform_bound(deviation), stream, bias)
            else:
                linear = Linear(torch.empty(trials, fan_out, given, dtype=dtype), bias)
            linears[name] = linear
            self._jobs.append((linear, law, deviation, stream))
        self._weights = Weights(**linears)  # type: ignore[arg-type]

    def draw(self) -> Weights:
        """Fresh weights, in the buffers of the last draw."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda job: _fill(*job), self._jobs))
        return self._weights


def _fill(linear: Linear | Passing, law: Law, deviation: float, stream: np.random.Generator) -> None:
    """Draws what is kept of one matrix of every trial, from its own stream."""
    if isinstance(linear, Linear):
        if law.gaussian:
            fill_gaussian(linear.weight, deviation, stream)
        else:
            fill_uniform(linear.weight, uniform_bound(deviation), stream)
    if linear.bias is not None:
        fill_uniform(linear.bias, bias_bound(linear.shape[-1]), stream)


@dataclass(frozen=True)
class Size:
    """How large a simulation is: what the configurations of these studies share, with its weights and its tokens."""

    tokens: int = 64
    width: int = 512
    heads: int = 8
    trials: int = 10
    seed: int = 0

    def parts(self, most: int) -> list[tuple[int, int]]:
        """Trials in parts of at most so many, for the memory: the number of each part, and how many trials it has."""
        return list(enumerate(chunks(self.trials, most)))

    def sampler(self, setting: str, trials: int, *seed: int, **more: Any) -> Sampler:
        """Of so many blocks at once; the seed follows the configuration's."""
        return Sampler(setting, trials=trials, width=self.width, heads=self.heads, seed=(self.seed, *seed), **more)

    def start(self, trials: int, *seed: int, streams: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal tokens (trials, streams, n, d), the same for all streams."""
        return standard_normal_tokens(trials, streams, self.tokens, self.width, (self.seed, *seed), dtype)
