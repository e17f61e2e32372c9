"""Where a run happens and what it writes: none of it changes its numbers. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Tracker = Literal["tensorboard", "trackio", "wandb", "none"]


@dataclass(frozen=True)
class Run:
    """`None` for `checkpoint_every` and `evaluate_every` is once per epoch, for `watch_every` never. All in steps."""

    out: Path
    resume: bool = False
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    log_every: int = 10
    keep: int = 2
    tracker: Tracker = "tensorboard"
    cpu: bool = False
    watch_every: int | None = 50

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "evaluate_every", "log_every", "keep", "watch_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    @property
    def depth(self) -> Path:
        """The curves of `depthscope.watch`, block by block."""
        return self.out / "depth.jsonl"


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    total_steps: int
    metrics: dict[str, float]  # the last evaluation
    checkpoint: Path | None
    signal: int | None = None  # it was stopped, and has saved its work

    @property
    def complete(self) -> bool:
        return self.step == self.total_steps
