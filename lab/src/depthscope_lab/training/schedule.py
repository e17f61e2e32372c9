"""The learning rate as a function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from depthscope_lab.training.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int, total: int) -> float:
    """The rate of step 0, 1, …, total − 1.

    `drops`: × drop_factor from each share `drop_at` of the run on. `cosine`: ½(1 + cos(π·step/total)).
    During the first `warmup_steps` w, all of it × (step + 1)/w.
    """
    share = step / total
    factor = 1.0
    if config.schedule == "drops":
        factor = config.drop_factor ** sum(share >= at for at in config.drop_at)
    elif config.schedule == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * share))
    if step < config.warmup_steps:
        factor *= (step + 1) / config.warmup_steps
    return config.lr * factor
