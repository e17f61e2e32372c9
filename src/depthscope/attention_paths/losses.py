"""What paths of a length are worth: the loss when their term is taken out of the last block's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from depthscope.attention_paths.shares import CONSTANT, LeftOut
from depthscope.hooks import Change, Machine, Visit
from depthscope.inputs import Batch, call
from depthscope.probing.gradients import Loss
from depthscope.probing.losses import causal_by_trying, default_loss, with_all_logits
from depthscope.progress import Tick
from depthscope.scope import Scope


def losses_without(
    scope: Scope,
    batch: Batch,
    terms: Sequence[Tensor],
    loss: Loss | None = None,
    progress: Tick | None = None,
) -> list[LeftOut]:
    """Runs the model once for each choice, the last block's output exchanged for what is left of it.

    `terms` by length 0, …, L, and the constant part last, in the layout of the model. Nothing is run anew inside the
    blocks: the others' attention stays as it was.
    """
    model, anatomy = scope.model, scope.anatomy
    causal = loss is None and causal_by_trying(scope, batch)
    asked = with_all_logits(model, batch) if causal else batch
    last: list[Visit] = []
    missing: list[Tensor] = []
    depth = 0

    def exchange(visit: Visit, tokens: Tensor) -> Tensor | None:
        last[:] = [visit]
        return tokens - missing[0] if missing and visit.number == depth else None

    found = []
    with Machine(model, anatomy, Change("output", exchange)):
        for name, length, chosen in _choices(len(terms) - 2):
            missing[:] = [torch.stack([terms[k] for k in chosen]).sum(dim=0)] if chosen else []
            returned = call(model, asked)
            depth = last[0].number  # known from the first run, in which nothing is left out
            value = loss(returned) if loss is not None else default_loss(model, batch, returned, last[0], causal=causal)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ValueError("expected loss to return one number, got " + type(value).__name__)
            found.append(LeftOut(name, length, float(value)))
            if progress is not None:
                progress()
    return found


def _choices(longest: int) -> Iterator[tuple[str, int, list[int]]]:
    """Nothing first; then each length, the constant part, and all lengths above and below each."""
    yield "nothing", CONSTANT, []
    for length in range(longest + 1):
        yield "length", length, [length]
    yield "constant", CONSTANT, [longest + 1]
    for length in range(longest):
        yield "above", length, list(range(length + 1, longest + 1))
    for length in range(1, longest + 1):
        yield "below", length, list(range(length))
