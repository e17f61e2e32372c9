"""AdamW for models of very many small parameters: the numbers of PyTorch's fused AdamW, in one call for all.

A thousand narrow blocks have 16 000 parameters, which PyTorch's fused form collects anew in every step, and counts one
by one: for 5 to 8 % of the whole training step. Here the lists are kept, and equal counts are one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_NUMBERS = ("lr", "weight_decay", "eps", "amsgrad", "maximize")


class QuickAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(…, fused=True)`, bit by bit the same; without `amsgrad`, `maximize` or a closure."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        self._step_supports_amp_scaling = False  # a GradScaler divides the gradients itself, and skips what overflows
        self._kept: dict[int, list[list[Tensor]]] = {}  # number of the group → parameters, averages, squares, counts

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After `load_state_dict`, and in a copy: the lists are of other tensors then."""
        super().__setstate__(state)
        self._kept = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every parameter that has a gradient."""
        for number, group in enumerate(self.param_groups):
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if closure is not None or group["amsgrad"] or group["maximize"]:
                raise ValueError("expected neither amsgrad nor maximize nor a closure: QuickAdamW has no such step")
            if moved:
                parameters, averages, squares, counts = self._lists(number, moved)
                for count in {id(count): count for count in counts}.values():
                    count += 1
                gradients: Any = [parameter.grad for parameter in parameters]
                beta1, beta2 = group["betas"]
                numbers: Any = {name: group[name] for name in _NUMBERS} | {"beta1": beta1, "beta2": beta2}
                torch._fused_adamw_(parameters, gradients, averages, squares, [], counts, **numbers)

    def _lists(self, number: int, moved: list[nn.Parameter]) -> list[list[Tensor]]:
        """Collected again only if others have a gradient, or the state was cleared."""
        kept, begun = self._kept.get(number), self.state[moved[0]].get("exp_avg")
        same = kept is not None and begun is kept[1][0] and len(kept[0]) == len(moved)
        if kept is None or not same or not all(map(operator.is_, kept[0], moved)):
            counts: dict[float, Tensor] = {}
            for parameter in moved:
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                made = float(state.get("step", 0.0))
                state["step"] = counts.setdefault(made, torch.tensor(made))
            states = [self.state[parameter] for parameter in moved]
            kept = [list(moved), *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))]
            self._kept[number] = kept
        return kept
