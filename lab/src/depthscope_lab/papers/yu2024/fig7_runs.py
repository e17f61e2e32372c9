"""What the study of Fig. 7 computes: Transformer-XLs trained, read with and without the future, and at their start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from depthscope.measures import token_similarity
from depthscope.progress import Share
from depthscope.report.formats import read_metrics
from depthscope_lab.models.transformer_xl import TransformerXL
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
