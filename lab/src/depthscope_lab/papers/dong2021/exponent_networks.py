"""The networks of `dong2021.exponent`: random layers, what each case makes of them, and how its residual is followed.

All cases go through the same weights: one matrix of N(0, 1/d) each for queries, keys, values and outputs, taken as
one head or cut into several. Trials are a batch axis. The MLPs have a Lipschitz constant λ that grows with a dial g
(Cor. 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.measures import composite_norm, composite_residual, effective_rank
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
from depthscope.theory.residuals import (
    around_each,
    around_mean,
    attend_pairs,
    feed_forward_uncentred,
    normalise_uncentred,
)
from depthscope_lab.papers.simulation.randomness import generators

ROUNDED = {"float32, whole tokens": torch.float32, "float64, whole tokens": torch.float64}
FLOOR = 1e-290  # below, float64 has fewer digits


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

    while True:
        query, key, value, output = (matrix(width, width) for _ in range(4))
        yield Layer(
            one=_cut(query, key, value, output, 1),
            many=_cut(query, key, value, output, heads),
            expand=matrix(width, 4 * width),
            contract=matrix(4 * width, width),
        )


def _cut(query: Tensor, key: Tensor, value: Tensor, output: Tensor, heads: int) -> Heads:
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in (query, key, value))
    return Heads(query, key, value @ output.unflatten(-2, (heads, -1)))


def first_tokens(trials: int, n: int, width: int, seed: tuple[int, ...]) -> SplitTokens:
    """A shared token and differences from it, both N(0, 1)."""
    (stream,) = generators(seed, 1)
    shared = torch.from_numpy(stream.standard_normal((trials, 1, width)))
    return SplitTokens.of(shared + torch.from_numpy(stream.standard_normal((trials, n, width))))


def _blind(heads: Heads, tokens: SplitTokens) -> Heads:
    """Queries and values that do not see the direction of the shared token: (I − x̂x̂ᵀ)W."""
    unit = tokens.shared / torch.linalg.vector_norm(tokens.shared, dim=-1, keepdim=True)
    sees = torch.eye(unit.shape[-1], dtype=unit.dtype) - unit.unsqueeze(-1) * unit.unsqueeze(-2)
    sees = sees.unsqueeze(-3)  # (trials, 1, d, d)
    return heads._replace(query=sees @ heads.query, value=sees @ heads.value)


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
    "blind, LN": lambda x, layer: normalise(attend(x, _blind(layer.many, x))),
}


PURE_HEADS: dict[str, Callable[[Layer], Heads]] = {  # whose layers the theorems are about
    "one head": lambda layer: layer.one,
    "several heads": lambda layer: layer.many,
}


def order_of(step: Step, tokens: SplitTokens, layer: Layer) -> Tensor:
    """p of e' ∝ e^p at this point: log₂ of how much smaller e' becomes when R is halved, (trials)."""
    whole, half = (composite_norm(step(tokens.scaled(size), layer).residual) for size in (1.0, 0.5))
    return torch.log2(whole / half)


def relative(tokens: SplitTokens) -> Tensor:
    """‖R‖_{1,∞}/‖X‖_{1,∞}: `composite_residual`, with the residual that was carried."""
    return composite_norm(tokens.residual) / composite_norm(tokens.tokens)


def on_whole_tokens(tokens: Tensor, heads: Heads) -> Tensor:
    """The same attention layer as everybody computes it: on X, in the precision of X."""
    x = tokens.unsqueeze(-3)
    query, key, value = (part.to(x.dtype) for part in heads[:3])
    scores = (x @ query) @ (x @ key).mT / key.shape[-1] ** 0.5
    return (torch.softmax(scores, dim=-1) @ x @ value).sum(dim=-3)


def rounded(start: Tensor, source: Iterator[Layer], depth: int) -> np.ndarray:
    """The relative residual behind each layer, (depth + 1, trials), of one head on whole tokens."""
    found = [composite_residual(start)]
    for _ in range(depth):
        start = on_whole_tokens(start, next(source).one)
        found.append(composite_residual(start))
    return torch.stack(found).numpy()


def follow(case: str, tokens: SplitTokens, source: Iterator[Layer], depth: int) -> pd.DataFrame:
    """A case from the first tokens to the last layer, or to the layer before its residual leaves float64.

    Columns: residual (e = ‖R‖_{1,∞}), relative (to ‖X‖_{1,∞}), rank (effective, of X), order (`order_of`, of the next
    layer), exponent (log(e_l/e_{l−1})/log(e_{l−1}/e_{l−2})); of pure attention also `layer_contraction` of the next.
    """
    step, frames, trials = CASES[case], [], np.arange(len(tokens.shared))
    for place in range(depth + 1):
        residual = composite_norm(tokens.residual)
        if (residual < FLOOR).any():
            break
        layer = next(source)
        columns = {
            "residual": residual,
            "relative": relative(tokens),
            "rank": effective_rank(tokens.tokens, exact=True),
            "order": order_of(step, tokens, layer),
        }
        if case in PURE_HEADS:
            found = layer_contraction(tokens, PURE_HEADS[case](layer))
            columns |= {name: getattr(found, name) for name in ("constant", "gamma", "sharp", "largest_range", "after")}
            columns |= {name: getattr(found.paper, name) for name in ("threshold", "log_bound")}
        values = {name: column.numpy() for name, column in columns.items()}
        frames.append(pd.DataFrame({"part": "depth", "case": case, "layer": place, "trial": trials, **values}))
        tokens = step(tokens, layer)
    frame = pd.concat(frames, ignore_index=True)
    steps = np.log(frame["residual"]).groupby(frame["trial"]).diff()
    frame["exponent"] = steps / steps.groupby(frame["trial"]).shift(1)
    frame.loc[frame["order"].abs() == np.inf, "order"] = np.nan  # the halved tokens have left float64
    return frame


ENDED = 1e-100  # a residual that is gone: the next layers leave float64


class MlpKind(NamedTuple):
    """An MLP with a dial g that multiplies its Lipschitz constant."""

    activation: str
    inside: bool  # φ(g·XW₁)W₂ instead of g·φ(XW₁)W₂
    norm: bool = False  # LayerNorm behind it

    def weights(self, layer: Layer, gains: Tensor) -> Mlp:
        """(trials, gains, …)."""
        expand, contract, g = layer.expand.unsqueeze(1), layer.contract.unsqueeze(1), gains[:, None, None]
        return Mlp(
            g * expand if self.inside else expand,
            contract if self.inside else g * contract,
            activation=self.activation,
        )


KINDS: dict[str, MlpKind] = {
    "g·ReLU": MlpKind("relu", inside=False),
    "g·GELU, LN": MlpKind("gelu", inside=False, norm=True),
    "tanh(g·)": MlpKind("tanh", inside=True),
    "sin(g·)": MlpKind("sine", inside=True),
}


def _columns(layer: Layer) -> Heads:
    """With an axis for the gains."""
    return Heads(*(None if part is None else part.unsqueeze(1) for part in layer.many))  # type: ignore[arg-type]


def with_mlp(start: SplitTokens, stack: list[Layer], kind: MlpKind, gains: Tensor) -> Iterator[SplitTokens]:
    """What leaves each layer, (trials, gains, n, d), for all gains through the same weights."""
    x = start
    for layer in stack:
        x = feed_forward(attend(x, _columns(layer)), kind.weights(layer, gains))
        x = normalise(x) if kind.norm else x
        yield x


def pairs_with_mlp(start: SplitTokens, stack: list[Layer], kind: MlpKind, gain: Tensor) -> Iterator[SplitTokens]:
    """The same for one gain, (trials, n, d), by pairs: a large gain makes groups of tokens."""
    x = around_each(start)
    for layer in stack:
        x = feed_forward_uncentred(attend_pairs(x, _columns(layer)), kind.weights(layer, gain[None]))
        x = normalise_uncentred(x) if kind.norm else x
        yield around_mean(x)


def spread(tokens: SplitTokens, gains: Tensor) -> SplitTokens:
    """The same tokens for every gain."""
    shared, residual = tokens.shared.unsqueeze(1), tokens.residual.unsqueeze(1)
    count = len(gains)
    return SplitTokens(shared.expand(-1, count, -1), residual.expand(-1, count, -1, -1))


def layers_until_ended(start: SplitTokens, stack: list[Layer], kind: MlpKind, gains: Tensor) -> Tensor:
    """The first layer behind which the residual is below 1e-100, (trials, gains); nan if there is none."""
    found = torch.full((len(start.shared), len(gains)), torch.nan, dtype=torch.float64)
    for column, gain in zip(found.unbind(dim=-1), gains, strict=True):
        for place, x in enumerate(pairs_with_mlp(start, stack, kind, gain), start=1):
            column[column.isnan() & (composite_norm(x.residual) < ENDED)] = float(place)
            if not column.isnan().any():
                break
    return found


def critical_residual(
    start: SplitTokens, stack: list[Layer], kind: MlpKind, gains: Tensor, *, steps: int = 16, gone: float = 1e-10
) -> Tensor:
    """The residual of the first tokens above which the collapse stops, (trials, gains), by bisection in its logarithm.

    The same differences, smaller or larger; collapsed is what is below `gone` behind the last layer of the stack. nan
    where even differences ten times as large collapse.
    """
    wide = spread(start, gains)
    low = torch.full((len(start.shared), len(gains)), -8.0, dtype=torch.float64)
    high = torch.full_like(low, 1.0)
    for _ in range(steps):
        middle = (low + high) / 2
        for x in with_mlp(wide.scaled((10**middle)[..., None, None]), stack, kind, gains):
            last = x
        collapsed = composite_norm(last.residual) < gone
        low, high = torch.where(collapsed, middle, low), torch.where(collapsed, high, middle)
    found = 10**low * composite_norm(start.residual).unsqueeze(-1)
    return torch.where(high < 1, found, torch.nan)


def promised_residual(layer: Layer, kind: MlpKind, gains: Tensor, tokens: int) -> Tensor:
    """c^(−1/2) of Cor. 3.2 for this layer, (trials, gains): below, the theorem promises a collapse; γ = √n at most."""
    heads = layer.many
    return collapse_bound(
        torch.ones(len(heads.query), len(gains)),
        beta=weight_product(heads).unsqueeze(-1),
        key_width=heads.key.shape[-1],
        gamma=tokens**0.5,
        heads=heads.query.shape[-3],
        lipschitz=lipschitz_bound(kind.weights(layer, gains)),
    ).threshold
