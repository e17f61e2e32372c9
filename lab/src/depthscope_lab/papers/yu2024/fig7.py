"""Yu & Zhang 2024, Fig. 7: a deep Transformer-XL trained post-norm, pre-norm and de-escalated; how much is the leak.

The paper subtracts the mean over the segment, at the FFN's input: every token then sees a part of what is to be
predicted. Here the same is trained with that mean and with a causal one, and each model is read twice: all positions
of a segment in one pass, as in training, and with the future hidden, as a model has it that writes. The paper trains
without warm-up and without clipping, which the authors of Transformer-XL have: post-norm is also trained with each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from depthscope import drawing
from depthscope.measures import token_similarity
from depthscope.progress import Share
from depthscope_lab.models.transformer_xl import TransformerXL
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.trained import steps
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows, spell
from depthscope_lab.training.config import LanguageConfig
from depthscope_lab.training.data.token_stream import TokenRows
from depthscope_lab.training.data.wikitext import Corpus, load_manual, load_wikitext
from depthscope_lab.training.language import LanguageModelling, build_transformer_xl, reading_of
from depthscope_lab.training.optimiser import QuickAdamW
from depthscope_lab.training.perplexity import evaluate, evaluate_without_future
from depthscope_lab.training.randomness import derived_seed, seeded
from depthscope_lab.training.recipes import txl_manual, txl_wikitext103
from depthscope_lab.training.schedule import learning_rate
from depthscope_lab.training.task import Carry
from depthscope_lab.training.task import Share as Part

Row = dict[str, Any]
FAILS, REACHES, LEAK = 0.5, 0.1, 0.05  # nats per token
SAME = 1e-3
COLLAPSED = 0.95
LAST = 0.1  # the end of a training: this share of its steps


@dataclass(frozen=True)
class Case:
    """A variant, and what is done so that it trains."""

    variant: str
    colour: str = ""
    warm_up: bool = False
    clip: bool = False


POST, PRE, LEAKING, CAUSAL = "post-norm", "pre-norm", "full mean (leaks)", "prefix mean (causal)"
WARM_UP, CLIPPED = "post-norm, warm-up", "post-norm, clipping"
PLAIN = {
    POST: Case("post", drawing.VERMILION),
    PRE: Case("pre", drawing.BLACK),
    LEAKING: Case("deescalated-leaking", drawing.ORANGE),
    CAUSAL: Case("deescalated", drawing.BLUE),
}
FACTORS = {
    WARM_UP: Case("post", drawing.PURPLE, warm_up=True),
    CLIPPED: Case("post", drawing.GREEN, clip=True),
}
CASES = PLAIN | FACTORS


@dataclass(frozen=True)
class Training:
    """The shape of the models and of their training; all else is the recipe `txl-manual`."""

    depth: int = 48
    width: int = 64
    heads: int = 4
    rows: int = 8
    segment: int = 32
    steps: int = 360  # less than an epoch of the manual: every word is new
    clip_norm: float = 0.25  # the authors' of Transformer-XL
    hidden_segments: int = 4  # read with the future hidden, which takes one pass per token


@dataclass(frozen=True)
class Start:
    """Models at their own initialisation, of the paper's width; only the vocabulary is small."""

    width: int = 410
    heads: int = 10
    depth: int = 60
    rows: int = 4
    tokens: int = 150


@dataclass(frozen=True)
class Config:
    seed: int = 0
    data: str | None = None  # a folder of WikiText; None: Python's manual
    training: Training = field(default_factory=Training)
    rates: tuple[float, ...] = (5e-4, 1.6e-3)  # the higher one is the paper's 2.5e-4 times 410/64, for a width of 64
    start: Start = field(default_factory=Start)


def load_corpus(folder: str | None) -> Corpus:
    """Python's manual, or the WikiText in a folder."""
    return load_manual() if folder is None else load_wikitext(folder)


def configured(shape: Training, case: Case, rate: float, seed: int) -> LanguageConfig:
    """The recipe in this shape; dσ² is that of the paper's model of width 410. The study reads by itself."""
    form = {"depth": shape.depth, "width": shape.width, "ffn_width": 2 * shape.width, "heads": shape.heads}
    lengths = {"batch_size": shape.rows, "segment": shape.segment, "memory": shape.segment}
    reading = {"eval_segment": shape.segment, "hidden_segments": 0}
    reading |= dict.fromkeys(("eval_memory", "eval_clamp"), 2 * shape.segment)
    return txl_manual(case.variant).changed(
        **form,
        **lengths,
        **reading,
        steps=shape.steps,
        lr=rate,
        init_std=0.02 * math.sqrt(txl_wikitext103(case.variant).width / shape.width),
        warmup_steps=max(1, shape.steps // 5) if case.warm_up else 0,
        clip_norm=shape.clip_norm if case.clip else None,
        seed=seed,
    )


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: part, case, rate (nan where none), step, block (−1 where none), quantity, value.

    `training`: loss (mean since the row before) and t_sim of the last block. `validation`: the loss on the whole
    text, and on its first segments in one pass and with the future hidden. `start`: t_sim after every block.
    `floor`: the loss of one who knows only how frequent words are.
    """
    corpus, shape = load_corpus(config.data), config.start
    found: list[Row] = [
        {"part": "floor", "case": "word frequencies", "quantity": "loss", "value": unigram_loss(corpus)}
    ]
    form = {"depth": shape.depth, "width": shape.width, "ffn_width": 2 * shape.width, "heads": shape.heads}
    for name, case in PLAIN.items():
        start = txl_wikitext103(case.variant).changed(**form, seed=config.seed)
        about = {"part": "start", "case": name, "quantity": "token_similarity"}
        values = similarity_at_start(start, corpus, shape.rows, shape.tokens)
        found += [about | {"block": block, "value": value} for block, value in enumerate(values, start=1)]
    runs = [(name, rate) for rate in sorted(config.rates, reverse=True) for name in cases_at(config.rates, rate)]
    work = Work(len(runs), progress)
    for name, rate in runs:
        trained = configured(config.training, CASES[name], rate, config.seed)
        ran = run_case(trained, corpus, config.training.hidden_segments, work.part())
        found += [{"case": name, "rate": rate} | row for row in ran]
    frame = pd.DataFrame(found).fillna({"step": -1, "block": -1}).astype({"step": int, "block": int})
    return frame[["part", "case", "rate", "step", "block", "quantity", "value"]]


def cases_at(rates: Sequence[float], rate: float) -> list[str]:
    """Warm-up and clipping are for the highest rate, where they could be needed."""
    return list(CASES if rate == max(rates) else PLAIN)


def run_case(config: LanguageConfig, corpus: Corpus, hidden_segments: int, told: Share) -> list[Row]:
    """Trains and reads. Rows: the losses of training, t_sim of the last block, the losses on the validation text.

    `told` hears of the share of the training that is done. A loss that is not finite ends it: `nan` from there on.
    """
    task, total = LanguageModelling(config, corpus), config.steps or 1
    with seeded(derived_seed(config.seed, "build")):
        model = task.build().train()
    assert isinstance(model, TransformerXL)
    optimiser = QuickAdamW(model.parameters(), config.lr, (config.beta1, config.beta2), config.weight_decay)
    losses, similarities, since = [], [], []
    for step, loss, again in train_carrying(model, task, optimiser, total, clip=config.clip_norm):
        since.append(loss)
        if failed := not math.isfinite(loss):
            break
        if (step + 1) % max(1, total // 50) == 0 or step + 1 == total:
            with torch.no_grad(), similarities_after(model.blocks[-1:]) as found:
                again()
            losses.append(_row("training", "loss", math.fsum(since) / len(since), step + 1))
            similarities.append(_row("training", "token_similarity", found[0], step + 1))
            told((step + 1) / total)
            since = []
    ends = dict.fromkeys(("whole", "one pass", "future hidden"), math.nan)
    if not failed:
        reading = reading_of(config)
        few = replace(reading, segments=hidden_segments)
        readings = ((evaluate, reading), (evaluate, few), (evaluate_without_future, few))
        ends = {name: read(model, corpus.valid, how).loss for name, (read, how) in zip(ends, readings, strict=True)}
    told(1.0)
    return [*losses, *similarities, *(_row("validation", quantity, value) for quantity, value in ends.items())]


def train_carrying(
    model: nn.Module, task: LanguageModelling, optimiser: torch.optim.Optimizer, count: int, **options: Any
) -> Iterator[tuple[int, float, Any]]:
    """`steps` of a model that carries from segment to segment; also gives what passes the last batch once more."""
    carry: Carry = None
    last: tuple[Any, Carry] = None, None

    def loss_of(step: int) -> Tensor:
        nonlocal carry, last
        last = task.batch(step, Part(0, 1), torch.device("cpu")), carry
        loss, carry = task.loss(model, *last)
        return loss

    rate = partial(learning_rate, task.config, total=task.config.steps or 1)
    for step, loss in steps(loss_of, optimiser, count, rate=rate, **options):
        yield step, loss, partial(task.loss, model, *last)


def unigram_loss(corpus: Corpus) -> float:
    """The loss on the validation text of one who knows nothing but how often each word occurs in the training text."""
    counts = np.bincount(corpus.train, minlength=len(corpus.vocabulary)) + 1.0  # none is impossible
    return float(-np.log(counts / counts.sum())[corpus.valid].mean())


@torch.no_grad()
def similarity_at_start(config: LanguageConfig, corpus: Corpus, rows: int, tokens: int) -> list[float]:
    """t_sim after every block of a model that is not trained, on the beginning of the validation text."""
    model = build_transformer_xl(config, len(corpus.vocabulary)).eval()
    ids, _ = TokenRows(corpus.valid, rows).segment(0, tokens)
    with similarities_after(model.blocks) as found:
        model(ids)
    return found


@contextmanager
def similarities_after(blocks: Iterable[nn.Module]) -> Iterator[list[float]]:
    """The mean t_sim after each of the blocks, in the order in which they are passed."""
    found: list[float] = []

    def look(_module: object, _inputs: object, output: Tensor) -> None:
        found.append(token_similarity(output).mean().item())

    handles = [block.get_submodule("stations.output").register_forward_hook(look) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _row(part: str, quantity: str, value: float, step: int | None = None) -> Row:
    return {"part": part, "step": step, "quantity": quantity, "value": value}


def draw(frame: pd.DataFrame) -> Any:
    """Above: training at every rate, validation read in both ways. Below: t_sim, in training and before."""
    rates = sorted(frame["rate"].dropna().unique())
    figure, axes = drawing.panels(len(rates) + 1, rows=2, width=4.2, height=4.0)
    (*training, validation), (*alike, start) = axes[: len(rates) + 1], axes[len(rates) + 1 :]
    floor: dict[str, Any] = {"color": drawing.GREY, "linewidth": 1, "linestyle": ":", "label": "word frequencies"}
    level = rows(frame, part="floor")["value"].iloc[0]
    for rate, above, below in zip(rates, training, alike, strict=True):
        for name in cases_at(rates, rate):
            own, dashes = rows(frame, part="training", case=name, rate=rate), "--" if name in FACTORS else "-"
            for ax, quantity in ((above, "loss"), (below, "token_similarity")):
                line(ax, curve(own, by="step", quantity=quantity), CASES[name].colour, name, linestyle=dashes)
        above.axhline(level, **floor)
        axis(above, f"Training, learning rate {rate:g}", "step", "loss, nats per token")
        axis(below, f"Last block, learning rate {rate:g}", "step", "t_sim", ylim=(0, 1.02))
    runs = [(name, rate) for rate in rates for name in cases_at(rates, rate)]
    for shift, quantity, colour in ((-0.2, "one pass", drawing.SKY), (0.2, "future hidden", drawing.ORANGE)):
        known = rows(frame, part="validation", quantity=quantity).set_index(["case", "rate"])["value"]
        heights = [number + shift for number in range(len(runs))]
        validation.barh(heights, known[runs], height=0.38, color=colour, label=quantity)
    validation.axvline(level, **floor)
    validation.set_yticks(range(len(runs)), [f"{name}, {rate:g}" for name, rate in runs], fontsize=7)
    validation.invert_yaxis()
    axis(validation, "Validation", "loss, nats per token", "model, learning rate")
    for name, case in PLAIN.items():
        line(start, curve(frame, part="start", case=name), case.colour, name)
    last = int(frame["block"].max())
    axis(start, "Not trained, width as in the paper", "block", "t_sim", ylim=(0, 1.02), last=last)
    drawing.legend_below(axes, columns=2)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    ends = {name: float(curve(frame, part="start", case=name).iloc[-1]) for name in PLAIN}
    return [
        *(claim for rate in sorted(config.rates) for claim in _of_rate(frame, config.rates, rate)),
        judge(
            f"at its own initialisation the post-norm model of {config.start.depth} blocks has collapsed",
            "§1, §2: post-norm fails because similarity escalates; not shown for Transformer-XL",
            f"t_sim after the last block: {_list(ends)}",
            f"above {COLLAPSED}",
            ends[POST] > COLLAPSED,
            f"width {config.start.width}, the authors' weights, {config.start.tokens} tokens without memory",
        ),
        judge(
            "the paper's own run, 201 M parameters on WikiText-103 for 50 000 steps, comes out as published",
            "Fig. 7",
            "depthscope train txl-wikitext103 is that run; it needs GPUs",
            "—",
            None,
        ),
    ]


def _list(values: dict[str, float]) -> str:
    return spell("{} {:.3f}", values, "; ")


def _of_rate(frame: pd.DataFrame, rates: Sequence[float], rate: float) -> list[Claim]:
    own, at = rows(frame, rate=rate), f"learning rate {rate:g}: "
    read = rows(own, part="validation").pivot(index="case", columns="quantity", values="value")
    read = read.loc[cases_at(rates, rate)]
    training = rows(own, part="training")
    late = training[training["step"] > (1 - LAST) * training.groupby("case")["step"].transform("max")]
    losses = curve(late, by="case", quantity="loss")
    final = {name: losses[name] if read["whole"].notna()[name] else math.inf for name in read.index}
    alike = {n: curve(training, by="step", case=n, quantity="token_similarity").iloc[-1] for n in read.index}
    whole, hidden = read["one pass"], read["future hidden"]
    pre, gap = final[PRE], final[POST] - final[PRE]
    learnt = rows(frame, part="floor")["value"].iloc[0] - pre > REACHES  # else no more than how frequent words are
    apart = (whole - hidden).drop(LEAKING).abs()
    most = apart.max() if apart.notna().any() else 0.0
    found = [
        judge(
            f"{at}post-norm without warm-up and clipping fails",
            "Fig. 7: the loss of post-norm stays high",
            f"training loss {final[POST]:.3f}, pre-norm {pre:.3f}",
            f"at least {FAILS} above pre-norm",
            gap >= FAILS,
            lacks="" if learnt else "pre-norm has learnt no more than how frequent words are",
        ),
        judge(
            f"{at}the paper's de-escalation, which sees the future, reaches pre-norm",
            "Fig. 7: de-escalated and pre-norm are similar",
            f"training loss {final[LEAKING]:.3f}, pre-norm {pre:.3f}",
            f"at most {REACHES} above pre-norm",
            final[LEAKING] <= pre + REACHES,
            when=learnt,
        ),
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
            f"{at}models that do not see the future have the same loss in one pass and with the future hidden",
            "not in the paper; a control",
            f"largest difference {most:.0e}",
            f"{SAME}: rounding of float32 in other sums",
            most < SAME,
            kind="check",
        ),
        judge(
            f"{at}where post-norm fails, its tokens have become alike",
            "§1: it is similarity that keeps deep post-norm models from training",
            f"t_sim after the last block at the end: {_list(alike)}",
            f"post-norm above {COLLAPSED}, pre-norm below",
            alike[POST] > COLLAPSED > alike[PRE],
            when=gap >= FAILS,
        ),
    ]
    if WARM_UP in final:
        found.append(
            judge(
                f"{at}what post-norm lacks is warm-up or clipping",
                "not in the paper, which has neither; the authors of Transformer-XL clip",
                f"training loss {final[POST]:.3f}; warm-up {final[WARM_UP]:.3f}, clipping {final[CLIPPED]:.3f}",
                "one of them makes up for at least half of the distance to pre-norm, if that is at least 0.1",
                min(final[WARM_UP], final[CLIPPED]) <= pre + gap / 2,
                when=gap >= REACHES,
            )
        )
    return found


TINY = Training(depth=2, width=16, heads=2, rows=4, segment=8, steps=10, hidden_segments=1)
QUICK = Config(training=TINY, rates=(1e-2,), start=Start(width=32, heads=2, depth=4, rows=2, tokens=16))
STUDY = Study("yu2024-fig7", Config(), QUICK, compute, draw, claims)
