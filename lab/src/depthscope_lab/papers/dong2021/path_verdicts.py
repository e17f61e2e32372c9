"""What the study of paths claims, and how each claim is judged."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pandas as pd

from depthscope_lab.papers.study import Claim, curve, judge, rows

PAPER = {"sorting": 0.98, "convex hull": 0.90, "memorisation": 0.85}  # the whole network, Fig. 4
_RANDOM = {"sorting": 0.10, "convex hull": 0.54, "memorisation": 0.50}
NEAR = 0.05  # of an accuracy
CARRIES = 0.5  # the share of a network's advance over a token without attention that counts as "the majority"
ROUNDING = 1e-8
RISE = 0.02  # of an accuracy, that is no rise
_CAPTION = "“performance can be seen to consistently deteriorate with respect to path length”"
_FALLING = f"no rise of more than {RISE} from one length to the next, mean over seeds, and the last below the first"


def claims(frame: pd.DataFrame, config: Any) -> list[Claim]:
    found = [_judge_sum(frame)]
    for task in config.recipes:
        found += _judge_task(rows(frame, task=task), task, config)
    return [*found, *_judge_moving(rows(frame, part="moving"))]


def _judge_sum(frame: pd.DataFrame) -> Claim:
    worst = rows(frame, part="check")["value"].max()
    return judge(
        "the sums over all paths of each length and the constant part add up to what leaves the last block",
        paper="Thm 2.1, for attention and skips; ours: with norms and FFN frozen too",
        ours=f"largest difference {worst:.0e}, float64",
        tolerance=f"{ROUNDING:g}",
        holds=bool(worst < ROUNDING),
    )


def _levels(found: pd.DataFrame, mode: str, reading: str) -> pd.DataFrame:
    """Accuracy by length (rows) and seed (columns)."""
    chosen = rows(found, part="accuracy", mode=mode, reading=reading)
    return chosen.pivot(index="length", columns="seed", values="value")


def _single(found: pd.DataFrame, mode: str, reading: str = "") -> pd.Series:
    """One accuracy per seed."""
    chosen = rows(found, part="accuracy", mode=mode, reading=reading)
    return chosen.set_index("seed")["value"]


def _told(levels: pd.DataFrame) -> str:
    """Means over seeds, and the range over seeds, by length."""
    return ", ".join(f"{row.mean():.2f} [{row.min():.2f}, {row.max():.2f}]" for _, row in levels.iterrows())


def _falls(levels: pd.DataFrame) -> bool:
    """Whether the mean over seeds falls from every length to the next, but for rises of at most `RISE`."""
    means = levels.mean(axis=1)
    return all(longer <= shorter + RISE for shorter, longer in pairwise(means)) and means.iloc[0] > means.iloc[-1]


def _judge_task(found: pd.DataFrame, task: str, config: Any) -> list[Claim]:
    recipe = config.recipes[task]
    whole, alone = _single(found, "whole"), _single(found, "baseline", "token alone")
    majority, guess = _single(found, "baseline", "majority").mean(), _single(found, "baseline", "guess").mean()
    ceiling = _single(found, "baseline", "ceiling").mean()
    frozen, constant = _levels(found, "frozen", "alone"), _levels(found, "frozen", "with constant")
    recomputed, sampled = _levels(found, "recomputed", "alone"), _levels(found, "recomputed", "sampled")
    up_to, learnt = _levels(found, "frozen", "up to"), whole.mean() > alone.mean() + NEAR
    advance = float(whole.mean() - alone.mean())
    depth = recipe.shape.depth
    half = depth // 2
    reached = (up_to.loc[half].mean() - alone.mean()) / advance if learnt else float("nan")
    spread = float(curve(found, "length", "error", mode="recomputed", reading="sampled").max())
    untrained = "" if learnt else "the network has not learnt more than a token knows of itself"
    made = [
        judge(
            f"{task}: the network learns the task as well as in the paper",
            paper=f"Fig. 4: accuracy {PAPER[task]:.2f}, a “random predictor” {_RANDOM[task]:.2f}",
            ours=f"{whole.mean():.3f} [{whole.min():.3f}, {whole.max():.3f}]; without attention {alone.mean():.3f}, "
            f"most frequent label {majority:.3f}, guess {guess:.2f}, ceiling {ceiling:.3f}",
            tolerance=f"at least the paper's less {NEAR}, or {NEAR} below the ceiling that the inputs set",
            holds=bool(whole.mean() >= min(PAPER[task], ceiling) - NEAR),
            note=f"learning rate {recipe.rate:g} (paper {recipe.paper_rate:g}), {recipe.epochs} epochs of "
            f"{recipe.size.train} sequences; {config.trials} seeds, [least, most]",
        ),
        judge(
            f"{task}: from length 1 on, recomputed paths, all of each length, do worse the longer they are",
            paper=f"Fig. 4: {_CAPTION}",
            ours=f"lengths 0 to {depth}: {_told(recomputed)}",
            tolerance=_FALLING,
            holds=_falls(recomputed.loc[1:]) if learnt else None,
            note=untrained,
        ),
        judge(
            f"{task}: from length 1 on, the theorem's terms do worse the longer their paths are",
            paper=f"Fig. 4: {_CAPTION}, read as a statement about Thm 2.1",
            ours=f"lengths 0 to {depth}: {_told(frozen)}; with the constant part: {_told(constant)}",
            tolerance=f"{_FALLING}; without the constant part, and with it",
            holds=_falls(frozen.loc[1:]) and _falls(constant.loc[1:]) if learnt else None,
            note=untrained,
        ),
        judge(
            f"{task}: the path of length 0, which has no attention, does best",
            paper=f"Fig. 4: {_CAPTION}; its code begins with length 0",
            ours=f"recomputed {recomputed.loc[0].mean():.2f}, length 1 {recomputed.loc[1].mean():.2f}; as a term of "
            f"the theorem {frozen.loc[0].mean():.2f}, length 1 {frozen.loc[1].mean():.2f}",
            tolerance="at least as good as every other length, in both modes, mean over seeds",
            holds=all(modes.mean(axis=1).idxmax() == 0 for modes in (recomputed, frozen)) if learnt else None,
            note=untrained,
        ),
        judge(
            f"{task}: terms of short paths, up to half the depth, carry the majority of the performance",
            paper="Fig. 4: “short paths are responsible for the majority of the expressive power”",
            ours=f"terms up to length {half} and the constant part: accuracy {up_to.loc[half].mean():.3f}, "
            f"{reached:.0%} of the network's advance over a token without attention",
            tolerance=f"more than {CARRIES:.0%} of the advance",
            holds=bool(reached > CARRIES) if learnt else None,
            note=untrained or f"lengths up to 0, …, {depth}: {_told(up_to)}",
        ),
        judge(
            f"{task}: {config.sampled} sampled paths show what all paths of a length do",
            paper="Fig. 4: 5 or 20 paths per length, drawn with replacement",
            ours=f"sampled: {_told(sampled)}; largest standard deviation between samples {spread:.2f}",
            tolerance=f"mean over samples within {NEAR} of all paths, at every length",
            holds=bool((sampled.mean(axis=1) - recomputed.mean(axis=1)).abs().max() < NEAR),
        ),
    ]
    printed = rows(found, part="as printed")["value"]
    if len(printed):
        value = float(printed.iloc[0])
        made.append(
            judge(
                f"{task}: the rate {recipe.paper_rate:g} of the authors' code gives the paper's accuracy in "
                f"{recipe.epochs} epochs",
                paper=f"the authors' code and its README; Fig. 4: {PAPER[task]:.2f}",
                ours=f"{value:.3f}, seed {config.seed}",
                tolerance=f"at least the paper's less {NEAR}",
                holds=value >= PAPER[task] - NEAR,
                note="without dropout, and from nn.Linear's weights; the authors' are from N(0, .02²) in part",
            )
        )
    return made


def _judge_moving(moving: pd.DataFrame) -> list[Claim]:
    if moving.empty:
        return []
    shares = rows(moving, reading="share").groupby(["step", "length"])["value"].mean().unstack()
    sizes = shares.drop(columns=-1).abs()  # the constant part has no length
    mean_length = (sizes * sizes.columns.to_numpy()).sum(axis=1) / sizes.sum(axis=1)  # Σ k|share_k|/Σ|share_k|
    first, last = mean_length.index[0], mean_length.index[-1]
    told = "; ".join(f"step {step}: {value:.2f}" for step, value in mean_length.items())
    return [
        judge(
            "while the network learns to sort, its output moves to longer paths",
            paper="not in the paper; ours",
            ours=f"mean length, weighted by |share|: {told}; length 0 has {shares.loc[first, 0]:.2f} of the output "
            f"at the start, {shares.loc[last, 0]:.2f} at the end",
            tolerance="the mean length at the end is above that at the start by at least 0.2",
            holds=bool(mean_length.loc[last] > mean_length.loc[first] + 0.2),
        )
    ]
