"""The callback for either trainer; neither is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from depthscope.watching.watcher import Watch


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


class TrainerWatch:
    """What the two callbacks share: the watch of the last run, and which of its steps has been logged."""

    _watch: Watch | None = None
    _logged: int | None = None

    @property
    def watch(self) -> Watch:
        """The watch of the last training run."""
        if self._watch is None:
            raise ValueError("there is nothing to see before trainer.train() or trainer.fit()")
        return self._watch

    def _log(self, send: Callable[[dict[str, float]], object]) -> bool:
        """Sends the numbers of the last watched step, unless that was done; whether there were any."""
        if (step := self.watch.last_step) is None or step == self._logged:
            return False
        self._logged = step
        send(self.watch.scalars())
        return True
