"""A number with a bound on its own error."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Bounded(NamedTuple):
    """What a fast form found, and how far it can be from what the dense form of the same measure finds.

    Both are float64 of the same shape. `error` is absolute; nan where the value is.
    """

    value: Tensor
    error: Tensor
