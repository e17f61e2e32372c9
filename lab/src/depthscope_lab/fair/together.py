"""Members of a variant (seeds × rates) trained together, each as it would be alone; killed, they go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from depthscope.files import write_whole
from depthscope_lab.fair.stacked import Stacked

Batch = tuple[Tensor, Tensor]  # inputs, targets: (samples, …) each


class Problem(Protocol):
    """What is learned. All of it is a function of the seed, so that variants are compared on the same data."""

    def batch(self, seed: int, step: int) -> Batch:
        """What the member of this seed sees in step 0, 1, …."""
        ...

    def held_out(self, seed: int) -> Batch:
        """What it is judged on."""
        ...

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss for every sample (samples,)."""
        ...

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """What is reported of one member; "loss" is what it is judged by."""
        ...


@dataclass(frozen=True)
class Member:
    """One run: the seed of its weights and data, and its learning rate."""

    seed: int
    rate: float


@dataclass(frozen=True)
class Budget:
    """How long members are trained, and how: AdamW, the rate rising at first and falling at the end."""

    steps: int
    warmup: float = 0.05  # share of the steps in which the rate rises
    decay: float = 0.2  # share of the steps in which it falls to 0
    weight_decay: float = 0.01
    clip: float = 1.0  # largest norm of a member's gradient

    def factor(self, step: int) -> float:
        """Of the rate, in step 0, 1, …, steps − 1."""
        rising = (step + 1) / max(1.0, self.warmup * self.steps)
        falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(1.0, rising, falling)


class Together:
    """Members as one stacked model, and one fused AdamW with a rate for each of them.

    A member whose loss is not finite goes on as nan, and changes no other.

    Args:
        build: The model of a seed, on the CPU.
        compile: Compiles a block: about half of the time of a step, after 10 seconds for the first.
    """

    def __init__(
        self,
        problem: Problem,
        build: Callable[[int], nn.Module],
        members: Sequence[Member],
        budget: Budget,
        *,
        compile: bool = False,
    ):
        self.problem, self.members, self.budget, self.made = problem, list(members), budget, 0
        self.model = Stacked([build(member.seed) for member in members], compile=compile)
        weights = self.model.weights
        self.gradients = weights.grad = torch.zeros_like(weights)
        self._rows = [nn.Parameter(row) for row in weights.detach()]  # they share their numbers with the model
        for row, gradient in zip(self._rows, self.gradients, strict=True):
            row.grad = gradient
        groups = [{"params": [row], "lr": member.rate} for row, member in zip(self._rows, members, strict=True)]
        self.optimiser = torch.optim.AdamW(groups, weight_decay=budget.weight_decay, fused=True)

    def step(self) -> Tensor:
        """One step of all members; their losses before it (members,)."""
        self.model.train()
        inputs, targets = self._batches(lambda seed: self.problem.batch(seed, self.made))
        losses = self.problem.losses(self.model(inputs), targets).view(len(self.members), -1).mean(1)
        self.gradients.zero_()
        losses.sum().backward()
        norms = self.gradients.norm(dim=1, keepdim=True)
        self.gradients.mul_((self.budget.clip / (norms + 1e-6)).clamp(max=1))  # as torch.nn.utils does
        factor = self.budget.factor(self.made)
        for group, member in zip(self.optimiser.param_groups, self.members, strict=True):
            group["lr"] = member.rate * factor
        self.optimiser.step()
        self.made += 1
        return losses.detach()

    @torch.no_grad()
    def measure(self) -> list[dict[str, float]]:
        """What the problem reports of each member on its held-out data."""
        self.model.eval()
        inputs, targets = self._batches(self.problem.held_out)
        with torch.compiler.set_stance("force_eager"):  # other sizes would be compiled anew
            outputs = self.model(inputs)
        each = zip(outputs.chunk(len(self.members)), targets.chunk(len(self.members)), strict=True)
        return [self.problem.measure(*of_member) for of_member in each]

    def train(self, kept: Path | None = None, every: int = 100, told: Callable[[int], object] = lambda _: None) -> None:
        """To the end of the budget. What is `kept` there, every so many steps, is gone on from, bit by bit."""
        if kept is not None and kept.exists():
            self._restore(kept)
        while self.made < self.budget.steps:
            self.step()
            if kept is not None and self.made % every == 0:
                self._save(kept)
            told(self.made)

    def _batches(self, of: Callable[[int], Batch]) -> Batch:
        """Those of all members, one after the other; of a seed that several have it is made once."""
        made = {seed: of(seed) for seed in {member.seed: None for member in self.members}}
        inputs, targets = zip(*(made[member.seed] for member in self.members), strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def _save(self, path: Path) -> None:
        states = [self.optimiser.state[row] for row in self._rows]
        files = {name: torch.stack([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq")}
        files |= {"weights": self.model.weights.detach(), "made": torch.tensor(self.made)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda scratch: save_file(files, scratch))

    def _restore(self, path: Path) -> None:
        files = load_file(path)
        self.made = int(files["made"])
        with torch.no_grad():
            self.model.weights.copy_(files["weights"])
        for number, row in enumerate(self._rows):
            state = {name: files[name][number].clone() for name in ("exp_avg", "exp_avg_sq")}
            self.optimiser.state[row] = {**state, "step": torch.tensor(float(self.made))}


def steps_to(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """The first step at which a curve (step, loss) is at or below a loss; infinite if it never is."""
    return next((float(step) for step, value in curve if value <= loss), math.inf)


def as_record(member: Member, budget: Budget) -> dict[str, Any]:
    """What a run is, for the key that it is kept by."""
    return {"seed": member.seed, "rate": member.rate, "budget": vars(budget)}
