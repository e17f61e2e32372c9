"""Dong et al. 2021, the figures of BERT, ALBERT and XLNet: what is left beside the mean token, with and without skips.

y = ‖X − 1x̄ᵀ‖_{1,∞}/‖X‖_{1,∞} of what leaves every block, for pure attention (SAN), with MLPs, with skips, with both.
The base shapes with fresh weights, MiniLM as a real pretrained BERT where it is installed, and with `--data FOLDER` any
BERT, ALBERT or XLNet that a user has. Each in float32, as in the paper, and in float64. All four variants have the same
weights; the paper draws new ones for each.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from depthscope.drawing import BLUE, GREEN, ORANGE, VERMILION, block_axis, label, line_with_band, panels, shared_legend
from depthscope.models.families import build_family
from depthscope.progress import Share, Tick
from depthscope.text import cut, read_text, train_tokenizer
from depthscope_lab.papers.dong2021.collapse_claims import NO_POSITIONS, claims_of
from depthscope_lab.papers.dong2021.pretrained import FAMILIES, given, minilm
from depthscope_lab.papers.dong2021.residuals import Residuals, residuals_of, table
from depthscope_lab.papers.dong2021.variants import VARIANTS, left_out, other_readings
from depthscope_lab.papers.study import Claim, Study, Work, curve, rows

TITLES = {"bert": "BERT, fresh", "albert": "ALBERT, fresh", "xlnet": "XLNet, fresh"}
COLOURS = dict(zip(VARIANTS, (VERMILION, ORANGE, BLUE, GREEN), strict=True))
_VOCABULARY = 28_000  # below those of all three
_BATCH = 4


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 12
    width: int = 768
    tokens: int = 128
    samples: int = 8  # the paper has 32
    few: int = 4  # samples of other draws of the weights, and of other readings of the variants
    draws: int = 4  # of other weights, in float32
    data: str | None = None  # a folder with weights of BERT, ALBERT or XLNet


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: model, weights, variant, source, draw, block, sample, value, spread.

    `source` is "float32" (as the authors compute it), "float32 exact" (the same tokens, measured without rounding),
    "float64", or "paper": its means and their spread over samples, read off its vector graphics.
    """
    text = read_text(None)
    ids = torch.tensor(cut(text, train_tokenizer(text, _VOCABULARY), config.tokens, config.samples, spread=True))
    few = ids[: config.few]
    pretrained = [*minilm(), *given(config.data)]
    work = Work(_batches(config, len(pretrained)) * (config.depth + 1), progress)
    frames = [_paper()]
    for family in FAMILIES:
        for draw in range(config.draws + 1):
            model = build_family(family, config.depth, config.width, seed=config.seed + draw)
            about = {"model": family, "family": family, "weights": "init", "draw": draw}
            frames += _all_variants(model, few if draw else ids, few, about, work, only_float32=draw > 0)
    for found in pretrained:
        own = found.ids(text, config.tokens, config.samples)
        about = {"model": found.name, "family": found.family, "weights": "pretrained", "draw": 0}
        frames += _all_variants(found.load(), own, own[: config.few], about, work)
    progress(1.0)
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


def _batches(config: Config, pretrained: int) -> int:
    """How many batches of _BATCH samples there are in all."""
    big, small = (math.ceil(count / _BATCH) for count in (config.samples, config.few))
    whole = 8 * big
    return len(FAMILIES) * (whole + 4 * config.draws * small) + (3 + 2) * small + pretrained * (whole + small)


def _all_variants(
    model: Any, ids: Tensor, few: Tensor, about: dict[str, Any], tick: Tick, *, only_float32: bool = False
) -> list[pd.DataFrame]:
    """The authors' four variants in float32 and float64; other readings of them on few samples.

    The model ends up in float64, and XLNet with fresh weights without the scores of its relative positions.
    """
    family, frames = about["family"], []
    for variant in VARIANTS:
        frames += _rows(residuals_of(model, ids, left_out(family, variant), _BATCH, tick), about, variant, "float32")
    if only_float32:
        return frames
    for variant in other_readings(family):
        frames += _rows(residuals_of(model, few, left_out(family, variant), _BATCH, tick), about, variant, "float32")
    model = model.double()
    for variant in VARIANTS:
        frames += _rows(residuals_of(model, ids, left_out(family, variant), _BATCH, tick), about, variant, "float64")
    if family == "xlnet" and about["weights"] == "init":
        for layer in model.layer:
            layer.rel_attn.r.data.zero_()  # the keys of positions
        frames += _rows(residuals_of(model, few, left_out(family, "SAN"), _BATCH), about, NO_POSITIONS, "float64")
    return frames


def _rows(found: Residuals, about: dict[str, Any], variant: str, dtype: str) -> list[pd.DataFrame]:
    """Of float64 the exact reading alone, which has the name of the number format."""
    sources = {"float32": found.plain, "float32 exact": found.exact} if dtype == "float32" else {dtype: found.exact}
    about = {"variant": variant, "spread": math.nan, **about}
    return [table(value=values).assign(source=name, **about) for name, values in sources.items()]


def _paper() -> pd.DataFrame:
    """The paper's curves: one row per block, the mean over its 32 texts and their standard deviation."""
    path = files("depthscope_lab.papers.dong2021") / "collapse_in_the_paper.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        (family, family, weights, variant, block, mean, spread)
        for family, by_weights in known.items()
        for weights, by_variant in by_weights.items()
        for variant, curve in by_variant.items()
        for block, (mean, spread) in enumerate(zip(curve["mean"], curve["spread"], strict=True))
    ]
    columns = ["model", "family", "weights", "variant", "block", "value", "spread"]
    return pd.DataFrame(rows, columns=columns).assign(source="paper", draw=0, sample=-1)


def draw(frame: pd.DataFrame) -> Any:
    """A column per model: above on the paper's axis, below in powers of ten."""
    shown = frame[frame["source"] != "paper"][["model", "weights", "family"]].drop_duplicates()
    figure, axes = panels(len(shown), 2, width=3.4, height=3.0)
    for place, (model, weights, family) in enumerate(shown.itertuples(index=False)):
        own = rows(frame, model=model, draw=0, weights=weights)
        paper = rows(frame, source="paper", family=family, weights=weights)
        linear, powers = axes[place], axes[place + len(shown)]
        for ax in (linear, powers):
            for variant, colour in COLOURS.items():
                _draw_variant(ax, rows(own, variant=variant), colour, variant)
                _draw_paper(ax, rows(paper, variant=variant), colour, variant, hidden=model == "MiniLM")
            block_axis(ax, int(own["block"].max()), first=0)
        linear.set_ylim(0, 1.05)
        powers.set_yscale("log")
        powers.set_ylim(1e-16, 2)
        label(linear, TITLES.get(model, f"{model}, pretrained"), "", "" if place else "‖res‖ / ‖X‖, composite norm")
        label(powers, "", "block", "" if place else "the same, in powers of ten")
    shared_legend(figure, axes[0], columns=6)
    return figure


def _draw_variant(ax: Any, own: pd.DataFrame, colour: str, name: str) -> None:
    wide = 3.6 if name == "SAN" else 1.6  # with and without MLPs nearly coincide where skips are gone
    for source, line in (("float32", "-"), ("float64", ":")):
        mean = curve(own, "block", source=source)
        said = f"{name}, {source}"
        line_with_band(ax, mean.index, mean, colour=colour, name=said, linewidth=wide, linestyle=line)


def _draw_paper(ax: Any, own: pd.DataFrame, colour: str, name: str, *, hidden: bool) -> None:
    """Circles, with the spread over the paper's texts; it has no MiniLM."""
    if not hidden:
        circles = {"fmt": "o", "markersize": 4, "markerfacecolor": "none", "linewidth": 0.8, "color": colour}
        ax.errorbar(own["block"], own["value"], own["spread"], label=f"{name}, paper", **circles)


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    is_paper = (config.depth, config.width, config.tokens) == (12, 768, 128)
    return claims_of(frame, is_paper=is_paper)


STUDY = Study(
    "dong2021-collapse",
    full=Config(),
    quick=Config(width=64, tokens=24, samples=2, few=2, draws=1),
    compute=compute,
    draw=draw,
    claims=claims,
)
