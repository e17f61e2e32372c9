"""Watching inside Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from depthscope.extras import require
from depthscope.probing.watching.watcher import Watch, watch

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    TrainerCallback = require("transformers", "huggingface").TrainerCallback


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
    """

    def __init__(self, trainer: Trainer, every: int = 50, **options: Any):
        self._trainer = trainer
        self._every, self._options = every, options
        self._watch: Watch | None = None
        self._logged: int | None = None
        if trainer.model is None:
            raise ValueError("expected a Trainer with a model, got one with model_init: not supported")
        watch(trainer.model, every, **options)  # wrong options are refused here, not when training begins

    @property
    def watch(self) -> Watch:
        """The watch of the last training run."""
        if self._watch is None:
            raise ValueError("there is nothing to see before trainer.train()")
        return self._watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.close()  # an earlier run may have ended with an exception
        self._logged = None
        self._watch = watch(self._trainer.model_wrapped, self._every, **self._options).open()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.step(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = self.watch.last_step
        if step == state.global_step and step != self._logged:
            self._logged = step
            self._trainer.log(self.watch.scalars())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.close()
