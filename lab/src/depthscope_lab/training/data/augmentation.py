"""AutoAugment (Cubuk et al. 2019) for CIFAR-10, image by image.

kornia has the 25 sub-policies, but draws one of them per call, for the whole batch. Here every image
draws its own; those that drew the same one are changed together, each by random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from depthscope_lab.extras import require
from depthscope_lab.training.randomness import seeded


@cache
def _sub_policies() -> list[Any]:
    return list(require("kornia.augmentation.auto").AutoAugment("cifar10").children())


def auto_augment(
    images: Tensor, generator: torch.Generator, policies: list[Callable[[Tensor], Tensor]] | None = None
) -> Tensor:
    """Images (batch, 3, s, s) in [0, 1] → changed images in [0, 1]. A function of images and generator.

    `policies`: other sub-policies than the 25 for CIFAR-10. kornia knows only torch's global random state:
    it is set for the duration and restored.
    """
    policies = policies or _sub_policies()
    choices = torch.randint(len(policies), (len(images),), generator=generator)
    changed = images.clone()
    with seeded(int(torch.randint(2**62, (), generator=generator))), torch.no_grad():
        for choice in choices.unique().tolist():
            chosen = (choices == choice).to(images.device)
            changed[chosen] = policies[choice](images[chosen]).to(images.dtype)
    return changed.clamp(0, 1)
