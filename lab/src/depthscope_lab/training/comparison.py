"""A comparison: the same training under several variants, depths, learning rates, warm-ups and seeds.

Every cell is a run in a folder of its own, which `run_cell` trains, or goes on with, and in which it writes how that
ended: in a process for each, or in this one, one after the other. What is complete is not run again.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
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
from depthscope_lab.training.signals import end_with_stdin

MOST_RUNS = 10_000  # each is a process and a folder, of seconds at least
OUTCOME = "outcome.json"
_PAUSE = 0.2  # seconds between two looks at the processes
_WORKER = "from depthscope_lab.training.comparison import work; work()"


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
    allow_incomplete: bool = False
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


Watching = Callable[[int, Sequence[Cell]], object]  # how many cells are done, which are running


def cells_of(
    configs: Sequence[TrainingConfig],
    *,
    depths: Sequence[int] | None = None,
    seeds: Sequence[int] = (0,),
    warmups: Sequence[int] | None = None,
    lr_factors: Sequence[float] = (1.0,),
) -> list[Cell]:
    """All combinations. A factor that is not given stays as the configuration, one per variant, has it.

    `lr_factors` multiply the learning rate of each variant: variants differ in what they can bear.
    """
    factors = [len(some) for some in (configs, depths or (0,), warmups or (0,), lr_factors)]
    if (runs := math.prod(factors) * len(seeds)) > MOST_RUNS:
        others = math.prod(factors)
        raise ValueError(f"expected at most {MOST_RUNS} runs, got {len(seeds)} seeds × {others} others = {runs}")
    cells = []
    for factor in lr_factors:
        if not 0 < factor < math.inf:
            raise ValueError(f"expected factors of the learning rate greater than 0, got {factor}")
    for seed in seeds:  # outermost: what is interrupted has whole seeds to compare
        for config in configs:
            for depth in depths or (config.depth,):
                for warmup in warmups if warmups is not None else (config.warmup_steps,):
                    for factor in lr_factors:
                        lr = float(f"{config.lr * factor:.6g}")
                        cells.append(Cell(config.changed(depth=depth, warmup_steps=warmup, lr=lr, seed=seed)))
    return list(dict.fromkeys(cells))


def run_cells(cells: Sequence[Cell], launch: Launch, watching: Watching = lambda _done, _running: None) -> list[Result]:
    """Runs what is not done yet, `jobs` at a time. Interrupted, it lets the runs save their work first.

    A loss that is not finite is a result, and so is a rule that ended a run. Any other failure of a run ends the
    comparison with a ValueError.
    """
    results = {cell: _read_result(cell, launch) for cell in cells}
    waiting = [cell for cell in cells if results[cell] is None]
    if launch.in_process:
        for done, cell in enumerate(waiting, len(cells) - len(waiting)):
            told = partial(watching, done, [cell])
            _forget_damaged(cell, launch)
            told()
            results[cell] = run_cell(cell, launch, Display(told))
        waiting = []
    running: dict[Cell, subprocess.Popen[bytes]] = {}
    with _stopping(running):
        while waiting or running:
            while waiting and len(running) < launch.jobs:
                cell = waiting.pop(0)
                running[cell] = _start(cell, launch)
            watching(len(cells) - len(waiting) - len(running), list(running))
            time.sleep(_PAUSE)
            for cell in [cell for cell, process in running.items() if process.poll() is not None]:
                results[cell] = _end(cell, launch, running.pop(cell))
    watching(len(cells), [])
    return [result for result in results.values() if result is not None]


def run_cell(cell: Cell, launch: Launch, display: Display) -> Result:
    """Trains, or continues, a run in this process, and notes how it ended, so that it is not run again.

    Ctrl-C and SIGTERM are raised once the run has saved its work.
    """
    from depthscope_lab.training.loading import make_task
    from depthscope_lab.training.loop import train

    try:
        task = make_task(cell.config, launch.data, allow_incomplete=launch.allow_incomplete)
        if note := getattr(getattr(task, "data", None), "note", ""):
            display.say(f"note: {note}")
        run = Run(launch.run_folder(cell), resume=True, **launch.options)
        outcome = train(task, cell.config, run, display=display)
        if outcome.signal is not None:
            raise Terminated if outcome.signal == signal.SIGTERM else KeyboardInterrupt
        result = Result(cell, None, outcome.how_it_ended_early)
    except NonFiniteLoss as error:
        result = Result(cell, visible(str(error)))
    keep_result(result, launch)
    return result


def work() -> None:
    """A process that `_start` has started: which run it is comes through standard input, which ends with its parent."""
    cell, launch = pickle.load(sys.stdin.buffer)
    end_with_stdin()
    try:
        run_cell(cell, launch, Terminal())
    except KeyboardInterrupt as interrupt:
        sys.exit(code_of(interrupt))
    except (ValueError, OSError, ImportError) as error:
        print("depthscope:", visible(" ".join(in_words(error).split())), file=sys.stderr)
        sys.exit(ExitCode.MISTAKE)


def last_step(cell: Cell, launch: Launch) -> dict[str, Any]:
    """The newest logged numbers of a run; empty before the first."""
    rows = read_metrics(launch.run_folder(cell) / METRICS)
    return next((row for row in reversed(rows) if "loss" in row), {})


def _start(cell: Cell, launch: Launch) -> subprocess.Popen[bytes]:
    folder = launch.run_folder(cell)
    _forget_damaged(cell, launch)
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if launch.jobs > 1:  # or every process would use all cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.jobs)))
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,  # it closes when we end, and the run ends with us
            env=environment,
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already: `_end` says why
        process.stdin.write(pickle.dumps((cell, launch)))
        process.stdin.flush()
    return process


def _end(cell: Cell, launch: Launch, process: subprocess.Popen[bytes]) -> Result:
    process.communicate()  # closes its input
    if (result := _read_result(cell, launch)) is not None:
        return result
    log = launch.run_folder(cell) / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    said = lines[-1].removeprefix("depthscope: ")
    raise ValueError(f"the run {cell.name} ended with code {process.returncode}: {said} (all of it: {log})")


def keep_result(result: Result, launch: Launch) -> None:
    """Notes how a run has ended, in its folder."""
    folder = launch.run_folder(result.cell)
    ends = {"failed": result.failed, "stopped": result.stopped, "metrics": _metrics_sum(folder)}
    write_whole(folder / OUTCOME, record_writer("outcome", 1, _asked(result.cell, launch) | ends))


def _read_result(cell: Cell, launch: Launch) -> Result | None:
    """How an earlier run of this very cell ended; None if it did not, was another one, or its numbers are damaged."""
    found = _read_outcome(cell, launch)
    if found is None or found.get("metrics") != _metrics_sum(launch.run_folder(cell)):
        return None
    return Result(cell, found["failed"], found.get("stopped"))


def _read_outcome(cell: Cell, launch: Launch) -> dict[str, Any] | None:
    """What is known of the end of an earlier run of this very cell."""
    try:
        found = read_record(launch.run_folder(cell) / OUTCOME, "outcome", unnumbered=1).content
    except (FileNotFoundError, ValueError):
        return None  # not what was written: how the run ended is found out again
    asked = _asked(cell, launch)
    if found.get("stopped") is None:
        del asked["stop_if"]  # under other rules only a run that was stopped goes on
    return found if found | asked == found else None


def _asked(cell: Cell, launch: Launch) -> dict[str, Any]:
    rules = list(launch.options.get("stop_if", ()))
    return {"config": cell.config.as_json(), "data": launch.data, "stop_if": rules}


def _forget_damaged(cell: Cell, launch: Launch) -> None:
    """Removes a run that had ended and whose numbers are damaged: continued, it would only end again without them."""
    folder = launch.run_folder(cell)
    if _read_outcome(cell, launch) is not None:
        warnings.warn(f"{folder / METRICS} is not what the run wrote: it is run again from the start", stacklevel=2)
        shutil.rmtree(folder)


def _metrics_sum(folder: Path) -> dict[str, Any] | None:
    return sum_of(folder / METRICS) if (folder / METRICS).exists() else None


@contextmanager
def _stopping(running: Mapping[Cell, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whatever ends the comparison, its runs are asked to save their work, and are waited for."""

    def interrupt(_number: int, _frame: object) -> None:
        raise Terminated

    main = threading.current_thread() is threading.main_thread()  # the only one that may
    before = signal.signal(signal.SIGTERM, interrupt) if main else None
    try:
        yield
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()  # before its input ends: two signals would end it without its work
            process.communicate()
        if main:
            signal.signal(signal.SIGTERM, before)
