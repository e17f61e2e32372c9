"""The norm of the gradient, block by block: with respect to a block's weights and to its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.hooks import Listen, Machine, Visit
from depthscope.inputs import Batch, call
from depthscope.offloading import has_offloaded
from depthscope.probing.readings import Reading
from depthscope.probing.roles import Roles, hypotenuse, norm_of_gradient
from depthscope.transfers import fetched

Loss = Callable[[Any], Tensor]


def check_loss(loss: object) -> None:
    """Refuses what could not be called with a model's output."""
    if loss is not None and not callable(loss):
        raise ValueError(f"expected loss= to be a function of what the model returns, or None, got {loss!r}")


def gradient_norms(
    model: nn.Module,
    anatomy: Anatomy,
    batch: Batch,
    loss: Callable[[Any], Tensor | None] | None,
    first_sample: int,
    roles: Roles | None,
) -> list[Reading]:
    """Readings `weight_gradient` and its parts by role (one per block, of the batch's loss; see `roles`) and
    `output_gradient` (per sample).

    `loss(output)` takes what the model returns. Without one, and where it gives None, it is ⟨R, X_L⟩/√(size of X_L),
    summed over the sequences, with a fixed random R: sums and norms of normed tokens are constant. Weights that blocks
    share (ALBERT) have one gradient, not one per block: only the outputs are reported then, as without `roles`,
    which spares a third of the backward pass.
    `parameter.grad` is not touched.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("gradients=True does not work inside torch.inference_mode()")
    if roles is not None and has_offloaded(model):
        raise ValueError('weights that are offloaded have no gradient here; ask for gradients="outputs"')
    if any(spot.added_to is not None for block in anatomy.blocks for spot in block.spots.values()):
        raise ValueError("gradients are not seen where the residual addition stands outside the blocks' modules")
    left: list[tuple[BlockAnatomy, Tensor]] = []  # the blocks that ran, and what each returned
    ends: dict[str, tuple[Tensor, Tensor | None, int]] = {}  # by part: its last output, the mask, the token axis

    def keep(visit: Visit, _station: str, tokens: Tensor, source: Tensor) -> None:
        left.append((visit.block, source))
        several = visit.streams > 1
        ends[visit.part] = tokens if several else source, visit.real, 1 if several else anatomy.axis_of(visit.block)

    with torch.enable_grad(), Machine(model, anatomy, Listen({"output"}, keep)):
        returned = call(model, batch)
        taken = None if loss is None else loss(returned)
        value = _loss_of_parts(list(ends.values())) if taken is None else taken
    if not value.requires_grad:
        raise ValueError("gradients=True needs a model with parameters that require a gradient; none does")
    if value.numel() != 1:
        raise ValueError(f"expected loss to return one number, got shape {tuple(value.shape)}")
    repeated = len({id(block.module) for block, _ in left}) < len(left)
    weights: list[list[nn.Parameter]] = [[] for _ in left]  # of each block, those that no other block has
    if roles is not None and not repeated:
        weights = [
            [p for p in block.module.parameters() if p.requires_grad and id(p) not in roles.shared] for block, _ in left
        ]
    flat = [p for block in weights for p in block]
    outputs = [output for _, output in left if output.requires_grad]
    found = torch.autograd.grad(value, [*outputs, *flat], allow_unused=True)
    if flat and all(gradient is None for gradient in found[len(outputs) :]):
        if any(".quantized" in type(m).__module__ for block, _ in left for m in block.module.modules()):
            raise ValueError(
                "no gradient passes through quantized layers, which have integers for weights: probe the model as it "
                "was before it was quantized"
            )
        raise ValueError(
            "the gradient reaches no weights of the blocks, as when fully_shard splits them; "
            'ask for gradients="outputs"'
        )
    gradients = dict(zip(map(id, [*outputs, *flat]), found, strict=True))
    waiting: list[tuple[Reading, list[Tensor]]] = []  # the norms that make each value
    for number, (block, output) in enumerate(left, start=1):
        if (gradient := gradients.get(id(output))) is not None:
            rows = map(norm_of_gradient, _batch_first(gradient, anatomy.axis_of(block)))
            waiting.append((Reading(number, "output", -1, "output_gradient", first_sample, []), list(rows)))
    for number, ((block, _), own) in enumerate(zip(left, weights, strict=True), start=1):
        mine = [g for p in own if (g := gradients[id(p)]) is not None and g.numel()]
        if mine and roles is not None:
            norms = {"weight_gradient": list(map(norm_of_gradient, mine))} | roles.norms(block, gradients)
            waiting += [(Reading(number, "output", -1, name, -1, []), parts) for name, parts in norms.items()]
    answers = iter(fetched([norm for _, norms in waiting for norm in norms]))  # one transfer
    readings = []
    for reading, norms_of_reading in waiting:
        values = [next(answers).item() for _ in norms_of_reading]
        readings.append(reading._replace(values=[hypotenuse(values)] if reading.first_sample < 0 else values))
    return readings


def _loss_of_parts(ends: list[tuple[Tensor, Tensor | None, int]]) -> Tensor:
    """The loss of the last output, and of that of every other part which does not lead to it (CLIP's vision tower)."""
    value = _default_loss(*ends[-1])
    others = [end for end in ends[:-1] if end[0].requires_grad]
    if others and value.requires_grad:
        reached = torch.autograd.grad(value, [end[0] for end in others], allow_unused=True, retain_graph=True)
        value = value + sum(_default_loss(*end) for end, found in zip(others, reached, strict=True) if found is None)
    return value


def _batch_first(tokens: Tensor, token_axis: int) -> Tensor:
    """(batch, n, d) of what a block passes on: (n, d) is one sequence, and maps are read row after row."""
    if tokens.ndim == 2:
        return tokens.unsqueeze(0)
    return tokens.flatten(1, -2) if token_axis == 1 else tokens.transpose(0, 1)


def _default_loss(output: Tensor, mask: Tensor | None, token_axis: int) -> Tensor:
    """Σ over the sequences of ⟨R, X⟩/√(size of X), R by position among the real tokens: padding and the rest
    of the batch do not matter."""
    tokens = _batch_first(output, token_axis)
    batch, n, d = tokens.shape
    real = torch.ones(batch, n, dtype=torch.bool, device=tokens.device) if mask is None else mask
    rows = -(-n // 64) * 64  # whole multiples: the first rows do not depend on how many follow
    random = torch.randn(rows, d, generator=torch.Generator().manual_seed(0)).to(tokens)
    position = (real.cumsum(dim=-1) - 1).clamp(min=0)  # (batch, n)
    products = torch.where(real.unsqueeze(-1), tokens * random[position], 0.0).sum(dim=(-2, -1))
    return (products / (real.sum(dim=-1).clamp(min=1) * d) ** 0.5).sum()
