"""A run that is killed with -9 at random moments, continued, and then left to end: `killed_at_random.py SEED FOLDER`.

Each time it is a fork of this process, which has imported everything already.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tiny_training import run_in, tiny_config

OPTIONS = {"watch_every": 3, "checkpoint_every": 4, "evaluate_every": 5}


def start(folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run_in(folder, tiny_config(), resume=True, **OPTIONS)
            code = 0
        finally:
            os._exit(code)
    return pid


def ended_by(pid: int, deadline: float) -> int | None:
    """The exit code of a process that has ended by then; else None."""
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def main() -> None:
    torch.set_num_threads(1)
    chance, folder = random.Random(int(sys.argv[1])), Path(sys.argv[2])
    run_in(folder / "first", tiny_config(), **OPTIONS)
    begun = time.monotonic()
    assert ended_by(start(folder / "whole"), begun + 100) == 0
    length = time.monotonic() - begun
    for _ in range(4):
        pid = start(folder / "parts")
        if ended_by(pid, time.monotonic() + length * chance.uniform(0.1, 0.6)) is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    sys.exit(ended_by(start(folder / "parts"), time.monotonic() + 100))


if __name__ == "__main__":
    main()
