"""The norm of the gradient, block by block: with respect to a block's weights and to its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.probing.inputs import Batch
from depthscope.probing.reduction import Row
from depthscope.probing.taps import Taps, Visit

Loss = Callable[[Any], Tensor]


def gradient_norms(model: nn.Module, anatomy: Anatomy, batch: Batch, loss: Loss | None, first_sample: int) -> list[Row]:
    """Rows `weight_gradient` (one per block, of the batch's loss) and `output_gradient` (per sample).

    `loss(output)` takes what the model returns. By default it is ⟨R, X_L⟩/√(size of X_L) with a fixed
    random R, since sums and norms of normed tokens are constant. Weights that blocks share (ALBERT)
    have one gradient, not one per block: only the outputs are reported then.
    `parameter.grad` is not touched.
    """
    outputs: list[Tensor] = []

    def keep(_visit: Visit, _station: str, _tokens: Tensor, source: Tensor) -> None:
        outputs.append(source)

    with torch.enable_grad(), Taps(model, anatomy, {"output"}, keep):
        returned = model(*batch.args, **batch.kwargs)
        value = _default_loss(outputs[-1]) if loss is None else loss(returned)
    if not value.requires_grad:
        raise ValueError("gradients=True needs a model with parameters that require a gradient; none does")
    if value.numel() != 1:
        raise ValueError(f"expected loss to return one number, got shape {tuple(value.shape)}")
    shared = len(anatomy.blocks) < len(outputs)
    weights = [] if shared else [[p for p in b.module.parameters() if p.requires_grad] for b in anatomy.blocks]
    flat = [p for block in weights for p in block]
    kept = [o for o in outputs if o.requires_grad]
    found = torch.autograd.grad(value, [*kept, *flat], allow_unused=True)
    rows = []
    of_output = dict(zip(map(id, kept), found, strict=False))
    for number, output in enumerate(outputs, start=1):
        gradient = of_output.get(id(output))
        if gradient is not None:
            per_sample = gradient.transpose(0, 1) if anatomy.token_axis == 0 else gradient
            norms = torch.linalg.vector_norm(per_sample.double().flatten(1), dim=-1)
            rows.append(Row(number, "output", -1, "output_gradient", first_sample, norms))
    remaining = list(found[len(kept) :])
    for number, block in enumerate(weights, start=1):
        mine, remaining = remaining[: len(block)], remaining[len(block) :]
        squares = [g.double().square().sum() for g in mine if g is not None]
        if squares:
            rows.append(Row(number, "output", -1, "weight_gradient", -1, torch.stack(squares).sum().sqrt()))
    return rows


def _default_loss(output: Tensor) -> Tensor:
    random = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return (output * random.to(output)).sum() / output.numel() ** 0.5
