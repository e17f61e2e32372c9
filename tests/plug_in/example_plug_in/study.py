"""A study: two pure functions and its claims."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from depthscope import probe
from depthscope.drawing import panels
from depthscope_lab.papers.study import Claim, Study, judge
from example_plug_in.models import Soft


@dataclass(frozen=True)
class Config:
    depth: int = 4
    seed: int = 0


def compute(config: Config, progress: Any) -> pd.DataFrame:
    torch.manual_seed(config.seed)
    curve = probe(Soft(config.depth), torch.randn(4, 9, 16)).curve("token_similarity")
    progress(1.0)
    return pd.DataFrame({"block": range(len(curve)), "similarity": curve})


def draw(frame: pd.DataFrame) -> Any:
    figure, (axes,) = panels(1)
    axes.plot(frame["block"], frame["similarity"])
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    first, last = frame["similarity"].iloc[[0, -1]]
    return [
        judge(
            "a mean in the place of attention makes tokens more alike",
            paper="ours",
            ours=f"{first:.3f} → {last:.3f} over {config.depth} blocks",
            tolerance="it rises",
            holds=bool(last > first),
        )
    ]


STUDY = Study("soft-mean", full=Config(), quick=Config(depth=2), compute=compute, draw=draw, claims=claims)
