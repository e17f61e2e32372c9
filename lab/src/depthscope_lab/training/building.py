"""From the remedies that a configuration names to the remedies themselves, and to what is recorded of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from depthscope.anatomy import anatomy_of
from depthscope.hooks import Pass
from depthscope.models import BlockConfig
from depthscope.models.initialisers import INITIALISERS
from depthscope.remedies import Remedy
from depthscope.remedies.record import from_dict
from depthscope.remedies.remedy import Mixing, Site
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.notation import Named


def remedy_of(named: Named) -> Remedy:
    """The remedy that a name and its options stand for."""
    return from_dict(named.record("remedy"))


def remedies_of(config: TrainingConfig) -> list[Remedy]:
    """The remedies of a configuration, in their order."""
    return [remedy_of(named) for named in config.remedies]


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
    remedies = [{"remedy": named.name} | _in_full(remedy_of(named)) for named in config.remedies]
    return config.as_json() | {"remedies": remedies}


def _in_full(value: Any) -> dict[str, Any]:
    found = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if is_dataclass(item):
            item = {"kind": type(item).__name__} | _in_full(item)
        found[field.name] = list(item) if isinstance(item, tuple) else item
    return found
