"""The loss of a Transformer-XL on a stream: as its authors evaluate it, and with the future really hidden.

A model with the paper's de-escalation (the mean over the segment) reads what it is to predict: its loss over
whole segments is not one that it has when it writes. `evaluate_without_future` gives that one.
"""

from __future__ import annotations

import math
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
    return _mean_loss(model, tokens, reading, hidden=False)


def evaluate_without_future(model: TransformerXL, tokens: np.ndarray, reading: Reading = Reading()) -> StreamLoss:
    """The same, but when a token is predicted, the model is given nothing of the segment from that token on.

    Token i of a segment is predicted from a pass over the segment's tokens before it alone: what a model can
    do that writes. One pass per token: as many times slower as half a segment is long. A causal model has the
    same loss as with `evaluate`, up to rounding. The memory holds earlier segments as whole passes left them:
    by then all their tokens are known.
    """
    return _mean_loss(model, tokens, reading, hidden=True)


def _mean_loss(model: TransformerXL, tokens: np.ndarray, reading: Reading, *, hidden: bool) -> StreamLoss:
    """Without dropout; every module is left in the mode it was in."""
    rows = TokenRows(tokens, reading.rows)
    device, part = model.softmax.weight.device, reading.part or slice(None)
    total, number = 0.0, 0
    memory: Memory | None = None
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for index in range(rows.segments(reading.segment))[: reading.segments]:
                ids, targets = (each.to(device) for each in rows.segment(index, reading.segment, part))
                losses, memory = (_hidden_losses if hidden else _losses)(model, ids, targets, memory, reading.context)
                total += losses.double().sum().item()
                number += losses.numel()
    finally:
        for module, training in modes:
            module.training = training
    if number == 0:
        raise ValueError(f"expected at least 1 segment to read, got {reading.segments}")
    return StreamLoss(total / number, number)


def _losses(
    model: TransformerXL, ids: Tensor, targets: Tensor, memory: Memory | None, context: Context
) -> tuple[Tensor, Memory]:
    prediction = model(ids, targets, memory, context)
    return prediction.losses, prediction.memory


def _hidden_losses(
    model: TransformerXL, ids: Tensor, targets: Tensor, memory: Memory | None, context: Context
) -> tuple[Tensor, Memory]:
    found = []
    for seen in range(1, ids.shape[1] + 1):
        prediction = model(ids[:, :seen], memory=memory, context=context)
        found.append(model.softmax(prediction.hidden[:, -1:], targets[:, seen - 1 : seen]))
    return torch.cat(found, dim=1), prediction.memory  # the last pass was over the whole segment
