"""Yu & Zhang's three variants of a model: post-norm, pre-norm, and post-norm de-escalated."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from depthscope.anatomy import anatomy_of
from depthscope.models.block import NormPlacement, post_norm, pre_norm
from depthscope.remedies import deescalate
from depthscope.training.config import Variant


def placement_of(variant: Variant) -> NormPlacement:
    """Where the norms stand: the de-escalated variant is a post-norm model with a remedy."""
    return pre_norm if variant == "pre" else post_norm


def put_in_variant(model: nn.Module, variant: Variant, tau: float = 1.0) -> nn.Module:
    """Puts de-escalation at every block's output if the variant asks for it; returns the model."""
    if variant == "deescalated":
        for block in anatomy_of(model).blocks:
            block.module.register_forward_hook(partial(_deescalate_output, tau))
    return model


def _deescalate_output(tau: float, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return deescalate(output, tau)
