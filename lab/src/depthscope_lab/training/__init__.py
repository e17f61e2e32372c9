"""Deep Transformers trained for real: recipes, data, the loop, checkpoints.

A recipe returns a configuration, `make_task` gives its data and model, `train` runs it:

    config = vit_digits("deescalated").changed(depth=24, epochs=5)
    outcome = train(make_task(config), config, Run(Path("my-run")))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthscope_lab.training.config import CharacterConfig, ImageConfig, LanguageConfig, TrainingConfig
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
from depthscope_lab.training.variants import VARIANTS, Variant

if TYPE_CHECKING:
    from depthscope_lab.training.loading import make_task
    from depthscope_lab.training.loop import train
    from depthscope_lab.training.task import Carry, Share, Task

# Loaded on first use: the command line reads the recipes without torch.
_WITH_TORCH = {"Carry": "task", "Share": "task", "Task": "task", "make_task": "loading", "train": "loop"}

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


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"depthscope_lab.training.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module 'depthscope_lab.training' has no attribute {name!r}")
