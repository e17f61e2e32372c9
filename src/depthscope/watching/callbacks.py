"""The callback for either trainer, and what the two share; neither trainer is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from depthscope.watching.gate import Gate
from depthscope.watching.keeping import Keeper
from depthscope.watching.options import watch
from depthscope.watching.pictures import Painter


def DepthCallback(trainer: Any = None, *, every: int = 50, **options: Any) -> Any:
    """The callback that watches a model while it is trained, for Hugging Face's Trainer or for Lightning's:

        trainer.add_callback(callback := DepthCallback(trainer, every=50))  # Hugging Face: it needs the Trainer
        lightning.Trainer(callbacks=[callback := DepthCallback(every=50)])  # Lightning: it does not

    and then `callback.watch.heat_map()`. The options are those of `watch`; Lightning's also takes `module=`. What is
    returned is a `DepthCallback` of `depthscope.watching.huggingface` or `.lightning`.
    """
    if trainer is None:
        from depthscope.watching import lightning

        return lightning.DepthCallback(every, **options)
    if not hasattr(trainer, "add_callback"):
        raise ValueError(
            "expected Hugging Face's Trainer as the first argument, or none for Lightning's "
            f"(Trainer(callbacks=[DepthCallback(every=50)])), got {type(trainer).__name__}"
        )
    from depthscope.watching import huggingface

    return huggingface.DepthCallback(trainer, every, **options)


class WatchedRun:
    """One run of a trainer: its watch, its pictures and its good checkpoints."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        options: Mapping[str, Any],
        *,
        keeper: Keeper,
        trackers: Callable[[], Iterable[object]],
        finds_checkpoints: bool = True,
    ):
        self.watch = watch(model, every, **options)
        self.watch.find_checkpoint = keeper.find if finds_checkpoints else None
        self.keeper = keeper
        self.begun: int | None = None  # the step that runs
        self._logged: int | None = None
        self._painter = Painter(self.watch, trackers)

    def step(self, number: int) -> None:
        """A step of the trainer begins."""
        self.begun = number
        self.watch.step(number)

    def log(self, send: Callable[[dict[str, float]], object]) -> bool:
        """Sends the numbers of the last look, unless that was done; whether there were any."""
        if (step := self.watch.last_step) is None or step == self._logged:
            return False
        self._logged = step
        send(self.watch.scalars())
        self._painter.look()
        return True

    def look(self, newest: Path | None) -> None:
        """After a look: which checkpoint was the newest before it."""
        assert self.begun is not None
        self.keeper.look(self.begun, newest, self.watch.gate.goods)

    def state(self) -> dict[str, Any]:
        """What the trainer's checkpoint takes with it, as plain values."""
        return {"gate": self.watch.gate.state(), "checkpoints": self.keeper.state()}

    def end(self) -> None:
        self.watch.close()
        self.keeper.close()
        self._painter.draw()


def go_on(kept: object, gate: Gate, keeper: Keeper) -> None:
    """Counts on from `WatchedRun.state`; what is damaged is refused, in one line."""
    if not isinstance(kept, Mapping) or not {"gate", "checkpoints"} <= kept.keys():
        raise ValueError(
            f"the state of the gate in the checkpoint is damaged: expected gate and checkpoints, got {kept!r}"
        )
    gate.restore(kept["gate"])
    keeper.restore(kept["checkpoints"])
