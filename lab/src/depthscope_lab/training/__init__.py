"""Deep Transformers trained for real: recipes, data, the loop, checkpoints.

A recipe returns a configuration, `make_task` gives its data and model, `train` runs it:

    config = vit_digits("deescalated").changed(depth=24, epochs=5)
    outcome = train(make_task(config), config, Run(Path("my-run")))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "RECIPES": "recipes",
    "VARIANTS": "variants",
    "Carry": "task",
    "CharacterConfig": "config",
    "ImageConfig": "config",
    "LanguageConfig": "config",
    "NonFiniteLoss": "run",
    "Outcome": "run",
    "Recipe": "recipes",
    "Run": "run",
    "Share": "task",
    "Task": "task",
    "TrainingConfig": "config",
    "Variant": "variants",
    "lm_manual": "recipes",
    "make_task": "loading",
    "train": "loop",
    "txl_manual": "recipes",
    "txl_wikitext103": "recipes",
    "vit_cifar10": "recipes",
    "vit_digits": "recipes",
}

__all__ = [
    "RECIPES",
    "VARIANTS",
    "Carry",
    "CharacterConfig",
    "ImageConfig",
    "LanguageConfig",
    "NonFiniteLoss",
    "Outcome",
    "Recipe",
    "Run",
    "Share",
    "Task",
    "TrainingConfig",
    "Variant",
    "lm_manual",
    "make_task",
    "train",
    "txl_manual",
    "txl_wikitext103",
    "vit_cifar10",
    "vit_digits",
]

if TYPE_CHECKING:
    from depthscope_lab.training.config import CharacterConfig, ImageConfig, LanguageConfig, TrainingConfig
    from depthscope_lab.training.loading import make_task
    from depthscope_lab.training.loop import train
    from depthscope_lab.training.recipes import (
        RECIPES,
        Recipe,
        lm_manual,
        txl_manual,
        txl_wikitext103,
        vit_cifar10,
        vit_digits,
    )
    from depthscope_lab.training.run import NonFiniteLoss, Outcome, Run
    from depthscope_lab.training.task import Carry, Share, Task
    from depthscope_lab.training.variants import VARIANTS, Variant


def __getattr__(name: str) -> Any:
    """Loaded on first use: the command line reads the recipes without torch."""
    if name in _HOMES:
        return getattr(import_module(f"depthscope_lab.training.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'depthscope_lab.training' has no attribute {name!r}")
