"""Where a run happens and what it writes: none of it changes its numbers. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from depthscope.conditions import Condition, parse_condition
from depthscope.naming import visible
from depthscope.report.formats import METRICS
from depthscope_lab.training.settings import check_type

Tracker = Literal["tensorboard", "trackio", "wandb", "none"]


@dataclass(frozen=True)
class Run:
    """`None` for `checkpoint_every` and `evaluate_every` is once per epoch, for `watch_every` never. All in steps.

    The text beside a field is its help on the command line.
    """

    out: Path
    resume: bool = False
    checkpoint_every: Annotated[int | None, "Steps between two checkpoints; by default an epoch."] = None
    evaluate_every: Annotated[int | None, "Steps between two looks at the test data; by default an epoch."] = None
    log_every: Annotated[int, "Steps between two lines of numbers."] = 10
    keep: Annotated[int, "How many checkpoints to keep."] = 2
    tracker: Annotated[Tracker, "Where curves go besides metrics.jsonl."] = "tensorboard"
    cpu: Annotated[bool, "Leave GPUs alone."] = False
    watch_every: Annotated[int | None, "Steps between two measurements of the tokens of every block; none: never."] = 50
    draw: Annotated[bool, "Draw depth.png at the end."] = True
    stop_if: Annotated[tuple[str, ...], "Rules at which the run stops: token_similarity>0.99 for 3."] = ()
    warn_if: Annotated[tuple[str, ...], "Rules at which it warns."] = ()

    def __post_init__(self) -> None:
        check_type("tracker", self.tracker, Tracker)
        for name in ("checkpoint_every", "evaluate_every", "log_every", "keep", "watch_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")
        if self.rules and self.watch_every is None:
            raise ValueError("--stop-if and warn_if are asked of watched steps, and watch_every=none watches none")

    @property
    def rules(self) -> list[Condition]:
        """Of both kinds, as they were given; whether there are such measures is not known here."""
        options = ("--stop-if", self.stop_if), ("warn_if", self.warn_if)
        return [parse_condition(text, None, option, in_a_row=True) for option, texts in options for text in texts]

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.out / METRICS

    @property
    def depth(self) -> Path:
        """The curves of `depthscope.watch`, block by block."""
        return self.out / "depth.jsonl"

    @property
    def picture(self) -> Path:
        """The same, drawn."""
        return self.out / "depth.png"


class NonFiniteLoss(RuntimeError):
    """The loss, or what a run would go on from, is nan or infinite; nothing was saved after that."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    total_steps: int
    metrics: dict[str, float]  # the last evaluation
    checkpoint: Path | None
    signal: int | None = None  # it was stopped, and has saved its work
    stopped: str | None = None  # by a rule of `stop_if`, in a sentence; it has saved its work

    @property
    def complete(self) -> bool:
        return self.step == self.total_steps

    @property
    def how_it_ended_early(self) -> str | None:
        """In a line; None if it went to its end."""
        place = f"stopped at step {self.step} of {self.total_steps}, saved in {visible(str(self.checkpoint))}"
        if self.signal is not None:
            return f"{place}; the same command with --resume goes on"
        return None if self.stopped is None else f"{place}: {visible(self.stopped)}"
