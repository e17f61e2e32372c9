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


@dataclass
class Opened:
    """A page in the browser, with all that it complained about and asked for."""

    page: Any
    complaints: list[str]
    requests: list[str]
