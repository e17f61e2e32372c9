"""Yu & Zhang 2024, Fig. 7: a deep Transformer-XL trained post-norm, pre-norm and de-escalated; how much is the leak.

The paper subtracts the mean over the segment, at the FFN's input: every token then sees a part of what is to be
predicted. Here the same is trained with that mean and with a causal one, and each model is read twice: all positions
of a segment in one pass, as in training, and with the future hidden, as a model has it that writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope import drawing
from depthscope.measures import token_similarity
from depthscope.progress import Share
from depthscope_lab.models.transformer_xl import TransformerXL
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.trained import steps
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows, spell
from depthscope_lab.training.config import LanguageConfig
from depthscope_lab.training.data.wikitext import Corpus, load_manual, load_wikitext
from depthscope_lab.training.engine import learning_rate
from depthscope_lab.training.language import LanguageModelling, reading_of
from depthscope_lab.training.perplexity import evaluate, evaluate_without_future
from depthscope_lab.training.randomness import derived_seed, seeded
from depthscope_lab.training.recipes import txl_manual, txl_wikitext103
from depthscope_lab.training.task import Carry
from depthscope_lab.training.task import Share as Part

LEAK, REACHES, FAILS = 0.05, 0.1, 0.5  # nats per token
COLLAPSED = 0.95
LAST = 0.1  # the end of a training: this share of its steps
POST, PRE, LEAKING, CAUSAL = "post-norm", "pre-norm", "full mean (leaks)", "prefix mean (causal)"
VARIANTS = {POST: "post", PRE: "pre", LEAKING: "deescalated-leaking", CAUSAL: "deescalated"}
COLOURS = dict(zip(VARIANTS, (drawing.VERMILION, drawing.BLACK, drawing.ORANGE, drawing.BLUE), strict=True))
Row = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """The shape of the models and of their training; all else is the recipe `txl-manual`."""

    depth: int = 48
    width: int = 64
    heads: int = 4
    rows: int = 8
    segment: int = 32
    steps: int = 360  # less than an epoch of the manual: every word is new
    hidden_segments: int = 4  # read with the future hidden, which takes one pass per token


@dataclass(frozen=True)
class Config:
    seed: int = 0
    data: str | None = None  # a folder of WikiText; None: Python's manual
    training: Training = field(default_factory=Training)
    rates: tuple[float, ...] = (5e-4, 1.6e-3)  # the higher one is the paper's 2.5e-4 times 410/64, for a width of 64


def configured(shape: Training, variant: str, rate: float, seed: int) -> LanguageConfig:
    """The recipe in this shape; dσ² is that of the paper's model of width 410. The study reads by itself."""
    form = {"depth": shape.depth, "width": shape.width, "ffn_width": 2 * shape.width, "heads": shape.heads}
    form |= dict.fromkeys(("segment", "memory", "eval_segment"), shape.segment)
    form |= dict.fromkeys(("eval_memory", "eval_clamp"), 2 * shape.segment)
    form |= {"batch_size": shape.rows, "steps": shape.steps, "warmup_steps": 0, "hidden_segments": 0}
    std = 0.02 * math.sqrt(txl_wikitext103(variant).width / shape.width)
    return txl_manual(variant).changed(**form, lr=rate, init_std=std, clip_norm=None, seed=seed)


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: part, case, rate (nan where none), step, block (−1 where none), quantity, value.

    `training`: loss (mean since the row before) and t_sim of the last block. `validation`: the loss on the whole
    text, and on its first segments in one pass and with the future hidden. `floor`: the loss of one who knows only how
    frequent words are.
    """
    corpus = load_manual() if config.data is None else load_wikitext(config.data)
    floor = unigram_loss(corpus)
    found: list[Row] = [{"part": "floor", "case": "word frequencies", "quantity": "loss", "value": floor}]
    runs = [*product(sorted(config.rates, reverse=True), VARIANTS)]
    work = Work(len(runs), progress)
    for rate, name in runs:
        trained = configured(config.training, VARIANTS[name], rate, config.seed)
        ran = run_case(trained, corpus, config.training.hidden_segments, work.part())
        found += [{"case": name, "rate": rate} | row for row in ran]
    frame = pd.DataFrame(found).fillna({"step": -1}).astype({"step": int})
    return frame[["part", "case", "rate", "step", "quantity", "value"]]


def run_case(config: LanguageConfig, corpus: Corpus, hidden_segments: int, progress: Share) -> list[Row]:
    """Trains and reads. Rows: the losses of training, t_sim of the last block, the losses on the validation text.

    A loss that is not finite ends it: `nan` from there on.
    """
    task, total = LanguageModelling(config, corpus), config.steps or 1
    with seeded(derived_seed(config.seed, "build")):
        model = task.build().train()
    assert isinstance(model, TransformerXL)
    optimiser = torch.optim.AdamW(
        model.parameters(), config.lr, (config.beta1, config.beta2), weight_decay=config.weight_decay, fused=True
    )
    carry: Carry = None
    last: tuple[Any, Carry] = None, None

    def loss_of(step: int) -> Tensor:
        nonlocal carry, last
        last = task.batch(step, Part(0, 1), torch.device("cpu")), carry
        loss, carry = task.loss(model, *last)
        return loss

    found, since = [], []
    for step, loss in steps(loss_of, optimiser, total, rate=partial(learning_rate, config, total=total)):
        since.append(loss)
        if failed := not math.isfinite(loss):
            break
        if (step + 1) % max(1, total // 50) == 0 or step + 1 == total:
            numbers = {"loss": math.fsum(since) / len(since), "token_similarity": _similarity(model, task, last)}
            found += [{"part": "training", "step": step + 1, "quantity": q, "value": v} for q, v in numbers.items()]
            progress((step + 1) / total)
            since = []
    ends = dict.fromkeys(("whole", "one pass", "future hidden"), math.nan)
    if not failed:
        reading = reading_of(config)
        few = replace(reading, segments=hidden_segments)
        readings = ((evaluate, reading), (evaluate, few), (evaluate_without_future, few))
        ends = {name: read(model, corpus.valid, how).loss for name, (read, how) in zip(ends, readings, strict=True)}
    progress(1.0)
    return [*found, *({"part": "validation", "quantity": name, "value": loss} for name, loss in ends.items())]


@torch.no_grad()
def _similarity(model: TransformerXL, task: LanguageModelling, batch: tuple[Any, Carry]) -> float:
    """The mean t_sim after the last block, of the batch passed once more."""
    found: list[float] = []
    last = model.blocks[-1].get_submodule("stations.output")
    handle = last.register_forward_hook(lambda _module, _inputs, y: found.append(token_similarity(y).mean().item()))
    try:
        task.loss(model, *batch)
    finally:
        handle.remove()
    return found[0]


def unigram_loss(corpus: Corpus) -> float:
    """The loss on the validation text of one who knows nothing but how often each word occurs in the training text."""
    counts = np.bincount(corpus.train, minlength=len(corpus.vocabulary)) + 1.0  # none is impossible
    return float(-np.log(counts / counts.sum())[corpus.valid].mean())


def draw(frame: pd.DataFrame) -> Any:
    """Training at every rate, validation read in both ways; below, t_sim in training."""
    rates = sorted(frame["rate"].dropna().unique())
    figure, axes = drawing.panels(len(rates) + 1, rows=2, width=4.2, height=4.0)
    (*training, validation), alike = axes[: len(rates) + 1], axes[len(rates) + 1 :]
    floor: dict[str, Any] = {"color": drawing.GREY, "linewidth": 1, "linestyle": ":", "label": "word frequencies"}
    level = rows(frame, part="floor")["value"].iloc[0]
    for rate, above, below in zip(rates, training, alike, strict=False):
        for name, colour in COLOURS.items():
            own = rows(frame, part="training", case=name, rate=rate)
            line(above, curve(own, by="step", quantity="loss"), colour, name)
            line(below, curve(own, by="step", quantity="token_similarity"), colour, name)
        above.axhline(level, **floor)
        axis(above, f"Training, learning rate {rate:g}", "step", "loss, nats per token")
        axis(below, f"Last block, learning rate {rate:g}", "step", "t_sim", ylim=(0, 1.02))
    runs = [*product(VARIANTS, rates)]
    for shift, quantity, colour in ((-0.2, "one pass", drawing.SKY), (0.2, "future hidden", drawing.ORANGE)):
        known = rows(frame, part="validation", quantity=quantity).set_index(["case", "rate"])["value"]
        heights = [number + shift for number in range(len(runs))]
        validation.barh(heights, known[runs], height=0.38, color=colour, label=quantity)
    validation.axvline(level, **floor)
    validation.set_yticks(range(len(runs)), [f"{name}, {rate:g}" for name, rate in runs], fontsize=7)
    validation.invert_yaxis()
    axis(validation, "Validation", "loss, nats per token", "model, learning rate")
    alike[-1].set_axis_off()
    drawing.legend_below([*training, validation, *alike[:-1]], columns=2)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    return [claim for rate in sorted(config.rates) for claim in _of_rate(frame, rate)]


def _of_rate(frame: pd.DataFrame, rate: float) -> list[Claim]:
    """The paper's own statements are not among them: 360 of 50 000 steps, one seed and an eightieth of the parameters
    can refute none of them.
    """
    own, at = rows(frame, rate=rate), f"learning rate {rate:g}: "
    read = rows(own, part="validation").pivot(index="case", columns="quantity", values="value").loc[list(VARIANTS)]
    training = rows(own, part="training")
    late = training[training["step"] > (1 - LAST) * training.groupby("case")["step"].transform("max")]
    final = curve(late, by="case", quantity="loss").where(read["whole"].notna(), math.inf)
    alike = {n: curve(training, by="step", case=n, quantity="token_similarity").iloc[-1] for n in read.index}
    whole, hidden, pre = read["one pass"], read["future hidden"], final[PRE]
    learnt = rows(frame, part="floor")["value"].iloc[0] - pre > REACHES  # else no more than how frequent words are
    return [
        judge(
            f"{at}with the future hidden, the model with the paper's de-escalation has a higher loss",
            "not in the paper",
            f"{hidden[LEAKING]:.3f} against {whole[LEAKING]:.3f} in one pass; pre-norm {hidden[PRE]:.3f}",
            f"at least {LEAK} higher, on the same tokens",
            hidden[LEAKING] - whole[LEAKING] >= LEAK,
        ),
        judge(
            f"{at}a causal de-escalation reaches pre-norm",
            "not in the paper",
            f"training loss {final[CAUSAL]:.3f}, pre-norm {pre:.3f}",
            f"at most {REACHES} above pre-norm",
            final[CAUSAL] <= pre + REACHES,
            when=learnt,
        ),
        judge(
            f"{at}where post-norm fails, its tokens have become alike",
            "§1: it is similarity that keeps deep post-norm models from training",
            f"t_sim after the last block at the end: {spell('{} {:.3f}', alike, '; ')}; training loss of post-norm "
            f"{final[POST]:.3f}, of pre-norm {pre:.3f}",
            f"post-norm above {COLLAPSED}, pre-norm below",
            alike[POST] > COLLAPSED > alike[PRE],
            when=final[POST] - pre >= FAILS,
        ),
    ]


QUICK = Config(training=Training(2, 16, 2, rows=4, segment=8, steps=10, hidden_segments=1), rates=(1e-2,))
STUDY = Study("yu2024-fig7", Config(), QUICK, compute, draw, claims)
