"""The models whose spectra Fig. 5's study shows: a small ViT on digits and a small causal language model, trained here.

Both are pre-norm with PyTorch's default initialiser, so that their spectra begin alike; AdamW with a short warm-up and
a linear descent. Neither is tuned: what is asked is where training moves the eigenvalues of H = W_V W_O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import BlockConfig, CausalLM
from depthscope.models.initialisers import INITIALISERS
from depthscope.progress import Tick
from depthscope.text import cut, read_text, train_tokenizer
from depthscope_lab.training.data import load_digits
from depthscope_lab.training.images import ImageClassification
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.task import Share

WARM_UP = 20  # steps
_VOCABULARY = 2000
_ALL = Share(0, 1)


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


def fit(model: nn.Module, loss_of: Any, shape: Training, advance: Tick) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=shape.rate, weight_decay=0.1)
    warm_up = min(WARM_UP, shape.steps // 4) or 1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm_up, 1 - step / shape.steps)
    )
    for step in range(shape.steps):
        loss = loss_of(model, step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        advance()


class Digits:
    """Vision: scikit-learn's digits, patches of 2 × 2, a class token. The score is the test accuracy."""

    field, chance = "vision", 0.1

    def __init__(self, shape: Training, seed: int):
        config = RECIPES["vit-digits"]("pre").changed(
            depth=shape.depth,
            width=shape.width,
            ffn_width=2 * shape.width,
            heads=shape.heads,
            seed=seed,
            batch_size=shape.batch,
        )
        self.task = ImageClassification(config, load_digits())  # type: ignore[arg-type]
        self.model = self.task.build()

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return self.task.loss(model, self.task.batch(step, _ALL, torch.device("cpu")), None)[0]

    @torch.no_grad()
    def score(self) -> float:
        found = self.task.evaluate(self.model.eval(), _ALL, torch.device("cpu"))
        return found["test_accuracy"] / found["count"]


class Manual:
    """Language: the next token of Python's manual, causal. The score is the test loss over that of the word counts."""

    field, chance = "language", 1.0

    def __init__(self, shape: Training, seed: int):
        text = read_text(None)
        ids = torch.tensor(cut(text, train_tokenizer(text, _VOCABULARY), shape.tokens + 1, shape.pieces))
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        self.test, self.train = ids[order[: len(ids) // 10]], ids[order[len(ids) // 10 :]]
        self.batch, self.stream = shape.batch, torch.Generator().manual_seed(seed)
        block = BlockConfig(
            shape.width, shape.heads, 2 * shape.width, placement="pre", initialise=INITIALISERS["pytorch_default"]
        )
        weights = torch.Generator().manual_seed(seed)
        vocabulary = int(ids.max()) + 1
        self.model: nn.Module = CausalLM(
            shape.depth, block, vocabulary=vocabulary, context=shape.tokens, generator=weights
        )

    def loss(self, model: nn.Module, _step: int) -> Tensor:
        chosen = torch.randint(len(self.train), (self.batch,), generator=self.stream)
        return _next_token_loss(model, self.train[chosen])

    @torch.no_grad()
    def score(self) -> float:
        counts = torch.bincount(self.train.flatten(), minlength=int(self.test.max()) + 1).double() + 1
        by_counts = -(counts / counts.sum()).log()[self.test[:, 1:]].mean()
        return float(_next_token_loss(self.model.eval(), self.test) / by_counts)


def _next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def before_and_after(spectra_of: Any, shape: Training, seed: int, advance: Tick) -> pd.DataFrame:
    """The eigenvalues of both models as drawn and as trained, with the score that each has reached."""
    frames = []
    for make in (Digits, Manual):
        run: Digits | Manual = make(shape, seed)
        for state in ("fresh", "trained"):
            if state == "trained":
                fit(run.model.train(), run.loss, shape, advance)
            score = run.score()
            about = {"model": f"small {'ViT' if run.field == 'vision' else 'language model'}", "field": run.field}
            frames.append(spectra_of(run.model).assign(**about, state=state, seed=seed, score=score))
    return pd.concat(frames, ignore_index=True)
