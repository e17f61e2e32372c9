"""Which samples a step sees: a function of (seed, step) and nothing else."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from depthscope_lab.training.randomness import derived_generator


def batch_indices(seed: int, step: int, samples: int, batch_size: int) -> Tensor:
    """Indices (batch_size,) of the global batch of step 0, 1, …

    Every epoch has its own random order, of which the samples // batch_size whole batches are used.
    """
    epoch, place = divmod(step, samples // batch_size)
    return _order(seed, epoch, samples)[place * batch_size : (place + 1) * batch_size]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, samples: int) -> Tensor:
    return torch.randperm(samples, generator=derived_generator(seed, "order", epoch))
