"""Yu & Zhang 2024, Fig. 5: token diversity under de-escalation with three τ; our prediction; the transition at τ_c.

The paper does not say whether diversity is measured before or after the operation, nor, in agreement with its own
figures, how W is drawn: both places and two settings are shown. The sweep over τ (ours) shows that similarity
and gradients change sides at the same τ_c = 1 − ρ^(−1/2): order below it, chaos above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope import drawing
from depthscope.measures import token_diversity
from depthscope.progress import Share
from depthscope.remedies import deescalate
from depthscope.theory import OddsMap, measure_map, token_odds
from depthscope_lab.papers.simulation.blocks import input_gradient, post_norm_block
from depthscope_lab.papers.simulation.randomness import standard_normal_tokens
from depthscope_lab.papers.simulation.weights import Sampler, Size, Weights
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows, table

LEVELS = {0.1: 0.0, 0.5: 0.5, 1.0: 1.0}  # by τ, what the paper's text reads off its figure
TAUS = tuple(LEVELS)
SETTINGS = ("theorem", "paper_text, W_O, Xavier FFN")
SWEEPS = ("theorem, He FFN", "theorem")
SWEEP_TAUS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.24, 0.27, 0.3, 0.33, 0.36, 0.4, 0.5, 0.6, 0.8, 1.0)
CRITICAL = 1 - 2**-0.5  # τ_c at ρ = 2, which is what α = 1 and dσ² = 1 give
CHUNK = 10  # runs at once
MAP_CHUNK, MAP_DRAWS = 10, 40  # fresh blocks for ρ and c of a setting: ρ is then known to about √(1.5/d)/√40, or 1 %
_COLUMNS = ["part", "setting", "tau", "block", "trial", "quantity", "value"]


@dataclass(frozen=True)
class Config(Size):
    blocks: int = 30
    trials: int = 20
    sweep_tokens: int = 32
    sweep_width: int = 256
    sweep_blocks: int = 40
    sweep_trials: int = 3


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: part (levels, predicted, map, sweep, sweep mean), setting, tau, block, trial, quantity, value."""
    work, frames = Work(len(SETTINGS) + len(SWEEPS) * config.sweep_trials, progress), []
    for number, setting in enumerate(SETTINGS):
        frames += [frame.assign(setting=setting) for frame in _levels(setting, config, number)]
        work()
    for (number, setting), trial in product(enumerate(SWEEPS), range(config.sweep_trials)):
        swept = _sweep(setting, config, (config.seed, 10 + number, trial))
        frames.append(swept.assign(part="sweep", setting=setting, block=config.sweep_blocks, trial=trial))
        work()
    frame = pd.concat(frames, ignore_index=True).fillna({"block": 0, "trial": 0}).astype({"block": int, "trial": int})
    sweep = rows(frame, part="sweep")
    logs = sweep.assign(value=np.log(sweep["value"])).groupby(["setting", "tau", "quantity"], sort=False)["value"]
    means = np.exp(logs.mean()).reset_index()  # geometric, over the trials
    means = means.assign(part="sweep mean", block=config.sweep_blocks, trial=-1)
    return pd.concat([frame, means], ignore_index=True)[_COLUMNS]


@torch.no_grad()
def _levels(setting: str, config: Config, number: int) -> Iterator[pd.DataFrame]:
    blocks = range(1, config.blocks + 1)
    for part, size in config.parts(CHUNK):
        sampler = config.sampler(setting, size, number, part, 0)
        x = config.start(size, number, part, 1, streams=len(TAUS))
        both: dict[str, list[Tensor]] = {"before": [], "after": []}
        for _ in blocks:
            x = post_norm_block(sampler.draw(), x, heads=config.heads).output
            both["before"].append(token_diversity(x))
            x = deescalate(x, torch.tensor(TAUS)[:, None, None])
            both["after"].append(token_diversity(x))
        trials = range(part * CHUNK, part * CHUNK + size)
        for quantity, values in both.items():  # (blocks, trials, τ)
            found = table({"value": torch.stack(values).double()}, block=blocks, trial=trials, tau=TAUS)
            yield found.assign(part="levels", quantity=quantity)
    shape = {name: getattr(config, name) for name in ("tokens", "width", "heads")}
    block_map = fresh_map(setting, **shape, seed=(config.seed, number))
    known = {"rho": block_map.rho, "feed": block_map.feed}
    yield pd.DataFrame({"part": "map", "tau": math.nan, "quantity": known.keys(), "value": known.values()})
    for tau in TAUS:
        levels = predicted_diversities(block_map, tau, blocks=config.blocks, tokens=config.tokens)
        about = {"part": "predicted", "tau": tau, "block": blocks, "quantity": "before"}
        yield pd.DataFrame({**about, "value": levels})


def _sweep(setting: str, config: Config, seed: tuple[int, ...]) -> pd.DataFrame:
    """Per τ: the diversity before the last operation, and how odds and gradient grow per block in the second half."""
    blocks, half = config.sweep_blocks, config.sweep_blocks // 2
    size = {"tokens": config.sweep_tokens, "width": config.sweep_width, "heads": config.heads}
    found, norms = odds_and_gradients(setting, torch.tensor(SWEEP_TAUS), blocks=blocks, **size, seed=seed)
    numbers = {
        "diversity": 1 / (1 + found[-1]),
        "odds_growth": (found[-1] / found[half - 1]) ** (1 / (blocks - half)),
        "gradient_growth": (norms[half] / norms[-1]) ** (1 / (blocks - half)),
    }
    values = torch.stack([values.double() for values in numbers.values()])
    return table({"value": values}, quantity=numbers, tau=SWEEP_TAUS)


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
    sampler, found = Sampler(setting, trials=MAP_CHUNK, width=width, heads=heads, seed=(*seed, 4)), []
    for part in range(MAP_DRAWS // MAP_CHUNK):
        weights = sampler.draw()

        def block(x: Tensor, weights: Weights = weights) -> Tensor:
            return post_norm_block(weights, x, heads=heads).output

        x = standard_normal_tokens(MAP_CHUNK, 1, tokens, width, (*seed, 5, part))
        found.append(measure_map(block, x))
    return OddsMap(rho=geometric_mean([m.rho for m in found]), feed=geometric_mean([m.feed for m in found]))


def predicted_diversities(block_map: OddsMap, tau: float, *, blocks: int, tokens: int) -> list[float]:
    """t_div before the de-escalation of blocks 1 … L, from independent tokens (s = 1/(n − 1))."""
    carried = [block_map.after(1 / (tokens - 1), block, tau) for block in range(blocks)]  # enter each block
    return [1 / (1 + block_map.after(s, 1)) for s in carried]


def escalating_slope(taus: Tensor, growth: Tensor, *, least: float = 1.1) -> float | None:
    """τ at which the odds stop to grow: where the line √growth = (1 − τ)√ρ through the escalating τ reaches 1.

    `growth` is that of the odds per block; only τ where it exceeds `least` take part. None with fewer than two.
    """
    escalating = growth > least
    if int(escalating.sum()) < 2:
        return None
    slope, start = np.polyfit(taus[escalating].numpy(), growth[escalating].sqrt().numpy(), 1)
    return float((1 - start) / slope)


def draw(frame: pd.DataFrame) -> Any:
    figure, (left, middle, right) = drawing.panels(3, width=3.9, height=4.0)
    for ax, setting in ((left, SETTINGS[0]), (middle, SETTINGS[1])):
        for tau, colour in zip(TAUS, (drawing.BLUE, drawing.ORANGE, drawing.GREEN), strict=True):
            own = rows(frame, setting=setting, tau=tau)
            for quantity, look in (("before", {"linewidth": 1.8}), ("after", {"linewidth": 0.9, "linestyle": "--"})):
                runs = rows(own, part="levels", quantity=quantity).groupby("block")["value"]
                spread = runs.std() if quantity == "before" else None
                line(ax, runs.mean(), colour, f"τ = {tau:g}, {quantity}", spread, **look)
            once = "our prediction, before" if tau == TAUS[0] else None
            guess = curve(own, part="predicted", quantity="before")
            line(ax, guess, drawing.BLACK, once, linestyle=":", linewidth=1.2)
        last = int(rows(frame, part="levels")["block"].max())
        axis(ax, f"Initialiser: {setting}", "block", "token diversity t_div", ylim=(-0.02, 1.04), last=last)
    axis(right, "Sweep of τ: order and chaos", "strength τ of de-escalation", "t_div, last block, before")
    twin = drawing.second_axis(right, "growth of the gradient per block", drawing.VERMILION)
    for setting, dashes in zip(SWEEPS, ("-", "--"), strict=True):
        name = "He FFN" if "He" in setting else "default FFN"
        look = {"linestyle": dashes, "linewidth": 1.5}
        line(right, _swept(frame, setting, "diversity"), drawing.BLUE, f"t_div, {name}", **look)
        line(twin, _swept(frame, setting, "gradient_growth"), drawing.VERMILION, f"gradient, {name}", **look)
    twin.axhline(1, color=drawing.VERMILION, linewidth=0.6, zorder=0)
    right.axvline(CRITICAL, color=drawing.BLACK, linestyle=":", linewidth=1.2, label="τ_c = 1 − 1/√2")
    handles = [*right.get_lines(), *twin.get_lines()[: len(SWEEPS)]]
    drawing.legend_below(right, columns=2, handles=handles)
    drawing.legend_below([left, middle], columns=2)
    return figure


def _swept(frame: pd.DataFrame, setting: str, quantity: str) -> pd.Series:
    """By τ."""
    return curve(frame, by="tau", part="sweep mean", setting=setting, quantity=quantity)


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    def at_end(part: str, setting: str, tau: float, quantity: str) -> float:
        """The mean over runs at the last block."""
        return float(curve(frame, part=part, setting=setting, tau=tau, quantity=quantity).iloc[-1])

    found = []
    for tau, setting in product((0.1, 0.5), SETTINGS):  # at τ = 1 the level after the operation is 1 by construction
        before, after = (at_end("levels", setting, tau, quantity) for quantity in ("before", "after"))
        claim = judge(
            f"τ = {tau:g} keeps diversity around {LEVELS[tau]:g}, initialiser {setting}",
            "§3.2: the levels “are around 0, 0.5 and 1, respectively”",
            f"{before:.3f} before the operation, {after:.3f} after it, at block {config.blocks}",
            "within 0.1, before or after: read off a plot, and the paper does not say which",
            min(abs(before - LEVELS[tau]), abs(after - LEVELS[tau])) < 0.1,
        )
        found.append(claim)
    for setting in SETTINGS:
        off = {t: abs(at_end("predicted", setting, t, "before") - at_end("levels", setting, t, "before")) for t in TAUS}
        rho, feed = (rows(frame, part="map", setting=setting, quantity=q)["value"].iloc[0] for q in ("rho", "feed"))
        claim = judge(
            f"the map of the odds predicts all three levels, initialiser {setting}",
            "ours; the paper: “such a behavior seems quite predictable”",
            f"ρ = {rho:.2f}, c = {feed:.3f}, measured on fresh blocks; off by "
            + ", ".join(f"{gap:.3f} (τ = {tau:g})" for tau, gap in off.items()),
            "0.1 in t_div before the operation at the last block",
            max(off.values()) < 0.1,
            f"its τ_c is {OddsMap(float(rho), float(feed)).critical_tau:.3f}: the closer τ, the more ρ's error counts",
        )
        found.append(claim)
    seen, crossing, sides = {}, [], []
    for setting in SWEEPS:
        odds, gradient = (_swept(frame, setting, name) for name in ("odds_growth", "gradient_growth"))
        seen[setting] = escalating_slope(*(torch.tensor(values.to_numpy()) for values in (odds.index, odds)))
        some = ", ".join(f"{gradient[tau]:.3f} (τ = {tau:g})" for tau in (0.2, 0.3, 0.5, 1.0))
        crossing.append(f"{setting}: {some}")
        sides.append(gradient[gradient.index <= CRITICAL - 0.05].max() < 1 < gradient[gradient.index >= 0.4].min())
    return [
        *found,
        judge(
            "the transition from order to chaos stands at τ_c = 1 − ρ^(−1/2)",
            "ours; the paper leaves the choice of τ open",
            "; ".join(f"{name}: {value:.3f}" if value else f"{name}: none" for name, value in seen.items())
            + f" against {CRITICAL:.3f} for ρ = 2",
            "0.03, the step of the sweep",
            all(value is not None and abs(value - CRITICAL) < 0.03 for value in seen.values()),
            "where √(growth of the odds per block) = (1 − τ)√ρ, fitted where the odds escalate, reaches 1",
        ),
        judge(
            "gradients shrink where τ < τ_c and grow where τ > τ_c",
            "ours: order on one side, chaos on the other",
            "growth per block " + "; ".join(crossing),
            f"below 1 for every τ ≤ {CRITICAL - 0.05:.2f}, above 1 for every τ ≥ 0.4",
            all(sides),
            f"second half of {config.sweep_blocks} blocks; gradient of ⟨a random matrix, the last output⟩",
        ),
    ]


QUICK = Config(tokens=32, width=128, blocks=20, trials=4, sweep_tokens=16, sweep_width=64, sweep_trials=2)
STUDY = Study("yu2024-fig5", Config(), QUICK, compute, draw, claims)
