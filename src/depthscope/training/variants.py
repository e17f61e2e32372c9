"""Yu & Zhang's three variants of a model: post-norm, pre-norm, and post-norm de-escalated."""

from __future__ import annotations

from torch import nn

from depthscope.models.block import NormPlacement, post_norm, pre_norm
from depthscope.remedies import DeEscalate, apply
from depthscope.training.config import Variant


def placement_of(variant: Variant) -> NormPlacement:
    """Where the norms stand: the de-escalated variant is a post-norm model with a remedy."""
    return pre_norm if variant == "pre" else post_norm


def put_in_variant(model: nn.Module, variant: Variant, tau: float = 1.0, at: str = "output") -> nn.Module:
    """Puts de-escalation into every block of a post-norm model if the variant asks for it; returns the model."""
    return apply(model, DeEscalate(tau=tau, at=at)) if variant == "deescalated" else model
