"""Watching inside Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn, tensor

from depthscope.anatomy import anatomy_of
from depthscope.extras import require
from depthscope.watching.callbacks import TrainerWatch
from depthscope.watching.options import settled, watch

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif find_spec("lightning") is None and find_spec("pytorch_lightning") is not None:
    Callback = require("pytorch_lightning", "lightning").Callback
else:
    Callback = require("lightning.pytorch", "lightning").Callback


class DepthCallback(TrainerWatch, Callback):
    """Sends the depth of a model to the Trainer's loggers, and to `trainer.callback_metrics`:

        trainer = lightning.Trainer(callbacks=[callback := DepthCallback(every=50)])
        trainer.fit(module, loader)
        callback.watch.heat_map()

    `module` names the submodule that `training_step` calls ("net"). By default it is the LightningModule's
    child that holds all blocks, or the LightningModule itself if they are in a list of its own. The other
    options are those of `watch`. Steps are `trainer.global_step`, however many batches they accumulate.

    If a rule of `stop_if` holds in one process, `trainer.should_stop` is set in all, at the end of the same batch.
    The loss is what `training_step` returns. A fit with `ckpt_path` counts the looks of its rules anew.
    """

    def __init__(self, every: int = 50, *, module: str | None = None, **options: Any):
        if module is None and options.get("blocks") is not None:
            raise ValueError("blocks= names modules inside the module that is called: pass its name too, module=")
        if module is not None and not (isinstance(module, str) and module):
            raise ValueError(f"expected module= with the name of the module that is called, got {module!r}")
        settled(every, **options)  # refused here, not when training begins
        self._every, self._module, self._options = every, module, options
        self._begun: int | None = None  # the step that runs

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        called = _called(pl_module) if self._module is None else _named(pl_module, self._module)
        self._begun = self._logged = None
        self._watch = watch(called, self._every, **self._options).open()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self._begun:  # else a further batch of the same step
            self._begun = trainer.global_step
            self.watch.step(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs  # None: the module updates by itself
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.watch.tell(loss=loss)

        def send(scalars: dict[str, float]) -> None:
            trainer.callback_metrics.update({name: tensor(value) for name, value in scalars.items()})
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=self.watch.last_step)

        if self._log(send) and self.watch.gate:
            stop = trainer.strategy.reduce_boolean_decision(self.watch.should_stop, all=False)
            trainer.should_stop = trainer.should_stop or stop

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._watch is not None:
            self._watch.close()


def _called(module: nn.Module) -> nn.Module:
    """The child of a LightningModule that its `training_step` calls: the one with all the blocks."""
    heads = {block.name.split(".")[0] for block in anatomy_of(module).blocks}
    child = module.get_submodule(heads.pop()) if len(heads) == 1 else module
    return module if isinstance(child, nn.ModuleList | nn.ModuleDict) else child


def _named(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        children = ", ".join(child for child, _ in module.named_children())
        raise ValueError(f"no module {name!r} in {type(module).__name__}; there: {children}") from None
