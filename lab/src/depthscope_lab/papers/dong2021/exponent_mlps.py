"""The MLPs of `dong2021.exponent`: attention and an MLP whose Lipschitz constant λ grows with a dial g (Cor. 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures import composite_norm
from depthscope.theory import (
    Heads,
    Mlp,
    SplitTokens,
    attend,
    collapse_bound,
    feed_forward,
    lipschitz_bound,
    normalise,
    weight_product,
)
from depthscope.theory.pairs import around_each, around_mean, attend_pairs, feed_forward_pairs
from depthscope.theory.residuals import normalise_uncentred
from depthscope_lab.papers.dong2021.exponent_runs import Layer

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


def with_mlp(start: SplitTokens, stack: list[Layer], kind: MlpKind, gains: Tensor) -> Iterator[SplitTokens]:
    """What leaves each layer, (trials, gains, n, d), for all gains through the same weights."""
    x = start
    for layer in stack:
        heads = Heads(*(None if part is None else part.unsqueeze(1) for part in layer.many))  # type: ignore[arg-type]
        x = feed_forward(attend(x, heads), kind.weights(layer, gains))
        x = normalise(x) if kind.norm else x
        yield x


def pairs_with_mlp(start: SplitTokens, stack: list[Layer], kind: MlpKind, gain: Tensor) -> Iterator[SplitTokens]:
    """The same for one gain, (trials, n, d), by `theory.pairs`: a large gain makes groups of tokens."""
    x = around_each(start)
    for layer in stack:
        heads = Heads(*(None if part is None else part.unsqueeze(1) for part in layer.many))  # type: ignore[arg-type]
        x = feed_forward_pairs(attend_pairs(x, heads), kind.weights(layer, gain[None]))
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
