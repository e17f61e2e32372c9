"""What Fig. 5 of Yu & Zhang 2024 is drawn from: de-escalated runs, their prediction, and the sweep over τ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from depthscope.progress import Share
from depthscope.theory import OddsMap
from depthscope_lab.papers.simulation.randomness import chunks, standard_normal_tokens
from depthscope_lab.papers.simulation.weights import Sampler
from depthscope_lab.papers.yu2024.sweep import (
    diversities,
    fresh_map,
    odds_and_gradients,
    predicted_diversities,
)

TAUS = (0.1, 0.5, 1.0)
SETTINGS = ("theorem", "paper_text, W_O, Xavier FFN")
SWEEPS = ("theorem, He FFN", "theorem")
SWEEP_TAUS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.24, 0.27, 0.3, 0.33, 0.36, 0.4, 0.5, 0.6, 0.8, 1.0)
CHUNK = 10  # runs at once


@dataclass(frozen=True)
class Config:
    tokens: int = 64
    width: int = 512
    heads: int = 8
    blocks: int = 30
    trials: int = 20
    sweep_tokens: int = 32
    sweep_width: int = 256
    sweep_blocks: int = 40
    sweep_trials: int = 3
    seed: int = 0


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: part (levels, predicted, map, sweep, sweep mean), setting, tau, block, trial, quantity, value."""
    rows: list[dict[str, object]] = []
    parts = len(SETTINGS) + len(SWEEPS) * config.sweep_trials
    for number, setting in enumerate(SETTINGS):
        rows += _levels(setting, config, (config.seed, number))
        progress((number + 1) / parts)
    for number, setting in enumerate(SWEEPS):
        for trial in range(config.sweep_trials):
            rows += _sweep(setting, trial, config, (config.seed, 10 + number, trial))
            progress((len(SETTINGS) + number * config.sweep_trials + trial + 1) / parts)
    frame = pd.DataFrame(rows)
    return pd.concat([frame, _sweep_means(frame, config)], ignore_index=True)


def _sweep_means(frame: pd.DataFrame, config: Config) -> pd.DataFrame:
    """Rows of the part `sweep mean`: geometric means over the trials of the sweep, by setting, τ and quantity."""
    sweep = frame[frame["part"] == "sweep"]
    logs = sweep.assign(value=np.log(sweep["value"])).groupby(["setting", "tau", "quantity"], sort=False)["value"]
    means = np.exp(logs.mean()).reset_index()
    return means.assign(part="sweep mean", block=config.sweep_blocks, trial=-1)[frame.columns.tolist()]


def _levels(setting: str, config: Config, seed: tuple[int, ...]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for part, size in enumerate(chunks(config.trials, CHUNK)):
        sampler = Sampler(setting, trials=size, width=config.width, heads=config.heads, seed=(*seed, part, 0))
        x = standard_normal_tokens(size, len(TAUS), config.tokens, config.width, (*seed, part, 1))
        found = diversities(sampler, x, torch.tensor(TAUS), blocks=config.blocks, heads=config.heads)
        for quantity, values in zip(("before", "after"), found, strict=True):  # (blocks, trials, τ)
            for (block, trial, place), value in np.ndenumerate(values.numpy()):
                at = {"tau": TAUS[place], "block": block + 1, "trial": part * CHUNK + trial}
                rows.append({"part": "levels", "setting": setting, **at, "quantity": quantity, "value": value})
    block_map = fresh_map(setting, tokens=config.tokens, width=config.width, heads=config.heads, seed=seed)
    for name, value in (("rho", block_map.rho), ("feed", block_map.feed)):
        at = {"tau": math.nan, "block": 0, "trial": 0}
        rows.append({"part": "map", "setting": setting, **at, "quantity": name, "value": value})
    return rows + _predicted(setting, block_map, config)


def _predicted(setting: str, block_map: OddsMap, config: Config) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for tau in TAUS:
        curves = predicted_diversities(block_map, tau, blocks=config.blocks, tokens=config.tokens)
        for quantity, curve in zip(("before", "after"), curves, strict=True):
            for block, value in enumerate(curve, start=1):
                at = {"tau": tau, "block": block, "trial": 0}
                rows.append({"part": "predicted", "setting": setting, **at, "quantity": quantity, "value": value})
    return rows


def _sweep(setting: str, trial: int, config: Config, seed: tuple[int, ...]) -> list[dict[str, object]]:
    """Per τ: the diversity before the last operation, and how odds and gradient grow per block in the second half."""
    blocks, half = config.sweep_blocks, config.sweep_blocks // 2
    found, norms = odds_and_gradients(
        setting,
        torch.tensor(SWEEP_TAUS),
        blocks=blocks,
        tokens=config.sweep_tokens,
        width=config.sweep_width,
        heads=config.heads,
        seed=seed,
    )
    numbers = {
        "diversity": 1 / (1 + found[-1]),
        "odds_growth": (found[-1] / found[half - 1]) ** (1 / (blocks - half)),
        "gradient_growth": (norms[half] / norms[-1]) ** (1 / (blocks - half)),
    }
    return [
        {"part": "sweep", "setting": setting, "tau": tau, "block": blocks, "trial": trial, "quantity": name, "value": v}
        for name, values in numbers.items()
        for tau, v in zip(SWEEP_TAUS, values.tolist(), strict=True)
    ]
