"""From the names in a configuration to the things themselves: wirings, initialisers, remedies."""

from __future__ import annotations

from depthscope.models import paper_text, pytorch_default, theorem, xavier
from depthscope.models.initialisers import Initialiser
from depthscope.registry import Registry
from depthscope.remedies.record import Remedy, from_dict
from depthscope.training.config import TrainingConfig
from depthscope.training.notation import Named

INITIALISERS: Registry[Initialiser] = Registry(
    "initialiser",
    "depthscope.initialisers",
    [pytorch_default, xavier, theorem, paper_text],
    name_of=lambda initialiser: initialiser.__name__,  # type: ignore[attr-defined]
)


def remedy_of(named: Named) -> Remedy:
    """The remedy that a name and its options stand for."""
    return from_dict(named.record("remedy"))


def remedies_of(config: TrainingConfig) -> list[Remedy]:
    """The remedies of a configuration, in their order."""
    return [remedy_of(named) for named in config.remedies]
