"""One name for the callbacks of both trainers; neither trainer is imported before it is asked for."""

from __future__ import annotations

from typing import Any


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
