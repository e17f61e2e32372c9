"""What `depth-1000` compares: the prescription and its controls, each a way to wire the blocks of one model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from depthscope.models.mean_subtraction import without_mean
from depthscope.models.token_means import Full
from depthscope.models.wiring import WIRINGS, Wiring
from depthscope.theory import Gains, Prescription, prescribe

LABELS = {  # of the curves, in this order
    "prescribed": "prescribed (α and τ)",
    "alpha": "α alone",
    "tau": "τ alone",
    "post": "classic post-norm",
    "pre": "pre-norm",
    "deep-norm": "DeepNorm",
    "layer-scale": "LayerScale",
}


def prescription(depth: int, width: int, ffn_width: int, tokens: int) -> Prescription:
    """α and τ for this depth, from the theory alone: weights as `nn.Linear` draws them."""
    return prescribe(depth, Gains.of_linear(width, ffn_width, tokens))


def wiring_for(variant: str, found: Prescription) -> Wiring:
    """The wiring of a variant: one of `WIRINGS`, or post-norm with the prescription's α, τ or both."""
    if variant in WIRINGS:
        return WIRINGS[variant]
    alpha = found.alpha if variant in ("prescribed", "alpha") else 1.0
    tau = found.tau if variant in ("prescribed", "tau") else 0.0
    return weighted_post_norm(alpha, tau)


def same_as(variant: str, found: Prescription) -> str:
    """The variant itself, or the one that it cannot be told from: where α = 1 is prescribed, τ alone is all of it."""
    return {"alpha": "post", "tau": "prescribed"}.get(variant, variant) if found.alpha == 1 else variant


def weighted_post_norm(alpha: float, tau: float) -> Wiring:
    """Post-norm with both branches times α and de-escalation τ at the end of the block.

    The same as the remedies `ResidualWeight(alpha)` and `DeEscalate(tau)` make of a post-norm model (a test compares
    them).
    """
    return Wiring(
        f"post, α = {alpha:.4g}, τ = {tau:.4g}",
        partial(_run, alpha=alpha, tau=tau),
        final_norm=False,
        placement="post",
    )


def _run(block: Any, x: Tensor, given: Any, alpha: float, tau: float) -> Tensor:
    at = block.stations
    x = at["input"](x)
    y1 = at["after_attention"](x + at["attention_branch"](alpha * block.attend(x, given)))
    y2 = block.enter_ffn(block.norm1(y1), given)
    y3 = at["after_ffn"](y2 + at["ffn_branch"](alpha * block.ffn(y2)))
    return at["output"](without_mean(block.norm2(y3), tau, Full()))
