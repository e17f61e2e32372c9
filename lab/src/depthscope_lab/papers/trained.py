"""How studies train models of their own: one loop. What was computed is kept by `training.kept`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from depthscope_lab.training.task import Share, Task

_WHOLE, _CPU = Share(0, 1), torch.device("cpu")


def steps(
    loss_of: Callable[[int], Tensor],
    optimiser: torch.optim.Optimizer,
    count: int,
    *,
    rate: Callable[[int], float] | None = None,
    clip: float | None = None,
) -> Iterator[tuple[int, float]]:
    """Trains, and gives (step, loss) after each of `count` steps, counted from 0; its gradients are still there.

    `loss_of` takes the batch of its step; `rate` is the learning rate of a step, without it that of the optimiser;
    `clip` the largest norm of the whole gradient.
    """
    for step in range(count):
        loss = loss_of(step)
        optimiser.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], clip)
        if rate is not None:
            for group in optimiser.param_groups:
                group["lr"] = rate(step)
        optimiser.step()
        yield step, loss.item()


def loss_of_task(task: Task, model: nn.Module, step: int) -> Tensor:
    """On the task's own batch of this step, for a model that carries nothing from batch to batch."""
    return task.loss(model, task.batch(step, _WHOLE, _CPU), None)[0]


@torch.no_grad()
def means_of_task(task: Task, model: nn.Module) -> dict[str, float]:
    """What the task evaluates (loss, accuracy, …), each divided by its count; the model is in eval mode then."""
    sums = task.evaluate(model.eval(), _WHOLE, _CPU)
    count = sums.pop("count")
    return {name: value / count for name, value in sums.items()}
