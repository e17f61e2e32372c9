"""De-escalated post-norm blocks for many strengths τ at once: all τ go through the same weights, as streams."""

from __future__ import annotations

from functools import partial
from statistics import geometric_mean

import torch
from torch import Tensor

from depthscope.measures import token_diversity
from depthscope.remedies import deescalate
from depthscope.theory import OddsMap, measure_map, token_odds
from depthscope_lab.papers.simulation.blocks import input_gradient, post_norm_block
from depthscope_lab.papers.simulation.randomness import standard_normal_tokens
from depthscope_lab.papers.simulation.weights import Sampler, Weights

MAP_CHUNK, MAP_DRAWS = 10, 40  # fresh blocks for ρ and c of a setting: ρ is then known to about √(1.5/d)/√40, or 1 %


@torch.no_grad()
def diversities(sampler: Sampler, x: Tensor, taus: Tensor, *, blocks: int, heads: int) -> tuple[Tensor, Tensor]:
    """t_div of every block's output before and after its de-escalation; (blocks, trials, streams) each.

    x (trials, streams, n, d), taus (streams): stream i is de-escalated with τ_i at the end of every block.
    """
    before, after = [], []
    strength = taus[:, None, None].to(x.dtype)
    for _ in range(blocks):
        x = post_norm_block(sampler.draw(), x, heads=heads).output
        before.append(token_diversity(x))
        x = deescalate(x, strength)
        after.append(token_diversity(x))
    return torch.stack(before), torch.stack(after)


@torch.no_grad()
def odds_and_gradients(
    setting: str, taus: Tensor, *, blocks: int, tokens: int, width: int, heads: int, seed: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """One trial: the odds s just before each de-escalation (blocks, streams), and ‖gradient‖ at each block's input.

    The gradient is that of ⟨a random matrix, the last output⟩, (blocks + 1, streams), the last row at that output.
    Inputs and weights of all blocks are kept and each block is run again for its gradient: memory is
    blocks × (weights + streams × n × d).
    """
    kept: list[tuple[Weights, Tensor]] = []
    x = standard_normal_tokens(1, len(taus), tokens, width, (*seed, 1))
    strength = taus[:, None, None].to(x.dtype)
    found = []
    for block in range(blocks):
        weights = Sampler(setting, trials=1, width=width, heads=heads, seed=(*seed, 2, block)).draw()
        kept.append((weights, x))
        y = post_norm_block(weights, x, heads=heads).output
        found.append(token_odds(y)[0])
        x = deescalate(y, strength)
    gradient = standard_normal_tokens(1, len(taus), tokens, width, (*seed, 3))
    norms = [torch.linalg.vector_norm(gradient, dim=(-2, -1))[0]]
    while kept:
        weights, x = kept.pop()
        gradient = input_gradient(weights, x, gradient, heads=heads, tau=strength)
        norms.append(torch.linalg.vector_norm(gradient, dim=(-2, -1))[0])
    return torch.stack(found), torch.stack(norms[::-1])


@torch.no_grad()
def fresh_map(setting: str, *, tokens: int, width: int, heads: int, seed: tuple[int, ...]) -> OddsMap:
    """ρ and c of a setting, from fresh blocks and tokens that are not used elsewhere."""
    sampler = Sampler(setting, trials=MAP_CHUNK, width=width, heads=heads, seed=(*seed, 4))
    found = []
    for part in range(MAP_DRAWS // MAP_CHUNK):
        weights = sampler.draw()
        x = standard_normal_tokens(MAP_CHUNK, 1, tokens, width, (*seed, 5, part))
        found.append(measure_map(partial(_output, weights, heads), x))
    return OddsMap(rho=geometric_mean([m.rho for m in found]), feed=geometric_mean([m.feed for m in found]))


def _output(weights: Weights, heads: int, x: Tensor) -> Tensor:
    return post_norm_block(weights, x, heads=heads).output


def predicted_diversities(
    block_map: OddsMap, tau: float, *, blocks: int, tokens: int
) -> tuple[list[float], list[float]]:
    """t_div before and after the de-escalation of blocks 1 … L, from independent tokens (s = 1/(n − 1))."""
    start = 1 / (tokens - 1)
    carried = [block_map.after(start, block, tau) for block in range(blocks)]  # the odds that enter each block
    grown = [block_map.after(s, 1) for s in carried]
    return [1 / (1 + s) for s in grown], [1 / (1 + (1 - tau) ** 2 * s) for s in grown]


def escalating_slope(taus: Tensor, growth: Tensor, *, least: float = 1.1) -> float | None:
    """τ at which the odds stop to grow: where the line √growth = (1 − τ)√ρ through the escalating τ reaches 1.

    `growth` is that of the odds per block; only τ where it exceeds `least` take part. None with fewer than two.
    """
    escalating = growth > least
    if int(escalating.sum()) < 2:
        return None
    x, y = taus[escalating], growth[escalating].sqrt()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    return (x.mean() + (1 - y.mean()) / slope).item()
