"""Dovonon et al. 2025, Fig. 5: the eigenvalues of H = W_V W_O, of fresh, of trained and of pretrained models.

The paper's caption: models of vision skew to the negatives, those of language are symmetric. Here: base shapes with
fresh weights; MiniLM where it is installed and any model that a user gives (`--data FOLDER`); and two small models
before and after training here, one of vision on digits, one of language on Python's manual, three seeds each. Real
parts are divided by the spectral radius of their block, so that blocks can be put into one histogram.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.drawing import BLUE, GREY, VERMILION, legend_inside, panels
from depthscope.models import BlockConfig, CausalLM
from depthscope.models.families import build_family
from depthscope.models.initialisers import INITIALISERS
from depthscope.progress import Share, Tick
from depthscope.text import cut, read_text, train_tokenizer
from depthscope.value_spectra.weights import WHOLE, spectra
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.subjects import FRESH, given, minilm
from depthscope_lab.papers.trained import loss_of_task, means_of_task, steps
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows
from depthscope_lab.training.data import load_digits
from depthscope_lab.training.images import ImageClassification
from depthscope_lab.training.recipes import RECIPES

WARM_UP = 20  # steps
_VOCABULARY = 2000


@dataclass(frozen=True)
class Training:
    """How both models are trained."""

    depth: int = 6
    width: int = 64
    heads: int = 4
    steps: int = 600
    batch: int = 64
    rate: float = 1e-3
    tokens: int = 64  # of a piece of text
    pieces: int = 1200  # of text; one tenth is for testing


def fit(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], shape: Training, advance: Tick) -> None:
    """AdamW with a short warm-up and a linear descent."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=shape.rate, weight_decay=0.1)
    warm_up = min(WARM_UP, shape.steps // 4) or 1

    def rate(step: int) -> float:
        return shape.rate * min((step + 1) / warm_up, 1 - step / shape.steps)

    for _ in steps(partial(loss_of, model), optimiser, shape.steps, rate=rate):
        advance()


class Digits:
    """Vision: scikit-learn's digits, patches of 2 × 2, a class token. The score is the test accuracy."""

    name, field = "small ViT", "vision"

    def __init__(self, shape: Training, seed: int):
        form = {"depth": shape.depth, "width": shape.width, "ffn_width": 2 * shape.width, "heads": shape.heads}
        config = RECIPES["vit-digits"]("pre").changed(**form, batch_size=shape.batch, seed=seed)
        self.task = ImageClassification(config, load_digits())  # type: ignore[arg-type]
        self.model = self.task.build()

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return loss_of_task(self.task, model, step)

    def score(self) -> float:
        return means_of_task(self.task, self.model)["test_accuracy"]


class Manual:
    """Language: the next token of Python's manual, causal. The score is the test loss over that of the word counts."""

    name, field = "small language model", "language"

    def __init__(self, shape: Training, seed: int):
        text = read_text(None)
        ids = torch.tensor(cut(text, train_tokenizer(text, _VOCABULARY), shape.tokens + 1, shape.pieces))
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        self.test, self.train = ids[order[: len(ids) // 10]], ids[order[len(ids) // 10 :]]
        self.batch, self.stream = shape.batch, torch.Generator().manual_seed(seed)
        default = INITIALISERS["pytorch_default"]
        block = BlockConfig(shape.width, shape.heads, 2 * shape.width, placement="pre", initialise=default)
        weights, vocabulary = torch.Generator().manual_seed(seed), int(ids.max()) + 1
        self.model = CausalLM(shape.depth, block, vocabulary=vocabulary, context=shape.tokens, generator=weights)

    def loss(self, model: nn.Module, _step: int) -> Tensor:
        return _next_token_loss(model, self.train[torch.randint(len(self.train), (self.batch,), generator=self.stream)])

    @torch.no_grad()
    def score(self) -> float:
        counts = torch.bincount(self.train.flatten(), minlength=int(self.test.max()) + 1).double() + 1
        by_counts = -(counts / counts.sum()).log()[self.test[:, 1:]].mean()
        return float(_next_token_loss(self.model.eval(), self.test) / by_counts)


def _next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


BINS = np.linspace(-1, 1, 41)
COLUMNS = 4  # of panels
COLOURS = {"fresh": GREY, "trained": VERMILION, "pretrained": BLUE}


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 3  # seeds of the models that are trained here
    depth: int = 12  # of the fresh base shapes
    width: int = 768
    training: Training = field(default_factory=Training)
    data: str | None = None  # a folder with pretrained models


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per model, state, seed, block and bin of Re μ by the block's radius, with the share of the eigenvalues.

    Of the block: negative_share, trace (tr H over √d‖H‖_F, the mimetic score), folded_share (of (I − 11ᵀ/d)diag(γ)H in
    pre-norm), growth (max|1 + μ|); of the model: score (accuracy, or loss over that of word counts).
    """
    found, count = [*minilm(), *given(config.data, None)], config.training.steps
    work = Work((2 * config.trials + len(FRESH) + len(found)) * count, progress)
    frames = []

    def add(model: Any, name: str, field: str, state: str, seed: int, score: float = np.nan) -> None:
        frames.append(_blocks(model).assign(model=name, field=field, state=state, seed=seed, score=score))

    for family, name in FRESH.items():
        model = build_family(family, config.depth, config.width, seed=config.seed)
        add(model, name, "vision" if family == "vit" else "language", "fresh", config.seed)
        work(count)
    for one in found:
        model = one.load()
        vision = getattr(model, "main_input_name", "") == "pixel_values"
        add(model, one.name, "vision" if vision else "language", "pretrained", 0)
        work(count)
    makers: list[type[Digits] | type[Manual]] = [Digits, Manual]
    for seed, make in product(range(config.seed, config.seed + config.trials), makers):
        run = make(config.training, seed)
        add(run.model, run.name, run.field, "fresh", seed, run.score())
        fit(run.model.train(), run.loss, config.training, work)
        add(run.model, run.name, run.field, "trained", seed, run.score())
    return pd.concat(frames, ignore_index=True)


def _blocks(model: Any) -> pd.DataFrame:
    """A histogram of the real parts of every block's whole H, and what is said of it."""
    try:
        folded = rows(spectra(model, fold_norm=True).summary, head=WHOLE).set_index("block")["negative_share"]
    except ValueError:  # post-norm: no norm stands before attention
        folded = None
    frames, whole = [], spectra(model).frame
    for block, values in rows(whole, head=WHOLE).groupby("block"):
        first = values.iloc[0]
        counts, _ = np.histogram(values["real"] / first["spectral_radius"], BINS)
        about = {
            "block": block,
            "eigenvalues": len(values),
            "negative_share": first["negative_share"],
            "trace": first["mimetic_score"],
            "growth": first["mean_growth"],
            "folded_share": np.nan if folded is None else folded.loc[block],
        }
        frames.append(pd.DataFrame({"bin": (BINS[:-1] + BINS[1:]) / 2, "share": counts / len(values)}).assign(**about))
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Any:
    models = list(dict.fromkeys(frame["model"]))
    lines = 1 + (len(models) > COLUMNS) + (len(models) > 2 * COLUMNS) + (len(models) > 3 * COLUMNS)
    figure, axes = panels(COLUMNS, lines, width=3.2, height=2.8)
    for ax, model in zip(axes, models, strict=False):
        for state, colour in COLOURS.items():
            heights = curve(frame, "share", by="bin", model=model, state=state)
            if len(heights):
                line(ax, heights, colour, state, drawstyle="steps-mid")
        ax.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
        axis(ax, model, "Re μ by the block's radius", "share of the eigenvalues")
        legend_inside(ax)
    for ax in axes[len(models) :]:
        ax.set_axis_off()
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    blocks = frame.drop_duplicates(["model", "state", "seed", "block"])
    summed = ["negative_share", "trace", "folded_share", "score"]
    means = blocks.groupby(["model", "field", "state", "seed"])[summed].mean()
    lacks = "" if config.training.steps >= 300 else "needs 300 steps"
    fresh = rows(blocks, state="fresh")
    off = (fresh["negative_share"] - 0.5).abs()
    score = means.xs("trained", level="state")["score"].groupby("field").mean()
    return [
        judge(
            "fresh weights are symmetric: half of the eigenvalues of H have a negative real part",
            "not in the caption; ours: −H has the law of H",
            ", ".join(f"{name} {share:.1%}" for name, share in curve(fresh, "negative_share", by="model").items())
            + f"; farthest block {off.max():.1%} from one half",
            "2/√d for every block: four deviations of a share of d independent signs",
            (off * np.sqrt(fresh["eigenvalues"])).max() < 2,
        ),
        judge(
            "both models that are trained here have learned",
            "ours: spectra of a model that learned nothing say nothing",
            f"test accuracy {score['vision']:.1%}; test loss {score['language']:.2f} of that of word counts",
            "accuracy above 90 %, loss below .9 of word counts",
            score["vision"] > 0.9 and score["language"] < 0.9,
            lacks=lacks,
        ),
        *(_moved(means, kind, lacks) for kind in ("vision", "language")),
        *(_pretrained(rows(blocks, state="pretrained", field=kind), kind) for kind in ("vision", "language")),
    ]


def _moved(means: pd.DataFrame, kind: str, lacks: str) -> Claim:
    """Before and after, seed by seed."""
    own = means.xs(kind, level="field").reset_index()
    own = own[own["model"].str.startswith("small")].set_index(["state", "seed"])
    share, trace, folded = (own[name].unstack("state") for name in ("negative_share", "trace", "folded_share"))
    change, end = share["trained"] - share["fresh"], share["trained"].mean()
    claim, paper = "Python's manual leaves the eigenvalues of H symmetric (language)", "language is symmetric"
    tolerance = "45 to 55 % in the mean"
    if kind == "vision":
        claim, paper = (
            "digits moves the eigenvalues of H to the negative side (vision)",
            "vision skews to the negatives",
        )
        tolerance = "above 55 % in the mean, and more in every seed"
    return judge(
        f"training on {claim}",
        f"Fig. 5, caption: {paper}",
        f"negative share {share['fresh'].mean():.1%} → {end:.1%} (seeds: "
        f"{', '.join(f'{value:+.1%}' for value in change)}); with LN "
        f"folded in {folded['fresh'].mean():.1%} → {folded['trained'].mean():.1%}; tr H/(√d‖H‖) "
        f"{trace['fresh'].mean():+.3f} → {trace['trained'].mean():+.3f}",
        tolerance,
        None,
        lacks or "two small models and 600 steps cannot refute what is said of large ones",
    )


def _pretrained(blocks: pd.DataFrame, kind: str) -> Claim:
    per = blocks.groupby("model", sort=False)["negative_share"].agg(["mean", "min", "max"])
    skewed = kind == "vision"
    told = (f"{model} {row['mean']:.1%} ({row['min']:.1%} to {row['max']:.1%})" for model, row in per.iterrows())
    return judge(
        f"pretrained models of {kind} {'skew to the negatives' if skewed else 'have symmetric eigenvalues of H'}",
        "Fig. 5, caption",
        ", ".join(told) or "0 models at hand: --data FOLDER",
        "negative share above 55 % in every model" if skewed else "45 to 55 % in every model",
        (per["mean"] > 0.55).all() if skewed else per["mean"].between(0.45, 0.55).all(),
        when=not per.empty,
    )


TINY = Training(depth=2, width=32, heads=2, steps=6, tokens=16, pieces=80)
STUDY = Study("dovonon2025-fig5", Config(), Config(0, 2, 2, 64, TINY), compute, draw, claims)
