"""What the loop asks of a task, and what tasks build their models of: blocks, remedies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from depthscope.anatomy import anatomy_of
from depthscope.hooks import Pass
from depthscope.models import BlockConfig
from depthscope.models.initialisers import INITIALISERS
from depthscope.remedies import Remedy
from depthscope.remedies.record import from_dict
from depthscope.remedies.remedy import Mixing, Site
from depthscope_lab.training.config import TrainingConfig

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
    """A model, its data and its loss: a classifier of images and a language model with a memory both fit.

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


def total_steps(task: Task, config: TrainingConfig) -> int:
    """`steps`, or as many as the epochs have."""
    return config.steps or config.epochs * task.steps_per_epoch


def remedies_of(config: TrainingConfig) -> list[Remedy]:
    """The remedies of a configuration, in their order."""
    return [from_dict(named.record("remedy")) for named in config.remedies]


def block_of(config: TrainingConfig) -> BlockConfig:
    """A block of our own models, in its wiring and its initialisation."""
    initialise = INITIALISERS[config.initialiser or "pytorch_default"]
    return BlockConfig(config.width, config.heads, config.ffn_width, placement=config.wiring, initialise=initialise)


def mixings_in(model: nn.Module, remedies: Iterable[Remedy]) -> list[tuple[Remedy, set[Mixing]]]:
    """Each remedy with what it does to the tokens of the blocks that it is put into: whether it mixes them, and how.

    The remedy itself is asked (`Remedy.mixing_in`), block by block; the model may have it already or not.
    """
    anatomy = anatomy_of(model)
    running = Pass(model, anatomy)
    found = []
    for remedy in remedies:
        mixings = set()
        for number, block in remedy.blocks_of(anatomy, len(anatomy.blocks)):
            causal = anatomy.causal if block.causal is None else block.causal
            mixings.add(remedy.mixing_in(Site(model, anatomy, block, number, causal, running)))
        found.append((remedy, mixings))
    return found


def recorded(config: TrainingConfig) -> dict[str, Any]:
    """The configuration as JSON, its remedies with all their options, also those that nobody gave.

    A run whose remedy has another default in a later version is then another run.
    """

    def in_full(value: Any) -> dict[str, Any]:
        found = {}
        for field in fields(value):
            item = getattr(value, field.name)
            if is_dataclass(item):
                item = {"kind": type(item).__name__} | in_full(item)
            found[field.name] = list(item) if isinstance(item, tuple) else item
        return found

    remedies = [{"remedy": remedy.name} | in_full(remedy) for remedy in remedies_of(config)]
    return config.as_json() | {"remedies": remedies}
