"""A comparison: the same training under several variants, depths, learning rates and seeds.

Every cell is a run in a folder of its own, which `run_cell` trains, or goes on with, and in which it writes how that
ended: in a process for each, or in this one, one after the other. What is complete is not run again.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from depthscope.exit_codes import ExitCode, Terminated, code_of
from depthscope.files import in_words, sum_of, write_whole
from depthscope.naming import visible
from depthscope.report.formats import METRICS, read_metrics, run_name
from depthscope.sealed import read_record, record_writer
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.display import Display, Terminal
from depthscope_lab.training.run import NonFiniteLoss, Run

MOST_RUNS = 10_000  # each is a process and a folder, of seconds at least
OUTCOME = "outcome.json"
_PAUSE = 0.2  # seconds between two looks at the processes
_SPAWN = multiprocessing.get_context("spawn")  # a fork would take torch's threads along, and the locks they hold

Progress = Callable[[int, Sequence["Cell"]], object]  # how many cells are done, which are running


@dataclass(frozen=True)
class Cell:
    """One run of a comparison; `part` tells apart what a protocol runs for different ends."""

    config: TrainingConfig
    part: str = ""

    @property
    def name(self) -> str:
        """Its folder: every factor, whether it varies or not, so that a wider comparison finds it again."""
        config = self.config
        name = run_name(config.variant, config.depth, config.lr, config.warmup_steps, config.seed)
        return f"{name}-{self.part}" if self.part else name


@dataclass(frozen=True)
class Launch:
    """How the cells are run: none of it changes their numbers."""

    folder: Path
    data: str | None = None
    jobs: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of `training.run.Run`: evaluate_every, …
    in_process: bool = False  # one after the other, here: short runs would spend their time on imports

    def run_folder(self, cell: Cell) -> Path:
        return self.folder / "runs" / cell.name


@dataclass(frozen=True)
class Result:
    """How a cell ended: `failed` says why it could not go on, `stopped` which rule ended it, if so."""

    cell: Cell
    failed: str | None
    stopped: str | None = None


def cells_of(
    configs: Sequence[TrainingConfig],
    *,
    depths: Sequence[int] | None = None,
    seeds: Sequence[int] = (0,),
    lr_factors: Sequence[float] = (1.0,),
) -> list[Cell]:
    """All combinations; without `depths`, each configuration at its own.

    `lr_factors` multiply the learning rate of each variant: variants differ in what they can bear.
    """
    if (runs := len(seeds) * (others := len(configs) * len(depths or (0,)) * len(lr_factors))) > MOST_RUNS:
        raise ValueError(f"expected at most {MOST_RUNS} runs, got {len(seeds)} seeds × {others} others = {runs}")
    for factor in lr_factors:
        if not 0 < factor < math.inf:
            raise ValueError(f"expected factors of the learning rate greater than 0, got {factor}")
    cells = [
        Cell(config.changed(depth=depth, lr=float(f"{config.lr * factor:.6g}"), seed=seed))
        for seed in seeds  # outermost: what is interrupted has whole seeds to compare
        for config in configs
        for depth in depths or (config.depth,)
        for factor in lr_factors
    ]
    return list(dict.fromkeys(cells))


def run_cells(cells: Sequence[Cell], launch: Launch, progress: Progress = lambda _done, _running: None) -> list[Result]:
    """Runs what is not done yet, `jobs` at a time. Interrupted, it lets the runs save their work first.

    A loss that is not finite is a result, and so is a rule that ended a run. Any other failure of a run ends the
    comparison with a ValueError.
    """
    results = {cell: read_result(cell, launch) for cell in cells}
    waiting = [cell for cell in cells if results[cell] is None]
    if launch.in_process:
        for done, cell in enumerate(waiting, len(cells) - len(waiting)):
            progress(done, [cell])
            results[cell] = run_cell(cell, launch, Display(partial(progress, done, [cell])))
        waiting = []
    with _processes() as running:
        while waiting or running:
            while waiting and len(running) < launch.jobs:
                cell = waiting.pop(0)
                process = _SPAWN.Process(target=_work, args=(cell, launch), name=cell.name)
                process.start()
                running[process] = cell
            progress(len(cells) - len(waiting) - len(running), list(running.values()))
            connection.wait([process.sentinel for process in running], _PAUSE)
            for process in [process for process in running if not process.is_alive()]:
                cell = running.pop(process)
                results[cell] = read_result(cell, launch)
                if results[cell] is None:
                    log = launch.run_folder(cell) / "log.txt"
                    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
                    said = (lines or [""])[-1].removeprefix("depthscope: ")
                    raise ValueError(
                        f"the run {cell.name} ended with code {process.exitcode}: {said} (all of it: {log})"
                    )
    progress(len(cells), [])
    return [result for result in results.values() if result is not None]


def run_cell(cell: Cell, launch: Launch, display: Display) -> Result:
    """Trains, or continues, a run in this process, and notes how it ended, so that it is not run again.

    Ctrl-C and SIGTERM are raised once the run has saved its work.
    """
    from depthscope_lab.training.loading import make_task
    from depthscope_lab.training.loop import train

    try:
        run = Run(launch.run_folder(cell), resume=True, **launch.options)
        outcome = train(make_task(cell.config, launch.data), cell.config, run, display=display)
        if outcome.signal is not None:
            raise Terminated if outcome.signal == signal.SIGTERM else KeyboardInterrupt
        result = Result(cell, None, outcome.how_it_ended_early)
    except NonFiniteLoss as error:
        result = Result(cell, visible(str(error)))
    keep_result(result, launch)
    return result


def keep_result(result: Result, launch: Launch) -> None:
    """Notes how a run has ended, in its folder."""
    folder = launch.run_folder(result.cell)
    ends = {"failed": result.failed, "stopped": result.stopped, "metrics": _metrics_sum(folder)}
    write_whole(folder / OUTCOME, record_writer("outcome", 1, _asked(result.cell, launch) | ends))


def read_result(cell: Cell, launch: Launch) -> Result | None:
    """How an earlier run of this very cell ended; None if it did not, or was another one.

    A note that is damaged is as good as none: the run goes on, and ends again. Damaged numbers are refused.
    """
    folder = launch.run_folder(cell)
    try:
        found = read_record(folder / OUTCOME, "outcome", unnumbered=1).content
    except (FileNotFoundError, ValueError):
        return None
    asked = _asked(cell, launch)
    if found.get("stopped") is None:
        del asked["stop_if"]  # under other rules only a run that was stopped goes on
    if found | asked != found:
        return None
    if found.get("metrics") != _metrics_sum(folder):
        raise ValueError(f"{folder / METRICS} is not what the run wrote: remove {folder}, and it is run again")
    return Result(cell, found["failed"], found.get("stopped"))


def last_step(cell: Cell, launch: Launch) -> dict[str, Any]:
    """The newest logged numbers of a run; empty before the first."""
    rows = read_metrics(launch.run_folder(cell) / METRICS)
    return next((row for row in reversed(rows) if "loss" in row), {})


def _asked(cell: Cell, launch: Launch) -> dict[str, Any]:
    rules = list(launch.options.get("stop_if", ()))
    return {"config": cell.config.as_json(), "data": launch.data, "stop_if": rules}


def _metrics_sum(folder: Path) -> dict[str, Any] | None:
    return sum_of(folder / METRICS) if (folder / METRICS).exists() else None


def _work(cell: Cell, launch: Launch) -> None:
    """The process of a run. It ends with its parent, whose Ctrl-C reaches it as SIGTERM, once."""
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    folder = launch.run_folder(cell)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if launch.jobs > 1 and "OMP_NUM_THREADS" not in os.environ:  # or every process would use all cores
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.jobs))
    try:
        run_cell(cell, launch, Terminal())
    except KeyboardInterrupt as interrupt:
        sys.exit(code_of(interrupt))
    except (ValueError, OSError, ImportError) as error:
        print("depthscope:", visible(" ".join(in_words(error).split())), file=sys.stderr)
        sys.exit(ExitCode.MISTAKE)


@contextmanager
def _processes() -> Iterator[dict[Any, Cell]]:
    """Process → its cell. Whatever ends the comparison, its runs are asked to save their work, and are waited for."""

    def interrupt(_number: int, _frame: object) -> None:
        raise Terminated

    running: dict[Any, Cell] = {}
    main = threading.current_thread() is threading.main_thread()  # the only one that may
    before = signal.signal(signal.SIGTERM, interrupt) if main else None
    try:
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join()
        if main:
            signal.signal(signal.SIGTERM, before)
