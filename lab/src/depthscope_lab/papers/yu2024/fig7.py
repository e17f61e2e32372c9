"""Yu & Zhang 2024, Fig. 7: a deep Transformer-XL trained post-norm, pre-norm and de-escalated; how much is the leak.

The paper subtracts the mean over the segment, at the FFN's input: every token then sees a part of what is to be
predicted. Here the same is trained with that mean and with a causal one, and each model is read twice: all positions
of a segment in one pass, as in training, and with the future hidden, as a model has it that writes. The paper trains
without warm-up and without clipping, which the authors of Transformer-XL have: post-norm is also trained with each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from depthscope import drawing
from depthscope.measures import token_similarity
from depthscope.progress import Share
from depthscope.report.formats import read_metrics
from depthscope_lab.models.transformer_xl import TransformerXL
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, axis, curve, judge, line, rows
from depthscope_lab.training.checkpoint import read_newest
from depthscope_lab.training.config import LanguageConfig
from depthscope_lab.training.data.token_stream import TokenRows
from depthscope_lab.training.data.wikitext import Corpus, load_manual, load_wikitext
from depthscope_lab.training.display import Display
from depthscope_lab.training.language import LanguageModelling, Segment, build_transformer_xl, reading_of
from depthscope_lab.training.loop import train
from depthscope_lab.training.perplexity import evaluate, evaluate_without_future
from depthscope_lab.training.recipes import txl_manual, txl_wikitext103
from depthscope_lab.training.run import NonFiniteLoss, Run
from depthscope_lab.training.state import restore_model
from depthscope_lab.training.task import Carry

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A variant, and what is done so that it trains."""

    variant: str
    warm_up: bool = False
    clip: bool = False


POST, PRE, LEAKING, CAUSAL = "post-norm", "pre-norm", "full mean (leaks)", "prefix mean (causal)"
WARM_UP, CLIPPED = "post-norm, warm-up", "post-norm, clipping"
PLAIN = {POST: Case("post"), PRE: Case("pre"), LEAKING: Case("deescalated-leaking"), CAUSAL: Case("deescalated")}
FACTORS = {WARM_UP: Case("post", warm_up=True), CLIPPED: Case("post", clip=True)}
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

    @property
    def warmup_steps(self) -> int:
        return max(1, self.steps // 5)


def load_corpus(folder: str | None) -> Corpus:
    """Python's manual, or the WikiText in a folder."""
    return load_manual() if folder is None else load_wikitext(folder)


def configured(shape: Training, case: Case, rate: float, seed: int) -> LanguageConfig:
    """The recipe in this shape; dσ² is that of the paper's model of width 410."""
    return txl_manual(case.variant).changed(
        depth=shape.depth,
        width=shape.width,
        ffn_width=2 * shape.width,
        heads=shape.heads,
        batch_size=shape.rows,
        segment=shape.segment,
        memory=shape.segment,
        eval_segment=shape.segment,
        eval_memory=2 * shape.segment,
        eval_clamp=2 * shape.segment,
        steps=shape.steps,
        lr=rate,
        init_std=0.02 * math.sqrt(txl_wikitext103(case.variant).width / shape.width),
        warmup_steps=shape.warmup_steps if case.warm_up else 0,
        clip_norm=shape.clip_norm if case.clip else None,
        hidden_segments=0,  # the study reads by itself
        seed=seed,
    )


def run_case(config: LanguageConfig, corpus: Corpus, hidden_segments: int, told: Share) -> list[Row]:
    """Trains and reads. Rows: the losses of training, t_sim of the last block, the losses on the validation text.

    `told` hears of the share of the training that is done. A loss that is not finite ends it: `nan` from there on.
    """
    task, similarities, total = _Watched(config, corpus), [], config.steps or 1
    with TemporaryDirectory() as folder:
        every: dict[str, Any] = {"checkpoint_every": total, "evaluate_every": total, "log_every": max(1, total // 50)}
        run = Run(Path(folder), **every, tracker="none", cpu=True, watch_every=None)  # the last block is enough

        def logged(step: int) -> None:
            similarities.append(_row("training", "token_similarity", task.similarity(), step))
            told(step / total)

        try:
            outcome = train(task, config, run, display=_Told(logged))
        except NonFiniteLoss:
            nothing = dict.fromkeys(("whole", "one pass", "future hidden"), math.nan)
            return [*_losses(run.metrics), *similarities, *_end(nothing)]
        if outcome.signal is not None:  # training obeys by saving its work, a study by ending
            raise KeyboardInterrupt
        found = read_newest(run.checkpoints, lambda _message: None)
        assert found is not None
        model = task.build()
        assert isinstance(model, TransformerXL)
        restore_model(model, found.files["model"], found.record["tied"])
        few = replace(reading_of(config), segments=hidden_segments)
        losses = {
            "whole": outcome.metrics["valid_loss"],
            "one pass": evaluate(model, corpus.valid, few).loss,
            "future hidden": evaluate_without_future(model, corpus.valid, few).loss,
        }
        return [*_losses(run.metrics), *similarities, *_end(losses)]


def unigram_loss(corpus: Corpus) -> float:
    """The loss on the validation text of one who knows nothing but how often each word occurs in the training text."""
    counts = np.bincount(corpus.train, minlength=len(corpus.vocabulary)) + 1.0  # none is impossible
    return float(-np.log(counts / counts.sum())[corpus.valid].mean())


@torch.no_grad()
def similarity_at_start(config: LanguageConfig, corpus: Corpus, rows: int, tokens: int) -> list[float]:
    """t_sim behind every block of a model that is not trained, on the beginning of the validation text."""
    model = build_transformer_xl(config, len(corpus.vocabulary)).eval()
    ids, _ = TokenRows(corpus.valid, rows).segment(0, tokens)
    with _similarities(model.blocks) as found:
        model(ids)
    return found


class _Told(Display):
    """Passes on which step was logged."""

    def __init__(self, tell: Callable[[int], None]):
        self.tell = tell

    def logged(self, step: int, values: Mapping[str, float], seconds_left: float) -> None:
        self.tell(step)


class _Watched(LanguageModelling):
    """Knows the last step's batch, to look at it once more."""

    def loss(self, model: nn.Module, batch: Segment, carry: Carry) -> tuple[Tensor, Carry]:
        self._last = model, batch, carry
        return super().loss(model, batch, carry)

    @torch.no_grad()
    def similarity(self) -> float:
        """Mean t_sim behind the last block, in the batch of the last step, after its update."""
        model, batch, carry = self._last
        assert isinstance(model, TransformerXL)
        with _similarities(model.blocks[-1:]) as found:
            super().loss(model, batch, carry)
        return found[0]


@contextmanager
def _similarities(blocks: Iterable[nn.Module]) -> Iterator[list[float]]:
    """The mean t_sim behind each of the blocks, in the order in which they are passed."""
    found: list[float] = []

    def look(_module: object, _inputs: object, output: Tensor) -> None:
        found.append(token_similarity(output).mean().item())

    handles = [block.get_submodule("stations.output").register_forward_hook(look) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _row(part: str, quantity: str, value: float | None, step: int | None = None) -> Row:
    """None is how a file of metrics writes what is not finite."""
    return {"part": part, "step": step, "quantity": quantity, "value": math.nan if value is None else value}


def _losses(metrics: Path) -> Iterator[Row]:
    return (_row("training", "loss", row["loss"], row["step"]) for row in read_metrics(metrics) if "loss" in row)


def _end(losses: Mapping[str, float]) -> Iterator[Row]:
    return (_row("validation", quantity, value) for quantity, value in losses.items())


FAILS, REACHES, LEAK = 0.5, 0.1, 0.05  # nats per token
SAME = 1e-3
COLLAPSED = 0.95
LAST = 0.1  # the end of a training: this share of its steps
_COLOURS = {
    POST: drawing.VERMILION,
    PRE: drawing.BLACK,
    LEAKING: drawing.ORANGE,
    CAUSAL: drawing.BLUE,
    WARM_UP: drawing.PURPLE,
    CLIPPED: drawing.GREEN,
}


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


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: part, case, rate (nan where none), step, block (−1 where none), quantity, value.

    `training`: loss (mean since the row before) and t_sim of the last block. `validation`: the loss on the whole
    text, and on its first segments in one pass and with the future hidden. `start`: t_sim behind every block.
    `floor`: the loss of one who knows only how frequent words are.
    """
    corpus = load_corpus(config.data)
    floor = {"part": "floor", "case": "word frequencies", "quantity": "loss", "value": unigram_loss(corpus)}
    found: list[dict[str, Any]] = [floor]
    shape = config.start
    form = {"depth": shape.depth, "width": shape.width, "ffn_width": 2 * shape.width, "heads": shape.heads}
    for name, case in PLAIN.items():
        start = txl_wikitext103(case.variant).changed(**form, seed=config.seed)
        about = {"part": "start", "case": name, "quantity": "token_similarity"}
        values = similarity_at_start(start, corpus, shape.rows, shape.tokens)
        found += [about | {"block": block, "value": value} for block, value in enumerate(values, start=1)]
    runs = [(name, rate) for rate in sorted(config.rates, reverse=True) for name in _cases(config.rates, rate)]
    for place, (name, rate) in enumerate(runs):
        trained = configured(config.training, CASES[name], rate, config.seed)

        def told(share: float, place: int = place) -> None:
            progress((place + share) / len(runs))

        ran = run_case(trained, corpus, config.training.hidden_segments, told)
        found += [{"case": name, "rate": rate} | row for row in ran]
    frame = pd.DataFrame(found)
    for column in ("step", "block"):
        frame[column] = frame[column].fillna(-1).astype(int)
    return frame[["part", "case", "rate", "step", "block", "quantity", "value"]]


def _cases(rates: Sequence[float], rate: float) -> list[str]:
    """Warm-up and clipping are for the highest rate, where they could be needed."""
    return list(CASES if rate == max(rates) else PLAIN)


def draw(frame: pd.DataFrame) -> Any:
    """Above: training at every rate, validation read in both ways. Below: t_sim, in training and before."""
    rates = sorted(frame["rate"].dropna().unique())
    columns = len(rates) + 1
    figure, axes = drawing.panels(columns, rows=2, width=4.2, height=4.0)
    for column, rate in enumerate(rates):
        above, below = axes[column], axes[columns + column]
        for name in _cases(rates, rate):
            for ax, quantity in ((above, "loss"), (below, "token_similarity")):
                dashes = "--" if name in FACTORS else "-"
                line(ax, _training(frame, name, rate, quantity), _COLOURS[name], name, linestyle=dashes)
        above.axhline(_floor(frame), color=drawing.GREY, linewidth=1, linestyle=":", label="word frequencies")
        axis(above, f"Training, learning rate {rate:g}", "step", "loss, nats per token")
        axis(below, f"Last block, learning rate {rate:g}", "step", "t_sim", ylim=(0, 1.02))
        drawing.legend_below([above, below], columns=2)
    _draw_validation(axes[columns - 1], frame, rates)
    start = axes[-1]
    for name in PLAIN:
        line(start, curve(frame, part="start", case=name), _COLOURS[name], name)
    last = int(frame["block"].max())
    axis(start, "Not trained, width as in the paper", "block", "t_sim", ylim=(0, 1.02), last=last)
    drawing.legend_below(start, columns=2)
    return figure


def _draw_validation(ax: Any, frame: pd.DataFrame, rates: Sequence[float]) -> None:
    """Two bars per case and rate."""
    runs = [(name, rate) for rate in rates for name in _cases(rates, rate)]
    for place, (quantity, colour) in enumerate((("one pass", drawing.SKY), ("future hidden", drawing.ORANGE))):
        values = [_validation(frame, name, rate, quantity) for name, rate in runs]
        heights = [number - 0.2 + 0.4 * place for number in range(len(runs))]
        ax.barh(heights, values, height=0.38, color=colour, label=quantity)
    ax.axvline(_floor(frame), color=drawing.GREY, linewidth=1, linestyle=":", label="word frequencies")
    ax.set_yticks(range(len(runs)), [f"{name}, {rate:g}" for name, rate in runs], fontsize=7)
    ax.invert_yaxis()
    axis(ax, "Validation", "loss, nats per token", "model, learning rate")
    drawing.legend_below(ax, columns=2)


def _floor(frame: pd.DataFrame) -> float:
    return float(rows(frame, part="floor")["value"].iloc[0])


def _training(frame: pd.DataFrame, case: str, rate: float, quantity: str) -> pd.Series:
    return rows(frame, part="training", case=case, rate=rate, quantity=quantity).set_index("step")["value"]


def _validation(frame: pd.DataFrame, case: str, rate: float, quantity: str) -> float:
    return float(rows(frame, part="validation", case=case, rate=rate, quantity=quantity)["value"].iloc[0])


def _final(frame: pd.DataFrame, case: str, rate: float) -> float:
    """The mean training loss at the end; infinite if the training broke off."""
    if pd.isna(_validation(frame, case, rate, "whole")):
        return float("inf")
    losses = _training(frame, case, rate, "loss")
    return float(losses[losses.index > (1 - LAST) * losses.index.max()].mean())


def _list(values: dict[str, float]) -> str:
    return "; ".join(f"{name} {value:.3f}" for name, value in values.items())


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    ends = {name: float(curve(frame, part="start", case=name).iloc[-1]) for name in PLAIN}
    return [
        *(claim for rate in sorted(config.rates) for claim in _of_rate(frame, config.rates, rate)),
        judge(
            f"at its own initialisation the post-norm model of {config.start.depth} blocks has collapsed",
            "§1, §2: post-norm fails because similarity escalates; not shown for Transformer-XL",
            f"t_sim behind the last block: {_list(ends)}",
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


def _of_rate(frame: pd.DataFrame, rates: Sequence[float], rate: float) -> list[Claim]:
    cases, at = _cases(rates, rate), f"learning rate {rate:g}: "
    final = {name: _final(frame, name, rate) for name in cases}
    whole, hidden = ({name: _validation(frame, name, rate, q) for name in cases} for q in ("one pass", "future hidden"))
    alike = {name: float(_training(frame, name, rate, "token_similarity").iloc[-1]) for name in cases}
    pre = final[PRE]
    gap = final[POST] - pre
    learnt = _floor(frame) - pre > REACHES  # else nobody has learnt more than how frequent words are
    honest = [name for name in cases if name != LEAKING]
    most = max((abs(whole[name] - hidden[name]) for name in honest if whole[name] == whole[name]), default=0.0)
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
        ),
        judge(
            f"{at}where post-norm fails, its tokens have become alike",
            "§1: it is similarity that keeps deep post-norm models from training",
            f"t_sim behind the last block at the end: {_list(alike)}",
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
