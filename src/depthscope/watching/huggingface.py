"""Watching inside Hugging Face's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from depthscope.extras import require
from depthscope.watching.callbacks import WatchedRun, go_on
from depthscope.watching.keeping import Keeper
from depthscope.watching.options import watch
from depthscope.watching.watcher import Watch

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    TrainerCallback = require("transformers", "huggingface").TrainerCallback

# Where a checkpoint's trainer_state.json has the gate. Transformers' own way (`ExportableState`) is not taken: it makes
# the callback anew without its Trainer, and fails at the first save after a checkpoint that was saved without it.
_STATE = "depthscope"


class DepthCallback(TrainerCallback):
    """Logs the depth of a model through the Trainer's own log, to wherever that reports:

        trainer = Trainer(…)
        trainer.add_callback(callback := DepthCallback(trainer, every=50))
        trainer.train()
        callback.watch.heat_map()

    It needs the Trainer, since callbacks cannot log without it. The options are those of `watch`. Steps are
    the Trainer's: the optimiser's, however many batches they accumulate, counted on after a checkpoint. The
    scalars of step k are those of the model after k updates, and are logged at k. After an exception one
    hook, which does nothing, stays on the model until `callback.watch.close()` or the next `train()`.

    Of several processes all stop, at the end of the same step, if a rule of `stop_if` holds in one. The alarm names
    the Trainer's last good checkpoint. With `save_total_limit` the Trainer would soon remove it: it is then kept
    as `good-checkpoint-N` beside the others. The counts of the rules are in the Trainer's checkpoints: a training that
    was killed and goes on with `resume_from_checkpoint` counts on. The loss is the Trainer's, of every step.

    Where the Trainer reports to TensorBoard or Weights & Biases, these also get the heat map, one picture
    (`depth/heat_map`) that grows: after 2, 4, 8, … looks and at the end.
    """

    def __init__(self, trainer: Trainer, every: int = 50, **options: Any):
        self._trainer = trainer
        self._every, self._options = every, options
        self._run: WatchedRun | None = None
        self._newest: Path | None = None  # checkpoint of this run
        self._loss_before: Any = None  # what the Trainer had summed up when the step began
        if trainer.model is None:
            raise ValueError("expected a Trainer with a model, got one with model_init: not supported")
        watch(trainer.model, every, **options)  # wrong options are refused here, not when training begins

    @property
    def watch(self) -> Watch:
        """The watch of the last training run."""
        return self._running.watch

    @property
    def _running(self) -> WatchedRun:
        if self._run is None:
            raise ValueError("there is nothing to see before trainer.train()")
        return self._run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self.watch.close()  # an earlier run may have ended with an exception
        self._newest = _checkpoint(args, state)  # from which it goes on
        self._run = WatchedRun(
            self._trainer.model_wrapped,
            self._every,
            self._options,
            keeper=Keeper(links=bool(args.save_total_limit), writes=state.is_world_process_zero),
            trackers=lambda: self._trainer.callback_handler.callbacks if state.is_world_process_zero else (),
        )
        kept = (state.stateful_callbacks or {}).pop(_STATE, None)  # of the checkpoint from which it goes on
        if kept is not None and not _missed_looks(kept, state.global_step):
            go_on(kept, self.watch.gate, self._run.keeper)
            state.stateful_callbacks[_STATE] = kept
        self.watch.open()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._newest = _checkpoint(args, state) or self._newest

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._running.step(state.global_step)
        self._loss_before = self._summed_loss() if self.watch.gate else None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watch.last_step == state.global_step:
            self._running.log(self._trainer.log)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        run = self._running
        if self._loss_before is not None:
            self.watch.tell(loss=self._summed_loss() - self._loss_before)
        if not self.watch.gate or run.begun is None or self.watch.last_step != run.begun:
            return control
        run.look(self._newest)
        if state.stateful_callbacks is not None:  # what the next checkpoint takes with it
            state.stateful_callbacks[_STATE] = {**run.state(), "look": run.begun, "every": self._every}
        if self.watch.should_stop_together():
            control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._loss_before is None and self._run is not None and "loss" in (logs or ()):
            self.watch.tell(loss=logs["loss"])

    def _summed_loss(self) -> Any:
        """Of the steps since the Trainer logged it last; None: this Trainer does not show it between two logs."""
        summed = getattr(self._trainer, "_tr_loss", None)
        return summed.detach().clone() if isinstance(summed, Tensor) else None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._running.end()


def _checkpoint(args: Any, state: Any) -> Path | None:
    path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    return path if path.is_dir() else None


def _missed_looks(kept: Any, step: int) -> bool:
    """Whether the training went on without a gate meanwhile, whose state the Trainer hands on from checkpoint to
    checkpoint: what was not looked at is not in a row."""
    try:
        return bool(step - kept["look"] > kept["every"])
    except (KeyError, TypeError):
        return False  # without them, or damaged: said by who reads the rest
