"""Dong et al. 2021, the figures of BERT, ALBERT and XLNet: what is left beside the mean token, with and without skips.

y = ‖X − 1x̄ᵀ‖_{1,∞}/‖X‖_{1,∞} of what leaves every block, for pure attention (SAN), with MLPs, with skips, with both;
‖A‖_{1,∞} = √(‖A‖₁‖A‖_∞) and x̄ is the mean of the tokens, as in the authors' code (their theorems have the best x).
The base shapes with fresh weights, MiniLM as a real pretrained BERT where it is installed, and with `--data FOLDER` any
BERT, ALBERT or XLNet that a user has. Each in float32, as in the paper, and in float64. All four variants have the same
weights; the paper draws new ones for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from depthscope.anatomy import anatomy_of
from depthscope.drawing import BLUE, GREEN, ORANGE, VERMILION, panels, shared_legend
from depthscope.hooks import Ablation, Listen, Machine, Visit, undisturbed
from depthscope.measures import composite_norm, composite_residual
from depthscope.models.families import build_family
from depthscope.progress import Share
from depthscope.text import read_text
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.subjects import FAMILIES, as_batch, given, ids_of, minilm
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows, table

NAMES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}
VARIANTS = {"SAN": VERMILION, "SAN+MLP": ORANGE, "SAN+skip": BLUE, "full": GREEN}  # and their colours
GONE = 1e-6  # a few times the floor of float32
LEFT = 0.05  # of the tokens' size beside the mean: less is nearly one token
SPREADS = 2.0  # standard deviations within which two numbers count as the same
NO_POSITIONS = "SAN, no position scores"  # of XLNet
CONSTANT = 1.5  # the largest factor between contractions that count as one rate; doubly exponential means a power of 3
OTHER_SIZE = "not of the paper's width and length"


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 12
    width: int = 768
    tokens: int = 128
    samples: int = 8  # the paper has 32
    few: int = 4  # samples of other draws of the weights
    draws: int = 4  # of other weights, in float32
    data: str | None = None  # a folder with weights of BERT, ALBERT or XLNet

    @property
    def is_paper(self) -> bool:
        """The shapes are the paper's, so that its numbers can be asked for."""
        return (self.depth, self.width, self.tokens) == (12, 768, 128)


def left_out(family: str, variant: str) -> tuple[str, ...]:
    """What is left out of a model of this family to make it this variant, as in the authors' code."""
    no_mlp = ("ffn_linears",) if family == "albert" else ("ffn_step",)
    skip = () if variant in ("SAN+skip", "full") else ("attention_skip",)
    return skip + (() if variant in ("SAN+MLP", "full") else no_mlp)


def plain_residual(x: Tensor) -> Tensor:
    """y as in the authors' code: the mean is rounded, and equal tokens keep a residual of some machine epsilons."""
    return composite_norm(x - x.mean(dim=-2, keepdim=True)) / composite_norm(x)


def residuals_of(model: nn.Module, ids: Tensor, without: tuple[str, ...] = (), batch: int = 4) -> tuple[Tensor, Tensor]:
    """y of blocks 0 … L of a model that reads ids (samples, n), without these parts of its blocks.

    As the authors' code computes it, and of the same tokens without rounding of our own; (L + 1, samples) each. Block 0
    is what enters block 1.
    """
    anatomy = anatomy_of(model)
    passes: list[list[Tensor]] = []

    def see(visit: Visit, station: str, tokens: Tensor, _source: Tensor) -> None:
        if station == "output" or visit.number == 1:
            passes[-1].append(torch.stack([plain_residual(tokens).double(), composite_residual(tokens).double()]))

    cut: Any = Ablation(model, anatomy, without) if without else nullcontext()
    with undisturbed(model), cut, Machine(model, anatomy, Listen({"input", "output"}, see)):
        for part in ids.split(batch):
            passes.append([])
            model(**as_batch(part))
    plain, exact = torch.cat([torch.stack(blocks, dim=1) for blocks in passes], dim=2)
    return plain, exact


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: model, weights, variant, source, draw, block, sample, value, spread.

    `source` is "float32" (as the authors compute it), "float32 exact" (the same tokens, measured without rounding),
    "float64", or "paper": its means and their spread over samples, read off its vector graphics.
    """
    text = read_text(None)
    ids = ids_of(text, config.tokens, config.samples)["input_ids"]
    pretrained = [*minilm(), *given(config.data)]
    work, frames = Work(len(FAMILIES) * (config.draws + 1) + len(pretrained), progress), [_paper()]
    for family, draw in product(FAMILIES, range(config.draws + 1)):
        model = build_family(family, config.depth, config.width, seed=config.seed + draw)
        about = {"model": family, "family": family, "weights": "init", "draw": draw}
        frames += _all_variants(model, ids[: config.few] if draw else ids, config.few, about)
        work()
    for found in pretrained:
        own = found.ids(text, config.tokens, config.samples)
        about = {"model": found.name, "family": found.family, "weights": "pretrained", "draw": 0}
        frames += _all_variants(found.load(), own, config.few, about)
        work()
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


def _all_variants(model: Any, ids: Tensor, few: int, about: dict[str, Any]) -> Iterator[pd.DataFrame]:
    """The authors' four variants in float32 and float64. Of other draws, float32 alone.

    The model ends up in float64, and XLNet with fresh weights without the scores of its relative positions.
    """

    def rows_of(variant: str, dtype: str, ids: Tensor, name: str = "") -> Iterator[pd.DataFrame]:
        plain, exact = residuals_of(model, ids, left_out(about["family"], variant))
        for source, values in (
            (("float32", plain), ("float32 exact", exact)) if dtype == "float32" else ((dtype, exact),)
        ):
            found = table({"value": values}, block=range(len(values)), sample=range(values.shape[1]))
            yield found.assign(source=source, variant=name or variant, spread=math.nan, **about)

    for variant in VARIANTS:
        yield from rows_of(variant, "float32", ids)
    if about["draw"]:
        return
    model = model.double()
    for variant in VARIANTS:
        yield from rows_of(variant, "float64", ids)
    if about["family"] == "xlnet" and about["weights"] == "init":
        for layer in model.layer:
            layer.rel_attn.r.data.zero_()  # the keys of positions
        yield from rows_of("SAN", "float64", ids[:few], NO_POSITIONS)


def _paper() -> pd.DataFrame:
    """The paper's curves: one row per block, the mean over its 32 texts and their standard deviation."""
    path = files("depthscope_lab.papers.dong2021") / "collapse_in_the_paper.json"
    found = [
        (family, family, weights, variant, block, mean, spread)
        for family, by_weights in json.loads(path.read_text(encoding="utf-8")).items()
        for weights, by_variant in by_weights.items()
        for variant, own in by_variant.items()
        for block, (mean, spread) in enumerate(zip(own["mean"], own["spread"], strict=True))
    ]
    columns = ["model", "family", "weights", "variant", "block", "value", "spread"]
    return pd.DataFrame(found, columns=columns).assign(source="paper", draw=0, sample=-1)


def draw(frame: pd.DataFrame) -> Any:
    """A column per model: above on the paper's axis, below in powers of ten. Circles are the paper's."""
    shown = frame[frame["source"] != "paper"][["model", "weights", "family"]].drop_duplicates()
    figure, axes = panels(len(shown), 2, width=3.4, height=3.0)
    circles: dict[str, Any] = {"fmt": "o", "markersize": 4, "markerfacecolor": "none", "linewidth": 0.8}
    for place, (model, weights, family) in enumerate(shown.itertuples(index=False)):
        own = rows(frame, model=model, draw=0, weights=weights)
        paper = rows(frame, source="paper", family=family, weights=weights)
        linear, powers = axes[place], axes[place + len(shown)]
        for ax, (variant, colour) in product((linear, powers), VARIANTS.items()):
            wide = 3.6 if variant == "SAN" else 1.6  # with and without MLPs nearly coincide where skips are gone
            for source, dashes in (("float32", "-"), ("float64", ":")):
                found, name = curve(own, variant=variant, source=source), f"{variant}, {source}"
                line(ax, found, colour, name, linewidth=wide, linestyle=dashes)
            if model != "MiniLM":  # the paper has none
                known, name = rows(paper, variant=variant), f"{variant}, paper"
                ax.errorbar(known["block"], known["value"], known["spread"], label=name, color=colour, **circles)
        last, first = int(own["block"].max()), not place
        title = f"{NAMES[model]}, fresh" if model in NAMES else f"{model}, pretrained"
        axis(linear, title, "", "‖res‖ / ‖X‖, composite norm" * first, ylim=(0, 1.05), first=0, last=last)
        axis(powers, "", "block", "the same, in powers of ten" * first, log=True, ylim=(1e-16, 2), first=0, last=last)
    shared_legend(figure, axes[0], columns=6)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    own = partial(_means, frame)
    found = []
    for family in FAMILIES:
        found.append(_collapses(frame, family, config.is_paper))
        found += [_stays(frame, family, variant, config.is_paper) for variant in ("SAN+skip", "full")]
    models = rows(frame, weights="pretrained", source="float32")["model"].unique()
    return [
        *found,
        *_floors(frame, config.is_paper),
        *(_exponent(own(family, "SAN", "float64"), family) for family in FAMILIES),
        _exponent(own("xlnet", NO_POSITIONS, "float64"), "xlnet", ", and without scores of relative positions,"),
        *(_trained_collapses(frame, model) for model in models),
    ]


def _means(frame: pd.DataFrame, model: str, variant: str, source: str, weights: str = "init") -> pd.Series:
    """Over samples, by block, of the first draw of the weights."""
    return curve(frame, model=model, variant=variant, source=source, weights=weights, draw=0)


def _theirs(frame: pd.DataFrame, family: str, variant: str) -> pd.DataFrame:
    found = rows(frame, source="paper", family=family, weights="init", variant=variant)
    return found.set_index("block")[["value", "spread"]]


def _collapses(frame: pd.DataFrame, family: str, is_paper: bool) -> Claim:
    papers, ours, alike = [], [], []
    for variant in ("SAN", "SAN+MLP"):
        theirs, mean = _theirs(frame, family, variant)["value"], _means(frame, family, variant, "float32")
        last, first = (next((int(b) for b, y in values.items() if y < GONE), -1) for values in (theirs, mean))  # type: ignore[call-overload]
        alike.append(first > 0 and abs(first - last) <= 1)
        papers.append(f"{variant} {theirs[0]:.2f}, {theirs[1]:.2g}, below {GONE:g} at layer {last}")
        ours.append(f"{variant} {mean[0]:.2f}, {mean[1]:.2g}, below {GONE:g} at block {first}")
    return judge(
        f"without attention's skip, {NAMES[family]} with fresh weights collapses, with MLPs or without",
        "; ".join(papers) + " (Fig. 2)",
        "; ".join(ours),
        "one block: where a curve passes a level hangs on the weights drawn and the text",
        all(alike),
        "" if is_paper else OTHER_SIZE,
        when=is_paper or not all(alike),
    )


def _stays(frame: pd.DataFrame, family: str, variant: str, is_paper: bool) -> Claim:
    theirs, mean = _theirs(frame, family, variant), _means(frame, family, variant, "float32")
    samples = rows(frame, model=family, variant=variant, source="float32", weights="init")
    draws = samples.pivot_table(index="block", columns="draw", values="value", aggfunc="mean")
    both = mean.index.intersection(theirs.index)
    spread = np.sqrt(theirs.loc[both, "spread"] ** 2 + 2 * draws.std(axis=1)[both] ** 2)  # one draw against another
    apart = (mean.loc[both] - theirs.loc[both, "value"]).abs() / spread
    end, within = mean.iloc[-1], float((apart <= SPREADS).mean())
    return judge(
        f"{NAMES[family]} with fresh weights keeps its rank {'as it is' if variant == 'full' else 'with skips alone'}",
        f"{theirs['value'].iloc[0]:.3f} → {theirs['value'].iloc[-1]:.3f} over 12 layers (Fig. 2)",
        f"{mean.iloc[0]:.3f} → {end:.3f}; {within:.0%} of the blocks within {SPREADS:g} standard "
        f"deviations, the farthest {apart.max():.1f} at block {apart.idxmax()}",
        f"at least {LEFT} is left, and half of the blocks within {SPREADS:g} standard deviations: the spread "
        "over texts in the figure with that over draws of the weights, measured here",
        end > LEFT and (within >= 0.5 or not is_paper),
        "" if is_paper else OTHER_SIZE,
        when=is_paper or not end > LEFT,
    )


def _floors(frame: pd.DataFrame, is_paper: bool) -> list[Claim]:
    plain, exact = (_means(frame, "bert", "SAN", name).iloc[4:].mean() for name in ("float32", "float32 exact"))
    theirs = _theirs(frame, "bert", "SAN")["value"].iloc[4:].mean()
    parts, all_lower = [], True
    for family in FAMILIES:
        single, double = (_means(frame, family, "SAN", source) for source in ("float32", "float64"))
        at = next((block for block in double.index if double[block] < 0.5 * single[block]), -1)
        all_lower &= bool(at > 0 and double.min() < 1e-14)
        parts.append(f"{NAMES[family]} block {at}: {double.get(at, np.nan):.2g} for {single.get(at, np.nan):.2g}")
    return [
        judge(
            "the level where the curves end is rounding of float32",
            f"{theirs:.2g} from layer 3 on, in every collapsed curve (Fig. 2)",
            f"{plain:.2g} as the authors compute it; {exact:.2g} of the same tokens, measured without rounding",
            "a factor of 2",
            0.5 < plain / theirs < 2,
            "a part of the floor is the measurement's, the rest the model's",
            when=is_paper,
        ),
        judge(
            "in float64 the collapse goes on below the floor of float32",
            "not in the paper: its curves end at 2e-7",
            "; ".join(parts) + "; all end at some 1e-16, the floor of float64",
            "less than half of what float32 shows, and 1e-14 reached",
            all_lower,
        ),
    ]


def _exponent(mean: pd.Series, family: str, of_positions: str = "") -> Claim:
    """Where the mean of a curve falls from block to block by a power or by a factor."""
    values = mean.iloc[1:]
    clean = np.asarray(values[values > 1e-14])  # a hundred times the floor
    falls = np.log(clean[:-1] / clean[1:])
    if len(falls) > 1:
        growing = falls[-1] > CONSTANT * falls[0]
        ours = f"y shrinks by {', '.join(f'{np.exp(-fall):.2g}' for fall in falls)} from block 1 on"
    else:  # two blocks, and the next is rounding
        first, second = np.log(values.iloc[:2])
        growing = second / first > CONSTANT
        ours = f"ln y {first:.2f} at block 1, {second:.2f} at block 2 (× {second / first:.2f}), then below float64"
    return judge(
        f"{NAMES[family]} without skips and MLPs{of_positions} loses rank doubly exponentially",
        "Thm 2.3: ‖res‖ ≤ c^((3^L − 1)/2)·‖res(X)‖^(3^L); Fig. 2 is to verify it",
        ours,
        f"the contraction grows by more than {CONSTANT} from block to block; a constant one is exponential",
        growing,
        "its scores have terms of relative positions, which do not fade as the tokens grow alike; the theorem's "
        "scores have none. Float32 ends before the difference shows"
        if family == "xlnet" and not of_positions
        else "the cancellation-free residual of depthscope.theory follows it further",
    )


def _trained_collapses(frame: pd.DataFrame, model: str) -> Claim:
    san, full = (_means(frame, model, variant, "float32 exact", "pretrained") for variant in ("SAN", "full"))
    fresh, last, end = _means(frame, "bert", "SAN", "float32 exact")[2], san.iloc[-1], full.iloc[-1]
    return judge(
        f"without skips and MLPs, {model} (pretrained) collapses, more slowly than fresh weights",
        "BERT .687, .676, .315, .139, .031, .0035, 2e-5, then the floor (Fig. 2)",
        f"{', '.join(f'{value:.2g}' for value in san)}; whole {full.iloc[0]:.2f} → {end:.2f}; fresh BERT "
        f"{fresh:.2g} at block 2",
        "a tenth of the whole model's residual at the last block; a hundred times the fresh one's at block 2",
        last < 0.1 * end and san[2] > 100 * fresh,
    )


QUICK = Config(width=64, tokens=24, samples=2, few=2, draws=1)
STUDY = Study("dong2021-collapse", Config(), QUICK, compute, draw, claims)
