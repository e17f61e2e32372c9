"""What theory says of a cell (α, τ) of depth-phase when its model is new, and what is measured there.

Both exponents, what they add up to over the whole depth (t_div behind the last block, the factor by which the gradient
grows), from the closed form of `theory.mean_field` and from the blocks themselves by `theory.exponents`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from depthscope.measures import TokenMatrix, token_similarity
from depthscope.remedies import DeEscalate, ResidualWeight, apply
from depthscope.theory import Gains, course, gradient_exponents, token_exponents
from depthscope_lab.papers.deep.phase_runs import Row, Shape, Wiring, build, digits, pixels

IMAGES = 8  # that the measured numbers are means over


def gains(tokens: int) -> Gains:
    """Of Xavier's attention and He's FFN."""
    return Gains(attention=1.0, ffn=2.0, score=1.0, tokens=tokens)


def entrance(shape: Shape) -> tuple[int, float, float]:
    """Tokens per image, and similarity and mean square of the tokens that enter block 1; means over images."""
    tokens = _embedded(shape, "post")
    similarity = token_similarity(tokens).mean().item()
    return tokens.shape[-2], similarity, tokens.double().square().mean().item()


def closed_form(shape: Shape, wiring: Wiring, alpha: float, tau: float, given: tuple[int, float, float]) -> Row:
    """λ_t and λ_g, means per block; t_div behind the last block; ln of the gradient's growth over all blocks.

    λ_t is that of nearly equal tokens; infinite at τ = 1, where nothing can collapse.
    """
    count, similarity, energy = given
    found = course(shape.depth, alpha, tau, gains(count), placement=wiring, similarity=similarity, energy=energy)
    return {
        "alpha": alpha,
        "tau": tau,
        "lambda_t": math.fsum(found.tokens) / shape.depth,
        "lambda_g": found.growth / shape.depth,
        "diversity": 1 / (1 + found.odds[-1]),
        "growth": found.growth,
    }


def measured(shape: Shape, wiring: Wiring, alpha: float, tau: float) -> list[Row]:
    """One row: the same four numbers of the model itself, new; names with `measured_`. λ_t is None at τ = 1."""
    model = build(shape, wiring)
    apply(model, ResidualWeight(alpha), *([DeEscalate(tau, at="output")] if tau else []))
    blocks, tokens = list(model.encoder.blocks), _embedded(shape, wiring)
    of_tokens = token_exponents(blocks, tokens, generator=torch.Generator().manual_seed(shape.seed))
    of_gradient = gradient_exponents(blocks, tokens, generator=torch.Generator().manual_seed(shape.seed))
    with torch.no_grad():
        x = tokens
        for block in blocks:
            x = block(x)
    end = TokenMatrix.of(x)
    usable = [number for number in of_tokens if math.isfinite(number)] if tau < 1 else []
    return [
        {
            "alpha": alpha,
            "tau": tau,
            "measured_lambda_t": sum(usable) / len(usable) if usable else None,
            "measured_lambda_g": sum(of_gradient) / shape.depth,
            "measured_diversity": (end.deviation_norm / end.norm).square().log().mean().exp().item(),
            "measured_growth": sum(of_gradient),
        }
    ]


@torch.no_grad()
def _embedded(shape: Shape, wiring: Wiring) -> Tensor:
    """What enters block 1, (images, n, d)."""
    model = build(shape, wiring)
    heard: list[Tensor] = []
    handle = model.encoder.register_forward_pre_hook(lambda _module, given: heard.append(given[0]))
    try:
        model(pixels(digits().train_images[:IMAGES]))
    finally:
        handle.remove()
    return heard[0]
