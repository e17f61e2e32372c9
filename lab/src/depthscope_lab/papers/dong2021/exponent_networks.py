"""The networks of `dong2021.exponent`: random layers, what each case makes of them, and how its residual is followed.

All cases go through the same weights: one matrix of N(0, 1/d) each for queries, keys, values and outputs, taken as
one head or cut into several. Trials are a batch axis. The MLP sin(g·XW₁)W₂ has a Lipschitz constant λ that grows with
its gain g (Cor. 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.measures import composite_norm, composite_residual
from depthscope.theory import (
    Heads,
    Mlp,
    SplitTokens,
    attend,
    attend_causally,
    collapse_bound,
    feed_forward,
    layer_contraction,
    lipschitz_bound,
    normalise,
    weight_product,
)
from depthscope_lab.papers.simulation.randomness import generators

ROUNDED = {"float32, whole tokens": torch.float32, "float64, whole tokens": torch.float64}
FLOOR = 1e-290  # below, float64 has fewer digits
ENDED = 1e-100  # a residual that is gone: the next layers leave float64


class Layer(NamedTuple):
    """The weights of one layer, one per trial."""

    one: Heads  # (trials, 1, d, d)
    many: Heads  # (trials, h, d, d/h)
    expand: Tensor  # (trials, d, 4d)
    contract: Tensor  # (trials, 4d, d)


Step = Callable[[SplitTokens, Layer], SplitTokens]


def layers(trials: int, width: int, heads: int, seed: tuple[int, ...]) -> Iterator[Layer]:
    """Layer after layer, without end."""
    (stream,) = generators(seed, 1)

    def matrix(fan_in: int, fan_out: int) -> Tensor:
        return torch.from_numpy(stream.standard_normal((trials, fan_in, fan_out)) / fan_in**0.5)

    def cut(query: Tensor, key: Tensor, value: Tensor, output: Tensor, heads: int) -> Heads:
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in (query, key, value))
        return Heads(query, key, value @ output.unflatten(-2, (heads, -1)))

    while True:
        q, k, v, o = (matrix(width, width) for _ in range(4))
        yield Layer(cut(q, k, v, o, 1), cut(q, k, v, o, heads), matrix(width, 4 * width), matrix(4 * width, width))


def first_tokens(trials: int, n: int, width: int, seed: tuple[int, ...]) -> SplitTokens:
    """A shared token and differences from it, both N(0, 1)."""
    (stream,) = generators(seed, 1)
    shared = torch.from_numpy(stream.standard_normal((trials, 1, width)))
    return SplitTokens.of(shared + torch.from_numpy(stream.standard_normal((trials, n, width))))


def _tenth(heads: Heads) -> Heads:
    return heads._replace(value=heads.value / 10)


CASES: dict[str, Step] = {
    "one head": lambda x, layer: attend(x, layer.one),
    "several heads": lambda x, layer: attend(x, layer.many),
    "LN": lambda x, layer: normalise(attend(x, layer.many)),
    "MLP": lambda x, layer: feed_forward(attend(x, layer.many), Mlp(layer.expand, layer.contract)),
    "values / 10": lambda x, layer: attend(x, _tenth(layer.many)),
    "values / 10, LN": lambda x, layer: normalise(attend(x, _tenth(layer.many)), eps=0.0),
    "skip": lambda x, layer: x + attend(x, layer.many),
    "skip, LN": lambda x, layer: normalise(x + attend(x, layer.many)),
    "causal": lambda x, layer: attend_causally(x, layer.many),
}


def order_of(step: Step, tokens: SplitTokens, layer: Layer) -> Tensor:
    """p of e' ∝ e^p at this point: log₂ of how much smaller e' becomes when R is halved, (trials)."""
    whole, half = (composite_norm(step(tokens.scaled(size), layer).residual) for size in (1.0, 0.5))
    return torch.log2(whole / half)


def on_whole_tokens(tokens: Tensor, heads: Heads) -> Tensor:
    """The same attention layer as everybody computes it: on X, in the precision of X."""
    x = tokens.unsqueeze(-3)
    query, key, value = (part.to(x.dtype) for part in heads[:3])
    scores = (x @ query) @ (x @ key).mT / key.shape[-1] ** 0.5
    return (torch.softmax(scores, dim=-1) @ x @ value).sum(dim=-3)


def rounded(start: Tensor, source: Iterator[Layer], depth: int) -> Tensor:
    """The relative residual after each layer, (depth + 1, trials), of one head on whole tokens."""
    found = [composite_residual(start)]
    for _ in range(depth):
        start = on_whole_tokens(start, next(source).one)
        found.append(composite_residual(start))
    return torch.stack(found)


def follow(case: str, tokens: SplitTokens, source: Iterator[Layer], depth: int) -> pd.DataFrame:
    """A case from the first tokens to the last layer, or to the layer before its residual leaves float64.

    Columns: residual (e = ‖R‖_{1,∞}), relative (to ‖X‖_{1,∞}), order (`order_of`, of the next layer), exponent
    (log(e_l/e_{l−1})/log(e_{l−1}/e_{l−2})); of pure attention also `layer_contraction` of the next.
    """
    step, frames, trials = CASES[case], [], np.arange(len(tokens.shared))
    for place in range(depth + 1):
        residual = composite_norm(tokens.residual)
        if (residual < FLOOR).any():
            break
        layer = next(source)
        relative = residual / composite_norm(tokens.tokens)  # `composite_residual`, with the residual that was carried
        columns = {"residual": residual, "relative": relative, "order": order_of(step, tokens, layer)}
        if case in ("one head", "several heads"):  # the theorems are about these
            found = layer_contraction(tokens, layer.one if case == "one head" else layer.many)
            columns |= {name: getattr(found, name) for name in ("constant", "gamma", "largest_range", "after")}
            columns |= {name: getattr(found.paper, name) for name in ("threshold", "log_bound")}
        values = {name: column.numpy() for name, column in columns.items()}
        frames.append(pd.DataFrame({"part": "depth", "case": case, "layer": place, "trial": trials, **values}))
        tokens = step(tokens, layer)
    frame = pd.concat(frames, ignore_index=True)
    steps = np.log(frame["residual"]).groupby(frame["trial"]).diff()
    frame["exponent"] = steps / steps.groupby(frame["trial"]).shift(1)
    frame.loc[frame["order"].abs() == np.inf, "order"] = np.nan  # the halved tokens have left float64
    return frame


def sine(layer: Layer, gains: Tensor) -> Mlp:
    """sin(g·XW₁)W₂ for every gain, (trials, gains, …)."""
    return Mlp(gains[:, None, None] * layer.expand.unsqueeze(1), layer.contract.unsqueeze(1), activation="sine")


def with_mlp(start: SplitTokens, stack: list[Layer], gains: Tensor) -> Iterator[SplitTokens]:
    """What leaves each layer, (trials, gains, n, d); `start` is the same for all gains, or has an axis for them."""
    x = start
    if start.residual.dim() == 3:
        count = len(gains)
        shared, residual = start.shared.unsqueeze(1), start.residual.unsqueeze(1)
        x = SplitTokens(shared.expand(-1, count, -1), residual.expand(-1, count, -1, -1))
    for layer in stack:
        heads = Heads(*(None if part is None else part.unsqueeze(1) for part in layer.many))  # type: ignore[arg-type]
        x = feed_forward(attend(x, heads), sine(layer, gains))
        yield x


def layers_until_ended(start: SplitTokens, stack: list[Layer], gains: Tensor) -> Tensor:
    """The first layer after which the residual is below 1e-100, (trials, gains); nan if there is none."""
    found = torch.full((len(start.shared), len(gains)), torch.nan, dtype=torch.float64)
    for place, x in enumerate(with_mlp(start, stack, gains), start=1):
        found[found.isnan() & (composite_norm(x.residual) < ENDED)] = float(place)
    return found


def critical_residual(
    start: SplitTokens, stack: list[Layer], gains: Tensor, *, steps: int = 16, gone: float = 1e-10
) -> Tensor:
    """The residual of the first tokens above which the collapse stops, (trials, gains), by bisection in its logarithm.

    The same differences, smaller or larger; collapsed is what is below `gone` after the last layer of the stack. nan
    where even differences ten times as large collapse.
    """
    wide = SplitTokens(start.shared.unsqueeze(1), start.residual.unsqueeze(1))
    low = torch.full((len(start.shared), len(gains)), -8.0, dtype=torch.float64)
    high = torch.full_like(low, 1.0)
    for _ in range(steps):
        middle = (low + high) / 2
        *_, last = with_mlp(wide.scaled((10**middle)[..., None, None]), stack, gains)
        collapsed = composite_norm(last.residual) < gone
        low, high = torch.where(collapsed, middle, low), torch.where(collapsed, high, middle)
    found = 10**low * composite_norm(start.residual).unsqueeze(-1)
    return torch.where(high < 1, found, torch.nan)


def promised_residual(layer: Layer, gains: Tensor, tokens: int) -> Tensor:
    """c^(−1/2) of Cor. 3.2 for this layer, (trials, gains): below, the theorem promises a collapse; γ = √n at most."""
    heads = layer.many
    return collapse_bound(
        torch.ones(len(heads.query), len(gains)),
        beta=weight_product(heads).unsqueeze(-1),
        key_width=heads.key.shape[-1],
        gamma=tokens**0.5,
        heads=heads.query.shape[-3],
        lipschitz=lipschitz_bound(sine(layer, gains)),
    ).threshold
