"""A run of a comparison in this very process: for many short runs, of which each would wait seconds for its imports."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from depthscope.exit_codes import ExitCode, Terminated
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.display import Quiet
from depthscope_lab.training.loading import make_task
from depthscope_lab.training.loop import train
from depthscope_lab.training.run import NonFiniteLoss, Run


def train_here(
    config: TrainingConfig,
    folder: Path,
    data: str | None,
    options: Mapping[str, Any],
    *,
    allow_incomplete: bool,
    told: Callable[[], object],
) -> tuple[ExitCode, str]:
    """Trains or continues; how `depthscope train` would have ended, and its last line.

    `told` is called at every logged step. Ctrl-C and SIGTERM are raised once the run has saved its work.
    """
    try:
        task = make_task(config, data, allow_incomplete=allow_incomplete)
        outcome = train(task, config, Run(folder, resume=True, **options), display=_Telling(told))
    except NonFiniteLoss as error:
        return ExitCode.NOT_FINITE, str(error)
    if outcome.signal is not None:
        raise Terminated if outcome.signal == signal.SIGTERM else KeyboardInterrupt
    return (ExitCode.DONE, "") if outcome.stopped is None else (ExitCode.GATE, outcome.stopped)


class _Telling(Quiet):
    """Shows nothing, and passes on that the run goes on."""

    def __init__(self, told: Callable[[], object]):
        self._told = told

    def logged(self, step: int, values: Mapping[str, float], seconds_left: float) -> None:
        self._told()
