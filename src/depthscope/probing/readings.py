"""Readings: what was measured at one place, and the tokens that stand out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# The argument with the ids that the blocks of a part read; of other parts (images) no token has a text.
_IDS = {"": "input_ids", "encoder": "input_ids", "text": "input_ids", "decoder": "decoder_input_ids"}


class Reading(NamedTuple):
    """One measure at one place for all sequences of a batch."""

    block: int
    station: str
    head: int  # -1: no head
    measure: str
    first_sample: int  # -1: the whole batch
    values: list[float]  # one per sequence, or one for the whole batch


class Sink(NamedTuple):
    """One outlier token in one block."""

    block: int
    sample: int
    token: int  # its position among the real tokens of the sequence
    norm_ratio: float
    text: str  # "" if it is not known


class Waiting(NamedTuple):
    """Numbers that are still where they were computed."""

    reading: Reading  # without values
    values: Tensor
    error: Tensor | None  # the bound on their error, of a measure that has one


def check_shape(name: str, values: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(values.shape) != expected and not (expected == () and values.numel() == 1):
        raise ValueError(f"the measure {name!r} must return shape {expected} here, got {tuple(values.shape)}")


def text_of_token(decode: Any, given: dict[str, Any], part: str, shape: torch.Size, sample: int, place: int) -> str:
    """The text of one token of the blocks' (batch, n), of a batch that was given as these arguments; "" if it has none.

    `decode` is the tokenizer's, which makes a text of ids.
    """
    ids = given.get(_IDS.get(part, ""))
    if decode is None or not isinstance(ids, Tensor) or ids.shape != shape:
        return ""
    return str(decode([int(ids[sample, place])]))
