"""What the tests of the page share: a small model that was measured in every way, trainings, an opened page."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

import depthscope


@dataclass(frozen=True)
class Measured:
    """A post-norm encoder of six blocks with random weights: it collapses."""

    profile: depthscope.Profile
    fixed: depthscope.Fixed
    shares: depthscope.PathShares
    spectra: depthscope.Spectra
    use: depthscope.DepthUse


def training(*names: str) -> pd.DataFrame:
    rows = [
        (name, seed, step, "loss", 1 / (1 + step) + seed / 10)
        for name in names
        for seed in (0, 1)
        for step in (0, 5, 10)
    ]
    return pd.DataFrame(rows, columns=["series", "seed", "step", "quantity", "value"])


def watched(*names: str) -> pd.DataFrame:
    rows = [
        (name, step, block, "output", "token_similarity", block / 4)
        for name in names
        for step in (0, 5)
        for block in range(5)
    ]
    return pd.DataFrame(rows, columns=["series", "step", "block", "station", "measure", "value"])


def compared(*names: str) -> dict[str, Any]:
    """The summary of a fair comparison, as far as a page shows it."""
    cells = [
        {"variant": name, "depth": depth, "lr": 1e-3, "judged": "test_loss", "rank": "equal"}
        | {"test_loss": 1.0, "test_loss_low": 0.9, "test_loss_high": 1.1}
        for name in names
        for depth in (12, 24)
    ]
    return {"cells": cells, "verdict": ["12 blocks: all are equal."]}


@dataclass
class Opened:
    """A page in the browser, with all that it complained about and asked for."""

    page: Any
    complaints: list[str]
    requests: list[str]
