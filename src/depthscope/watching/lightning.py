"""Watching inside Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn, tensor

from depthscope.anatomy import anatomy_of
from depthscope.extras import require
from depthscope.watching.callbacks import WatchedRun, go_on
from depthscope.watching.keeping import Keeper
from depthscope.watching.options import settled
from depthscope.watching.watcher import Watch

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif find_spec("lightning") is None and find_spec("pytorch_lightning") is not None:
    Callback = require("pytorch_lightning", "lightning").Callback
else:
    Callback = require("lightning.pytorch", "lightning").Callback


class DepthCallback(Callback):
    """Sends the depth of a model to the Trainer's loggers, and to `trainer.callback_metrics`:

        trainer = lightning.Trainer(callbacks=[callback := DepthCallback(every=50)])
        trainer.fit(module, loader)
        callback.watch.heat_map()

    `module` names the submodule that `training_step` calls ("net"). By default it is the LightningModule's
    child that holds all blocks, or the LightningModule itself if they are in a list of its own. The other
    options are those of `watch`. Steps are `trainer.global_step`, however many batches they accumulate.

    If a rule of `stop_if` holds in one process, `trainer.should_stop` is set in all, at the end of the same batch.
    The alarm names the last good checkpoint of Lightning's own callbacks. One that keeps few (`save_top_k`) would
    soon remove it: it is then kept as `good-NAME` beside the others. Files that are written over, as `last.ckpt`
    is, do not count. The counts of the rules are in Lightning's checkpoints, and a fit with `ckpt_path` counts on.
    The loss is what `training_step` returns.

    TensorBoardLogger and WandbLogger also get the heat map, one picture (`depth/heat_map`) that grows: after 2, 4, 8, …
    looks and at the end.
    """

    def __init__(self, every: int = 50, *, module: str | None = None, **options: Any):
        if module is None and options.get("blocks") is not None:
            raise ValueError("blocks= names modules inside the module that is called: pass its name too, module=")
        if module is not None and not (isinstance(module, str) and module):
            raise ValueError(f"expected module= with the name of the module that is called, got {module!r}")
        settled(every, **options)  # refused here, not when training begins
        self._every, self._module, self._options = every, module, options
        self._run: WatchedRun | None = None
        self._savers: list[Any] = []  # of checkpoints, each under a name of its own
        self._newest: Path | None = None  # checkpoint at the beginning of the step
        self._kept: dict[str, Any] = {}  # by the checkpoint from which a fit goes on

    @property
    def watch(self) -> Watch:
        """The watch of the last fit."""
        return self._running.watch

    @property
    def _running(self) -> WatchedRun:
        if self._run is None:
            raise ValueError("there is nothing to see before trainer.fit()")
        return self._run

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints."""
        return self._run.state() if self._run is not None and self.watch.gate else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """By Lightning, before a fit goes on."""
        self._kept = state_dict

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._savers = [
            callback
            for callback in trainer.checkpoint_callbacks
            if getattr(callback, "save_top_k", 0) != 0 and getattr(callback, "_enable_version_counter", True)
        ]
        few = any(callback.save_top_k != -1 for callback in self._savers)
        self._run = WatchedRun(
            _called(pl_module) if self._module is None else _named(pl_module, self._module),
            self._every,
            self._options,
            keeper=Keeper(links=few, writes=trainer.is_global_zero),
            trackers=lambda: trainer.loggers if trainer.is_global_zero else (),
            finds_checkpoints=bool(self._savers),
        )
        if kept := self._kept:
            self._kept = {}
            go_on(kept, self.watch.gate, self._run.keeper)
        self.watch.open()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self._running.begun:  # else a further batch of the same step
            self._running.step(trainer.global_step)
            if self.watch.gate and trainer.global_step % self._every == 0:
                self._newest = _newest_checkpoint(self._savers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs  # None: the module updates by itself
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.watch.tell(loss=loss)

        def send(scalars: dict[str, float]) -> None:
            trainer.callback_metrics.update({name: tensor(value) for name, value in scalars.items()})
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=self.watch.last_step)

        if self._running.log(send) and self.watch.gate:
            self._running.look(self._newest)
            stop = trainer.strategy.reduce_boolean_decision(self.watch.should_stop, all=False)
            trainer.should_stop = trainer.should_stop or stop

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._running.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._run is not None:
            self.watch.close()


def _newest_checkpoint(savers: Sequence[Any]) -> Path | None:
    """Of those that Lightning's own callbacks have written in this run and not removed."""
    named = [path for saver in savers for path in (saver.best_model_path, *saver.best_k_models) if path]
    there = [path for path in map(Path, named) if path.exists()]
    return max(there, key=lambda path: path.stat().st_mtime_ns, default=None)


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
