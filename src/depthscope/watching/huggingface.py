"""Watching inside Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from depthscope.extras import require
from depthscope.watching.callbacks import TrainerWatch
from depthscope.watching.options import watch

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    TrainerCallback = require("transformers", "huggingface").TrainerCallback


class DepthCallback(TrainerWatch, TrainerCallback):
    """Logs the depth of a model through the Trainer's own log, to wherever that reports:

        trainer = Trainer(…)
        trainer.add_callback(callback := DepthCallback(trainer, every=50))
        trainer.train()
        callback.watch.heat_map()

    It needs the Trainer, since callbacks cannot log without it. The options are those of `watch`. Steps are
    the Trainer's: the optimiser's, however many batches they accumulate, counted on after a checkpoint. The
    scalars of step k are those of the model after k updates, and are logged at k. After an exception one
    hook, which does nothing, stays on the model until `callback.watch.close()` or the next `train()`.

    Of several processes all stop, at the end of the same step, if a rule of `stop_if` holds in one. The loss is the
    Trainer's, of every step. A training that goes on from a checkpoint counts the looks of its rules anew.
    """

    def __init__(self, trainer: Trainer, every: int = 50, **options: Any):
        self._trainer, self._every, self._options = trainer, every, options
        self._loss_before: Any = None  # what the Trainer had summed up when the step began
        if trainer.model is None:
            raise ValueError("expected a Trainer with a model, got one with model_init: not supported")
        watch(trainer.model, every, **options)  # wrong options are refused here, not when training begins

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.close()  # an earlier run may have ended with an exception
        self._logged = None
        self._watch = watch(self._trainer.model_wrapped, self._every, **self._options).open()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.step(state.global_step)
        self._loss_before = self._summed_loss() if self.watch.gate else None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watch.last_step == state.global_step:
            self._log(self._trainer.log)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._loss_before is not None:
            self.watch.tell(loss=self._summed_loss() - self._loss_before)
        if self.watch.gate and self.watch.last_step == state.global_step - 1 and self.watch.should_stop_together():
            control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._loss_before is None and self._watch is not None and "loss" in (logs or ()):
            self.watch.tell(loss=logs["loss"])

    def _summed_loss(self) -> Any:
        """Of the steps since the Trainer logged it last; None: this Trainer does not show it between two logs."""
        summed = getattr(self._trainer, "_tr_loss", None)
        return summed.detach().clone() if isinstance(summed, Tensor) else None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.close()
