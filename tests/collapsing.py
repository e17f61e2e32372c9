"""A tiny training whose tokens become alike in block 1 at a known step, and in all blocks behind it."""

from typing import Any

import torch
from torch import Tensor, nn

from depthscope.models import Block
from depthscope_lab.training import Share
from depthscope_lab.training.images import ImageClassification
from samples import seeded
from tiny_training import tiny_config, tiny_images


class CollapsingTask(ImageClassification):
    slope = 1.0  # of its loss

    def __init__(self, at: int, until: int | None = None, rank: int | None = None):
        super().__init__(tiny_config(variant="post"), tiny_images())
        self.at, self.until, self.rank, self.step = at, until, rank, 0

    def batch(self, step: int, share: Share, device: torch.device) -> Any:
        self.step = step
        return super().batch(step, share, device)

    def loss(self, model: nn.Module, batch: Any, carry: Any) -> tuple[Tensor, Any]:
        norm = next(block for block in model.modules() if isinstance(block, Block)).norm2
        with torch.no_grad():
            norm.weight.fill_(float(self.step < self.at or (self.until is not None and self.step >= self.until)))
            norm.bias.normal_(generator=seeded(0))
        loss, carry = super().loss(model, batch, carry)
        return loss + self.slope * self.step, carry
