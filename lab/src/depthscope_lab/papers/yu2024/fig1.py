"""Yu & Zhang 2024, Fig. 1: BERT and ALBERT with 100 layers, as Hugging Face initialises them.

t_sim and t_cos of what leaves every block, for English text (Python's manual, cut by a WordPiece tokenizer
trained on it) and, as a control, for random ids; and BERT's gradient norm per block with respect to its
weights. ALBERT's blocks share one set of weights, so it has no gradient norm per block; the paper leaves it out too.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.drawing import BLACK, GREEN, SKY, VERMILION, label, legend_below, panels
from depthscope.measures import ALIKE, EQUAL
from depthscope.models.families import build_family
from depthscope.probing import Profile, probe
from depthscope.progress import Share, Tick
from depthscope.text import Text, cut, read_text, train_tokenizer
from depthscope_lab.papers.study import Claim, Study, judge

FAMILIES = ("bert", "albert")
MEASURES, NAMES = ("token_similarity", "cosine_similarity"), ("t_sim", "t_cos")
_TITLES = {"bert": "BERT", "albert": "ALBERT"}
_VOCABULARY = 30_000  # ALBERT's; BERT's is a little larger, and both read the same ids
_RESERVED = 8  # ids below have a meaning of their own (padding, start, end)


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 100
    width: int = 768  # of the base models; another width keeps heads of 64
    tokens: int = 128
    samples: int = 8
    gradient_samples: int = 2  # of the text; what backpropagation keeps of 100 blocks is about 1 GB per sample


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: family, input, block, sample (−1: of the batch's loss), measure, value, and the text's hash.

    The manual, and with it every number, differs between versions of Python.
    """
    frames = []
    text = read_text(None)
    inputs = _inputs(config, text)
    done, work = 0, config.depth * (2 * len(FAMILIES) + 2)  # a pass back costs about as much as two forward

    def advance() -> None:
        nonlocal done
        done += 1
        progress(min(1.0, done / work))

    for family in FAMILIES:
        model: Any = build_family(family, config.depth, config.width, seed=config.seed)
        for name, ids in inputs.items():
            profile = probe(model, _batch(ids), measures=MEASURES, progress=advance)
            frames.append(_rows(profile, family, name, MEASURES))
        if family == "bert":
            profile = _gradients(model, inputs["text"][: config.gradient_samples], advance)
            frames.append(_rows(profile, family, "text", ("weight_gradient",)))
        del model  # 100 blocks of BERT are 2.8 GB: gone before the next model comes
        gc.collect()
    progress(1.0)
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


def _inputs(config: Config, text: Text) -> dict[str, Tensor]:
    """Ids (samples, n) of English text, and random ones."""
    ids = torch.tensor(cut(text, train_tokenizer(text, _VOCABULARY), config.tokens, config.samples))
    generator = torch.Generator().manual_seed(config.seed)
    return {"text": ids, "random ids": torch.randint(_RESERVED, _VOCABULARY, ids.shape, generator=generator)}


def _batch(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _gradients(model: Any, ids: Tensor, advance: Tick) -> Profile:
    """‖∂loss/∂weights‖ of every block; the loss is the last output's product with a fixed random matrix."""
    return probe(model, _batch(ids), measures=MEASURES[:1], gradients=True, progress=advance)


def _rows(profile: Profile, family: str, name: str, measures: tuple[str, ...]) -> pd.DataFrame:
    frame = profile.frame
    rows = frame.loc[
        (frame["station"] == "output") & frame["measure"].isin(measures), ["block", "sample", "measure", "value"]
    ]
    return rows.assign(family=family, input=name)[["family", "input", "block", "sample", "measure", "value"]]


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(3, width=3.6, height=3.6)
    curves: tuple[tuple[str, str, str, dict[str, Any]], ...] = (  # wide under narrow: they nearly coincide
        ("text", MEASURES[0], "t_sim, text", {"color": SKY, "linewidth": 4}),
        ("text", MEASURES[1], "t_cos, text", {"color": VERMILION, "linewidth": 1.4}),
        ("random ids", MEASURES[0], "t_sim, random ids", {"color": BLACK, "linewidth": 1.4, "linestyle": ":"}),
    )
    for ax, family in zip(axes, FAMILIES, strict=False):
        for name, measure, text, style in curves:
            curve = _curve(frame, family, name, measure)
            ax.plot(curve.index, curve, label=text, **style)
        ax.set(ylim=(0, 1.02), xlim=(0, curve.index[-1]))
        label(ax, _TITLES[family], "block", "similarity")
    gradient = _curve(frame, "bert", "text", "weight_gradient")
    axes[2].plot(gradient.index, gradient, color=GREEN, linewidth=1.6, label="BERT, weights of the block")
    axes[2].set(ylim=(0, 1.15 * gradient.max()), xlim=(0, gradient.index[-1]))
    label(axes[2], "Gradient norm", "block", "‖∂loss/∂weights‖")
    legend_below(axes, columns=2)
    return figure


def _curve(frame: pd.DataFrame, family: str, name: str, measure: str) -> pd.Series:
    rows = frame[(frame["family"] == family) & (frame["input"] == name) & (frame["measure"] == measure)]
    return rows.groupby("block")["value"].mean()


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    deep = config.depth >= 60  # before that BERT has not got there, in the paper's figure either
    return [
        *(_escalates(frame, family, deep) for family in FAMILIES),
        _identical(frame, config.tokens),
        _control(frame),
        _constant(frame),
        judge(
            "ALBERT has a gradient norm per block",
            paper="only BERT's is shown (§1.1, Fig. 1)",
            ours="left out: its blocks share one set of weights, which has one gradient",
            tolerance="none",
            holds=None,
        ),
    ]


def _escalates(frame: pd.DataFrame, family: str, deep: bool) -> Claim:
    curves = [_curve(frame, family, "text", measure) for measure in MEASURES]
    ends = [f"{name} {curve.iloc[0]:.3f} → {curve.iloc[-1]:.4f}" for name, curve in zip(NAMES, curves, strict=True)]
    passed = [f"{level} at block {_first(curves[0], level)}" for level in (ALIKE, EQUAL) if curves[0].max() > level]
    rising = all(curve.iloc[-1] > curve.iloc[0] for curve in curves)
    return judge(
        f"similarity escalates to unity in {_TITLES[family]}",
        paper="“in either model both token similarity and cosine similarity escalate to unity” (§1.1)",
        ours="; ".join([", ".join(ends), *([f"t_sim passes {' and '.join(passed)}"] if passed else [])]),
        tolerance=f"{EQUAL:g} at the last block, both measures",
        holds=all(bool(curve.iloc[-1] > EQUAL) for curve in curves) if deep else None if rising else False,
        note="" if deep else "needs 60 blocks; similarity rises",
    )


def _identical(frame: pd.DataFrame, tokens: int) -> Claim:
    apart = max(
        (_curve(frame, family, "text", MEASURES[0]) - _curve(frame, family, "text", MEASURES[1])).abs().max()
        for family in FAMILIES
    )
    limit = 1 / tokens + 0.005
    return judge(
        "t_sim and t_cos follow the same curve",
        paper="“the escalation patterns for the two measures appear almost identical” (§1.1)",
        ours=f"at most {apart:.4f} apart at any block of either model",
        tolerance=f"{limit:.3f}: t_sim counts a token with itself, up to 1/n; 0.005 for tokens of unequal norm",
        holds=bool(apart < limit),
    )


def _control(frame: pd.DataFrame) -> Claim:
    apart = max(
        (_curve(frame, family, "text", MEASURES[0]) - _curve(frame, family, "random ids", MEASURES[0])).abs().max()
        for family in FAMILIES
    )
    return judge(
        "random ids give the same curve as text: similarity comes from the model",
        paper="not in the paper; its input is not named",
        ours=f"t_sim at most {apart:.3f} apart",
        tolerance="0.05",
        holds=bool(apart < 0.05),
        note=f"the text is Python's manual, sha256 {frame['text_sha256'].iloc[0][:12]}…",
    )


def _constant(frame: pd.DataFrame) -> Claim:
    gradient = _curve(frame, "bert", "text", "weight_gradient")
    ratio = gradient.max() / gradient.min()
    per_block = np.exp(np.polyfit(gradient.index, np.log(gradient), 1)[0])
    return judge(
        "BERT's gradient norm neither vanishes nor explodes",
        paper="“remains roughly at a constant level” (§1.1, Fig. 1)",
        ours=f"largest over smallest {ratio:.2f}; changes by a factor of {per_block:.4f} per block",
        tolerance="a factor of 3 over all blocks: vanishing or exploding is orders of magnitude",
        holds=bool(ratio < 3),
    )


def _first(curve: pd.Series, level: float) -> int:
    return int(curve.index[curve > level][0])


STUDY = Study(
    "yu2024-fig1",
    full=Config(),
    quick=Config(depth=12, width=128, tokens=64, samples=4, gradient_samples=1),
    compute=compute,
    draw=draw,
    claims=claims,
)
