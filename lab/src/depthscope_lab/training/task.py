"""What the loop asks of a task. A classifier of images and a language model with a memory both fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Carry = dict[str, Tensor] | None


@dataclass(frozen=True)
class Share:
    """The `index`-th of `count` equal parts of a batch: one per process and accumulated part."""

    index: int
    count: int

    def of(self, size: int) -> slice:
        """Its place in a batch of `size`, which the loop has made a multiple of `count`."""
        part = size // self.count
        return slice(self.index * part, (self.index + 1) * part)


class Task(Protocol):
    """A model, its data and its loss.

    A batch is a pure function of step and share; so a run that is continued sees what it would have
    seen. What a model remembers from one batch to the next goes through `carry`: None at first, then
    whatever `loss` returned for the same share, without gradients; it is part of the checkpoint.
    """

    unit: str  # what is counted per second: "images", "tokens"
    units_per_step: int  # how many of them are in a batch
    steps_per_epoch: int

    def build(self) -> nn.Module:
        """The model in its variant, drawn from the configuration's seed; works on the meta device."""
        ...

    def batch(self, step: int, share: Share, device: torch.device) -> Any:
        """What `loss` gets in step 0, 1, …: this share of the global batch, on `device`."""
        ...

    def loss(self, model: nn.Module, batch: Any, carry: Carry) -> tuple[Tensor, Carry]:
        """The mean loss over the share, a scalar with gradient, and what to carry to the next step."""
        ...

    def evaluate(self, model: nn.Module, share: Share, device: torch.device) -> dict[str, float]:
        """Sums over this share of the test data, and `count`, by which the loop divides their totals."""
        ...

    def report(self, means: dict[str, float]) -> dict[str, float]:
        """What is shown of those quotients: the same, or more that follows from them."""
        ...

    def describe(self) -> dict[str, Any]:
        """The data as JSON (name, counts, fingerprint): a run is continued only on the same."""
        ...
