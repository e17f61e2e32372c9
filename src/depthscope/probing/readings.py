"""Readings: what was measured at one place, and the tokens that stand out."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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


def check_shape(name: str, values: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(values.shape) != expected and not (expected == () and values.numel() == 1):
        raise ValueError(f"the measure {name!r} must return shape {expected} here, got {tuple(values.shape)}")
