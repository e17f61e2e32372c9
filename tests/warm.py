"""Processes that begin with torch and the like imported: most of what a short process takes is the time for that.

A server imports the packages of others, once; every process is a fork of it, which imports depthscope anew and has its
own environment, folder and streams. For tests of what a process does, not of how it begins.
"""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

HEAVY = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard", "transformers", "accelerate"),
    *("pandas", "pyarrow.parquet", "safetensors.torch"),
    *("scipy.stats", "sklearn.datasets", "altair", "jinja2", "pydantic", "rich.console", "typer"),
    *("matplotlib.backends.backend_agg", "matplotlib.figure"),
)


@cache
def warm_server() -> ForkServerContext:
    """Whatever starts with the method "forkserver" after this is a fork of it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(HEAVY))
    return context


def run_warm(
    *command: str,
    env: Mapping[str, str],
    cwd: Path | None = None,
    first: Callable[[], object] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *command], …)` with text captured; `first` is called in the process."""
    (out, its_out), (err, its_err) = (warm_server().Pipe(duplex=False) for _ in range(2))
    hints = (command, dict(env), cwd or Path.cwd(), (its_out, its_err), first)
    process = warm_server().Process(target=_become, args=hints)
    process.start()
    its_out.close()
    its_err.close()
    with ThreadPoolExecutor(2) as readers, out, err:
        texts = [readers.submit(_everything_in, pipe.fileno()) for pipe in (out, err)]
        process.join(timeout)
        if late := process.exitcode is None:
            process.kill()
            process.join()
        printed, said = (text.result() for text in texts)
    if late:
        raise subprocess.TimeoutExpired(command, timeout, printed, said)
    return subprocess.CompletedProcess(command, process.exitcode or 0, printed, said)


def _everything_in(pipe: int) -> str:
    parts = []
    while part := os.read(pipe, 1 << 16):
        parts.append(part)
    return b"".join(parts).decode()


def _become(
    command: tuple[str, ...],
    environment: dict[str, str],
    folder: Path,
    streams: tuple[Connection, Connection],
    first: Callable[[], object] | None,
) -> None:
    """What Python does with its arguments: `-m module …`, `-c code …` or `script …`."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first is not None:
        first()
    kind, *rest = command
    sys.argv = [kind, *rest] if not kind.startswith("-") else ["-c", *rest[1:]]
    if kind == "-m":
        sys.path.insert(0, str(folder))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, str(folder))
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
