"""AdamW for models of very many small parameters: the numbers of PyTorch's fused AdamW, in one call for all.

A thousand narrow blocks have 16 000 parameters. PyTorch's default walks them one by one, which takes a third of the
training step; its fused form (`fused=True`) spends most of its time on collecting them anew in every step. Here the
lists are kept from step to step. Parameters, state and `state_dict` are those of `torch.optim.AdamW`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class QuickAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(…, fused=True)`, step by step the same; without `amsgrad`, `maximize` or `closure`."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        self._step_supports_amp_scaling = False  # a GradScaler divides the gradients itself, and skips what overflows
        self._kept: dict[int, tuple[list[Tensor], ...]] = {}  # number of the group → parameters, averages, squares

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Moves every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("expected no closure: QuickAdamW does not evaluate the loss again")
        for number, group in enumerate(self.param_groups):
            if group["amsgrad"] or group["maximize"]:  # from a checkpoint, or set by hand
                raise ValueError("expected neither amsgrad nor maximize: QuickAdamW has no such step")
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not moved:
                continue
            parameters, averages, squares, steps = self._lists(number, moved)
            for count in {id(step): step for step in steps}.values():
                count += 1
            torch._fused_adamw_(
                parameters,
                [parameter.grad for parameter in parameters],  # type: ignore[misc]  # those without one are left out
                averages,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.AdamW` has it: every parameter with a count of its own."""
        found = super().state_dict()
        found["state"] = {
            number: {name: value.clone() if name == "step" else value for name, value in entries.items()}
            for number, entries in found["state"].items()
        }
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After `load_state_dict`, and in a copy: the lists are of other tensors then."""
        super().__setstate__(state)
        self._kept = {}

    def _lists(self, number: int, moved: list[nn.Parameter]) -> tuple[list[Tensor], ...]:
        """Parameters, first and second moments, counts of steps; collected again only if others have a gradient.

        Parameters that have made the same number of steps share one count.
        """
        kept = self._kept.get(number)
        begun = self.state[moved[0]].get("exp_avg")  # another one after `state.clear()`
        same = kept is not None and begun is kept[1][0] and len(kept[0]) == len(moved)
        if kept is not None and same and all(map(operator.is_, kept[0], moved)):
            return kept
        counts: dict[float, Tensor] = {}
        for parameter in moved:
            state = self.state[parameter]
            if not state:
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            made = state["step"].item() if "step" in state else 0.0
            state["step"] = counts.setdefault(made, torch.tensor(made))
        states = [self.state[parameter] for parameter in moved]
        lists = (list(moved), *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")))
        self._kept[number] = lists
        return lists
