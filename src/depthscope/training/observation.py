"""What a pass through the model shows: how alike the last block's tokens are, where numbers cease to be finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import anatomy_of
from depthscope.measures import token_similarity
from depthscope.models import Block
from depthscope.training.task import Carry, Task

AFTER_THE_BLOCKS, ALL_FINITE = 1_000_000, 1_000_001  # greater than any block's number: the first is the least


def last_block_similarity(task: Task, model: nn.Module, batch: Any, carry: Carry) -> float:
    """Mean t_sim of what leaves the last block, before a remedy there (which at τ = 1 would always show 0).

    One forward pass in eval mode; `nan` if the block's output is no token matrix.
    """
    anatomy = anatomy_of(model)
    last = anatomy.blocks[-1].module
    seen: list[Tensor] = []
    if isinstance(last, Block):
        station = last.stations["output"]
        handle = station.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    else:
        handle = last.register_forward_hook(lambda _module, _inputs, output: seen.append(_first_tensor(output)))
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            task.loss(model, batch, carry)
    finally:
        handle.remove()
        model.train(training)
    if not seen or seen[-1].ndim != 3:
        return math.nan
    tokens = seen[-1] if anatomy.token_axis == 1 else seen[-1].transpose(0, 1)  # (batch, n, d)
    return token_similarity(tokens).mean().item()


def first_nonfinite_block(task: Task, model: nn.Module, batch: Any, carry: Carry) -> int:
    """The first block whose output has a nan or an infinity: 1, 2, …

    0: what enters block 1 has one already. AFTER_THE_BLOCKS: only the loss has. ALL_FINITE: nothing has.
    """
    found: list[int] = []
    blocks = anatomy_of(model).blocks

    def look(number: int, value: Any) -> None:
        if not found and not bool(_first_tensor(value).isfinite().all()):
            found.append(number)

    handles = [blocks[0].module.register_forward_pre_hook(lambda _module, inputs: look(0, inputs))]
    for number, block in enumerate(blocks, start=1):
        handles.append(
            block.module.register_forward_hook(lambda _module, _inputs, output, number=number: look(number, output))
        )
    try:
        with torch.no_grad():
            loss, _ = task.loss(model, batch, carry)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    return ALL_FINITE if bool(loss.isfinite()) else AFTER_THE_BLOCKS


def nonfinite_weight(model: nn.Module) -> str | None:
    """The first weight that has a nan or an infinity, by name."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return name
    return None


def _first_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else _first_tensor(value[0])
