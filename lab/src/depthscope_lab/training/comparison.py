"""A comparison: the same training under several variants, depths, learning rates, warm-ups and seeds.

Every cell is a run of `depthscope train` in a folder and a process of its own, or one after the other in this process;
what is complete is not run again, what was stopped is continued.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from depthscope.exit_codes import ExitCode, Terminated
from depthscope.files import content_sum, read_json, sum_of, write_json
from depthscope.report.formats import METRICS, read_metrics, run_name
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.settings import written
from depthscope_lab.training.signals import ENDS_WITH_STDIN

MOST_RUNS = 10_000  # each is a process and a folder, of seconds at least
_PAUSE = 0.2  # seconds between two looks at the processes


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


def command_of(cell: Cell, launch: Launch) -> list[str]:
    """`python -m depthscope train …`, with a `--set` for whatever differs from the recipe."""
    config = cell.config
    command = [sys.executable, "-m", "depthscope", "train", config.recipe, "--variant", config.variant]
    command += ["--resume", "--out", str(launch.run_folder(cell))]
    before = RECIPES[config.recipe](config.variant).as_json()
    changed = {name: value for name, value in config.as_json().items() if value != before[name]}
    for name, value in {**changed, **launch.options}.items():
        command += ["--set", f"{name}={written(value)}"]
    if launch.data is not None:
        command += ["--data", launch.data]
    return command + (["--allow-incomplete"] if launch.allow_incomplete else [])


def run_cells(cells: Sequence[Cell], launch: Launch, watching: Watching = lambda _done, _running: None) -> list[Result]:
    """Runs what is not done yet, `jobs` at a time. Interrupted, it lets the runs save their work first.

    A loss that is not finite is a result, and so is a rule that ended a run. Any other failure of a run ends the
    comparison with a ValueError.
    """
    results = {cell: _read_result(cell, launch) for cell in cells}
    waiting = [cell for cell in cells if results[cell] is None]
    if launch.in_process:
        for done, cell in enumerate(waiting, len(cells) - len(waiting)):
            results[cell] = _run_here(cell, launch, partial(watching, done, [cell]))
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
                process = running.pop(cell)
                _close(process)
                results[cell] = _end(cell, launch, process.returncode)
    watching(len(cells), [])
    return [result for result in results.values() if result is not None]


def last_step(cell: Cell, launch: Launch) -> dict[str, Any]:
    """The newest logged numbers of a run; empty before the first."""
    rows = read_metrics(launch.run_folder(cell) / METRICS)
    return next((row for row in reversed(rows) if "loss" in row), {})


def _run_here(cell: Cell, launch: Launch, told: Callable[[], object]) -> Result:
    from depthscope_lab.training.in_process import train_here

    _forget_damaged(cell, launch)
    told()
    folder, incomplete = launch.run_folder(cell), launch.allow_incomplete
    code, said = train_here(cell.config, folder, launch.data, launch.options, allow_incomplete=incomplete, told=told)
    return _ended(cell, launch, code, said)


def _start(cell: Cell, launch: Launch) -> subprocess.Popen[bytes]:
    folder = launch.run_folder(cell)
    _forget_damaged(cell, launch)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, ENDS_WITH_STDIN: "1"}
    if launch.jobs > 1:  # or every process would use all cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.jobs)))
    log: IO[bytes]
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(
            command_of(cell, launch),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,  # nothing is written to it: it closes when we end, and the run ends with us
            env=environment,
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )


def _end(cell: Cell, launch: Launch, code: int) -> Result:
    folder = launch.run_folder(cell)
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    said = lines[-1].removeprefix("depthscope: ")
    if code not in (ExitCode.DONE, ExitCode.NOT_FINITE, ExitCode.GATE):  # results, not mistakes
        raise ValueError(f"the run {cell.name} ended with code {code}: {said} (all of it: {folder / 'log.txt'})")
    return _ended(cell, launch, code, said)


def _ended(cell: Cell, launch: Launch, code: int, said: str) -> Result:
    """Notes how a run has ended, so that it is not run again."""
    folder = launch.run_folder(cell)
    failed = said if code == ExitCode.NOT_FINITE else None
    stopped = said if code == ExitCode.GATE else None
    outcome = {**_identity(cell, launch), "failed": failed, "metrics": _metrics_sum(folder)}
    if stopped is not None:
        outcome |= {"stopped": stopped, "stop_if": _rules(launch)}
    write_json(folder / "outcome.json", {**outcome, "sha256": content_sum(outcome)})
    return Result(cell, failed, stopped)


def _read_result(cell: Cell, launch: Launch) -> Result | None:
    """How an earlier run of this very cell ended; None if it did not, was another one, or its numbers are damaged."""
    folder = launch.run_folder(cell)
    found = _read_outcome(cell, launch)
    if found is None or found.get("metrics") != _metrics_sum(folder):
        return None
    return Result(cell, found.get("failed"), found.get("stopped"))


def _read_outcome(cell: Cell, launch: Launch) -> dict[str, Any] | None:
    """What is known of the end of an earlier run of this very cell."""
    try:
        found = read_json(launch.run_folder(cell) / "outcome.json")
        if not isinstance(found, dict) or found.pop("sha256", None) != content_sum(found):
            return None  # not what was written: how the run ended is found out again
    except (FileNotFoundError, ValueError):
        return None
    identity = _identity(cell, launch)
    if found.get("stopped") is not None and found.get("stop_if") != _rules(launch):
        return None  # under other rules it goes on
    return found if {name: found.get(name) for name in identity} == identity else None


def _rules(launch: Launch) -> list[str]:
    return list(launch.options.get("stop_if", ()))


def _forget_damaged(cell: Cell, launch: Launch) -> None:
    """Removes a run that had ended and whose numbers are damaged: continued, it would only end again without them."""
    folder = launch.run_folder(cell)
    if _read_outcome(cell, launch) is not None:
        warnings.warn(f"{folder / METRICS} is not what the run wrote: it is run again from the start", stacklevel=2)
        shutil.rmtree(folder)


def _metrics_sum(folder: Path) -> dict[str, Any] | None:
    return sum_of(folder / METRICS) if (folder / METRICS).exists() else None


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _identity(cell: Cell, launch: Launch) -> dict[str, Any]:
    return {"config": cell.config.as_json(), "data": launch.data}


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
            process.wait()
            _close(process)
        if main:
            signal.signal(signal.SIGTERM, before)
