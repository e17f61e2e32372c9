"""The loss of a Transformer-XL on a stream: as its authors evaluate it, and with the future really hidden.

A model with the paper's de-escalation (the mean over the segment) reads what it is to predict: its loss over
whole segments is not one that it has when it writes. `evaluate_without_future` gives that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from depthscope_lab.models.transformer_xl import EVALUATION, Context, Memory, TransformerXL
from depthscope_lab.training.data.token_stream import TokenRows


def perplexity_of(loss: float) -> float:
    """exp(loss); infinite beyond what a float holds."""
    return math.exp(loss) if loss < 709 else math.inf


@dataclass(frozen=True)
class StreamLoss:
    """The mean loss in nats, and the number of tokens that it is taken over."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.loss)


@dataclass(frozen=True)
class Reading:
    """How a stream is read. The defaults are the authors' for WikiText-103: 10 rows, segments of 64, their context.

    `segments`: how many segments of every row are read, from the first; None: all. `part`: only these rows; None: all.
    """

    rows: int = 10
    segment: int = 64
    context: Context = EVALUATION
    segments: int | None = None
    part: slice | None = None


def evaluate(model: TransformerXL, tokens: np.ndarray, reading: Reading = Reading()) -> StreamLoss:
    """The mean of −log p(next token) over the stream, segment by segment with memory.

    With `segment=1` the model reads token by token. For a causal model with `same_length` that changes nothing.
    """

    def losses(ids: Tensor, targets: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        prediction = model(ids, targets, memory, reading.context)
        assert prediction.losses is not None
        return prediction.losses, prediction.memory

    return _mean_loss(model, tokens, reading, losses)


def evaluate_without_future(model: TransformerXL, tokens: np.ndarray, reading: Reading = Reading()) -> StreamLoss:
    """The same, but when a token is predicted, the model is given nothing of the segment from that token on.

    Token i of a segment is predicted from a pass over the segment's tokens before it alone: what a model can
    do that writes. One pass per token: as many times slower as half a segment is long. A causal model has the
    same loss as with `evaluate`, up to rounding. The memory holds earlier segments as whole passes left them:
    by then all their tokens are known.
    """

    def losses(ids: Tensor, targets: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        found = []
        for seen in range(1, ids.shape[1] + 1):
            prediction = model(ids[:, :seen], memory=memory, context=reading.context)
            found.append(model.softmax(prediction.hidden[:, -1:], targets[:, seen - 1 : seen]))
        return torch.cat(found, dim=1), prediction.memory  # the last pass was over the whole segment

    return _mean_loss(model, tokens, reading, losses)


def _mean_loss(
    model: TransformerXL,
    tokens: np.ndarray,
    reading: Reading,
    losses: Callable[[Tensor, Tensor, Memory | None], tuple[Tensor, Memory]],
) -> StreamLoss:
    rows = TokenRows(tokens, reading.rows)
    count = rows.segments(reading.segment)
    device = model.softmax.weight.device
    total, number, memory = 0.0, 0, None
    with torch.no_grad(), _evaluating(model):
        for index in range(count if reading.segments is None else min(count, reading.segments)):
            ids, targets = (
                part.to(device) for part in rows.segment(index, reading.segment, reading.part or slice(None))
            )
            found, memory = losses(ids, targets, memory)
            total += found.double().sum().item()
            number += found.numel()
    if number == 0:
        raise ValueError(f"expected at least 1 segment to read, got {reading.segments}")
    return StreamLoss(total / number, number)


@contextmanager
def _evaluating(model: TransformerXL) -> Iterator[None]:
    """Without dropout; every module is left in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
