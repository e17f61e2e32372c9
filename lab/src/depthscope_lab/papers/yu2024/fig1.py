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

from depthscope.drawing import BLACK, GREEN, SKY, VERMILION, legend_below, panels
from depthscope.measures import ALIKE, EQUAL
from depthscope.models.families import build_family
from depthscope.probing import probe
from depthscope.progress import Share
from depthscope.text import cut, read_text, train_tokenizer
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.subjects import as_batch
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line

FAMILIES = {"bert": "BERT", "albert": "ALBERT"}
MEASURES = ("token_similarity", "cosine_similarity")
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

    The manual, and with it every number, differs between versions of Python. The gradient is ‖∂loss/∂weights‖ of every
    block; the loss is the last output's product with a fixed random matrix.
    """
    text = read_text(None)
    ids = torch.tensor(cut(text, train_tokenizer(text, _VOCABULARY), config.tokens, config.samples))
    generator = torch.Generator().manual_seed(config.seed)
    inputs = {"text": ids, "random ids": torch.randint(_RESERVED, _VOCABULARY, ids.shape, generator=generator)}
    # A pass back costs about as much as two forward.
    advance, frames = Work(config.depth * (2 * len(FAMILIES) + 2), progress), []
    for family in FAMILIES:
        model: Any = build_family(family, config.depth, config.width, seed=config.seed)
        runs: list[tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]]
        runs = [(name, as_batch(ids), MEASURES, {}) for name, ids in inputs.items()]
        if family == "bert":
            few = as_batch(ids[: config.gradient_samples])
            runs.append(("text", few, MEASURES[:1], {"gradients": True}))
        for name, batch, measures, options in runs:
            frame = probe(model, batch, measures=measures, stations="output", progress=advance, **options).frame
            kept = frame["measure"].isin(["weight_gradient"] if options else measures)
            frame = frame[(frame["station"] == "output") & kept].assign(family=family, input=name)
            frames.append(frame[["family", "input", "block", "sample", "measure", "value"]])
        del model  # 100 blocks of BERT are 2.8 GB: gone before the next model comes
        gc.collect()
    progress(1.0)
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(3, width=3.6, height=3.6)
    curves: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (  # wide under narrow: they nearly coincide
        ("text", MEASURES[0], "t_sim, text", SKY, {"linewidth": 4}),
        ("text", MEASURES[1], "t_cos, text", VERMILION, {"linewidth": 1.4}),
        ("random ids", MEASURES[0], "t_sim, random ids", BLACK, {"linewidth": 1.4, "linestyle": ":"}),
    )
    for ax, (family, title) in zip(axes, FAMILIES.items(), strict=False):
        for name, measure, text, colour, style in curves:
            line(ax, curve(frame, family=family, input=name, measure=measure), colour, text, **style)
        axis(ax, title, "block", "similarity", ylim=(0, 1.02), xlim=(0, frame["block"].max()))
    gradient = curve(frame, measure="weight_gradient")
    line(axes[2], gradient, GREEN, "BERT, weights of the block")
    top, last = 1.15 * gradient.max(), gradient.index[-1]
    axis(axes[2], "Gradient norm", "block", "‖∂loss/∂weights‖", ylim=(0, top), xlim=(0, last))
    legend_below(axes, columns=2)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    text = {f: [curve(frame, family=f, input="text", measure=measure) for measure in MEASURES] for f in FAMILIES}
    random = {f: curve(frame, family=f, input="random ids", measure=MEASURES[0]) for f in FAMILIES}
    by_input = max((text[family][0] - random[family]).abs().max() for family in FAMILIES)
    gradient = curve(frame, measure="weight_gradient")
    ratio = gradient.max() / gradient.min()
    per_block = np.exp(np.polyfit(gradient.index, np.log(gradient), 1)[0])
    return [
        *(_escalates(name, text[family][0], text[family][1], config.depth) for family, name in FAMILIES.items()),
        judge(
            "random ids give the same curve as text: similarity comes from the model",
            "not in the paper; its input is not named",
            f"t_sim at most {by_input:.3f} apart",
            "0.05",
            by_input < 0.05,
            f"the text is Python's manual, sha256 {frame['text_sha256'].iloc[0][:12]}…",
        ),
        judge(
            "BERT's gradient norm neither vanishes nor explodes",
            "“remains roughly at a constant level” (§1.1, Fig. 1)",
            f"largest over smallest {ratio:.2f}; changes by a factor of {per_block:.4f} per block",
            "a factor of 3 over all blocks: vanishing or exploding is orders of magnitude",
            ratio < 3,
        ),
    ]


def _escalates(name: str, t_sim: pd.Series, t_cos: pd.Series, depth: int) -> Claim:
    both = {"t_sim": t_sim, "t_cos": t_cos}
    ends = ", ".join(f"{n} {c.iloc[0]:.3f} → {c.iloc[-1]:.4f}" for n, c in both.items())
    passed = [f"{level} at block {t_sim.index[t_sim > level][0]}" for level in (ALIKE, EQUAL) if t_sim.max() > level]
    rising = all(c.iloc[-1] > c.iloc[0] for c in both.values())
    deep = depth >= 60  # before that BERT has not got there, in the paper's figure either
    return judge(
        f"similarity escalates to unity in {name}",
        "“in either model both token similarity and cosine similarity escalate to unity” (§1.1)",
        ends + (f"; t_sim passes {' and '.join(passed)}" if passed else ""),
        f"{EQUAL:g} at the last block, both measures",
        all(c.iloc[-1] > EQUAL for c in both.values()) if deep else None if rising else False,
        "" if deep else "needs 60 blocks; similarity rises",
    )


QUICK = Config(0, 12, 128, tokens=64, samples=4, gradient_samples=1)
STUDY = Study("yu2024-fig1", Config(), QUICK, compute, draw, claims)
