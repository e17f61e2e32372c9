"""Ours: which lengths of path make the output of real models, beside how many paths of each length there are.

Dong et al. 2021 count paths (Fig. 5) and evaluate small networks path by path (Fig. 4). With all paths of a length
summed exactly (`depthscope.paths`) the same can be asked of models of any size: BERT and GPT-2 with fresh weights,
MiniLM where it is installed, and with `--data FOLDER` whatever a user has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from depthscope.attention_paths import paths
from depthscope.drawing import BLUE, GREY, VERMILION, panels, shared_legend
from depthscope.models.families import build_family
from depthscope.progress import Share
from depthscope.text import read_text
from depthscope.theory import path_length_shares
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.subjects import given, ids_of, minilm
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows

_FRESH = {"bert": "BERT, fresh", "gpt2": "GPT-2, fresh"}
SHORT = 1  # head at most: "short" where terms are compared


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 12
    width: int = 768
    tokens: int = 64
    samples: int = 4
    data: str | None = None  # a folder with weights, or with folders of them


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: model, weights, sample, length (−1: constant), the shares, and `counted`: Binomial(L, H/(H + 1))."""
    text = read_text(None)
    fresh = ids_of(text, config.tokens, config.samples)["input_ids"]
    pretrained = [*minilm(), *given(config.data, families=None)]
    work = Work(len(_FRESH) + len(pretrained), progress)
    frames = []
    for name, title in _FRESH.items():
        model = build_family(name, config.depth, config.width, seed=config.seed).eval()
        frames.append(_rows(model, fresh, title, "fresh"))
        work()
    for found in pretrained:
        ids = found.ids(text, config.tokens, config.samples)
        frames.append(_rows(found.load(), ids, found.name, "pretrained"))
        work()
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


def _rows(model: Any, ids: torch.Tensor, name: str, weights: str) -> pd.DataFrame:
    found = paths(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    heads = found.metadata["heads"]
    counted = [*path_length_shares(len(heads), heads).tolist(), np.nan]
    shares = found.frame.assign(model=name, weights=weights, depth=found.depth)
    return shares.assign(counted=[counted[length] for length in shares["length"]])


def draw(frame: pd.DataFrame) -> Any:
    """A column per model: shares along the output beside the counts, and below how unequal the tokens of a term are."""
    models = list(dict.fromkeys(frame["model"]))
    figure, axes = panels(len(models), 2, width=3.3, height=2.7)
    for model, share, residual in zip(models, axes, axes[len(models) :], strict=False):
        own, first = rows(frame[frame["length"] >= 0], model=model), model == models[0]
        by_length, counted = own.groupby("length"), curve(own, "counted", by="length")
        for ax, column, colour, name in (
            (share, "projection_share", BLUE, "share along the output"),
            (residual, "composite_residual", VERMILION, "composite residual of the term"),
        ):
            line(ax, by_length[column].mean(), colour, name, by_length[column].std())
        line(share, counted, GREY, "share of the number of paths", linestyle="--")
        last = int(counted.index.max())
        axis(share, model, "", "share" * first, first=0, last=last)
        y = "composite residual" * first
        axis(residual, "", "length of path", y, ylim=(0, 1.3), first=0, last=last)
    shared_legend(figure, axes[0])
    return figure


def _by_length(own: pd.DataFrame, column: str) -> pd.Series:
    """The mean over samples; the constant part has no length."""
    return curve(own[own["length"] >= 0], column, by="length")


def mean_length(own: pd.DataFrame, weight: str) -> float:
    """Σ k·w_k/Σ w_k over the lengths, with the mean of w over samples."""
    mean = _by_length(own, weight)
    return float((mean.index * mean).sum() / mean.sum())


def claims(frame: pd.DataFrame, _config: Config) -> list[Claim]:
    by_model = {str(model): own for model, own in frame.groupby("model", sort=False)}
    lengths = {name: [mean_length(own, by) for by in ("projection_share", "counted")] for name, own in by_model.items()}
    halves = {name: _up_to_half(own, int(own["depth"].iloc[0])) for name, own in by_model.items()}
    fresh = {name: own for name, own in by_model.items() if (own["weights"] == "fresh").all()}
    trained = {name: own for name, own in by_model.items() if name not in fresh}
    return [
        judge(
            "the paths that make the output are as long as the paths that there are",
            paper="Fig. 5 shows how many paths of each length architectures have",
            ours="; ".join(
                f"{name}: {own:.1f} along the output, {all_:.1f} counted" for name, (own, all_) in lengths.items()
            ),
            tolerance="mean lengths within 10 %, in every model",
            holds=all(abs(own - all_) < 0.1 * all_ for own, all_ in lengths.values()),
        ),
        judge(
            "paths through at most half of the blocks make most of the output",
            paper="“short paths are responsible for the majority of the expressive power” (Fig. 4, of small networks)",
            ours="; ".join(f"{name}: {half:.0%}" for name, half in halves.items()),
            tolerance="more than half of the share of all lengths, in every model",
            holds=all(half > 0.5 for half in halves.values()),
        ),
        _uniformity("with fresh weights", fresh),
        _uniformity("in pretrained weights", trained),
    ]


def _up_to_half(own: pd.DataFrame, depth: int) -> float:
    mean = _by_length(own, "projection_share")
    return float(mean[mean.index <= depth / 2].sum() / mean.sum())


def _uniformity(where: str, models: dict[str, pd.DataFrame]) -> Claim:
    ratios = {}
    for name, own in models.items():
        residual = _by_length(own, "composite_residual")
        depth = int(own["depth"].iloc[0])
        ratios[name] = residual[residual.index > depth / 2].mean() / residual[residual.index <= SHORT].mean()
    return judge(
        f"{where}, terms of long paths have tokens that are more alike",
        paper="§2: each path converges to rank one doubly exponentially in its length",
        ours="; ".join(f"{name}: × {ratio:.2f}" for name, ratio in ratios.items()) or "no pretrained model here",
        tolerance=f"composite residual beyond half of the depth at most half of that up to length {SHORT}",
        holds=all(ratio < 0.5 for ratio in ratios.values()) if ratios else None,
    )


QUICK = Config(depth=4, width=48, tokens=16, samples=2)
STUDY = Study("path-shares", Config(), QUICK, compute, draw, claims)
