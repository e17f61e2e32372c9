"""How the benchmarks of a probe and of a watch take time: ratios of processor time from rounds that alternate, with
their quartiles, and counts of operations, which carry no noise.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode


class Spread(NamedTuple):
    """Of repeated measurements: the median and the quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


class Compared(NamedTuple):
    """One call beside the plain one."""

    ratio: Spread
    added: float  # milliseconds: the median of the differences


def spread_of(values: list[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, low, high)


def compare(
    plain: Callable[[], object], others: dict[str, Callable[[], object]], rounds: int
) -> tuple[Spread, dict[str, Compared]]:
    """Milliseconds of the plain call, and every other call beside it: each round runs all of them in turn, between two
    plain ones."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in others}
    for call in (plain, *others.values(), *others.values()):
        call()
    bases: list[float] = []
    for _ in range(rounds):
        before = cpu_seconds(plain)
        spent = {name: cpu_seconds(call) for name, call in others.items()}
        bases.append((before + cpu_seconds(plain)) / 2)
        for name, seconds in spent.items():
            seen[name].append((seconds, bases[-1]))
    found = {
        name: Compared(
            spread_of([seconds / base for seconds, base in pairs]),
            1000 * statistics.median(seconds - base for seconds, base in pairs),
        )
        for name, pairs in seen.items()
    }
    return spread_of([1000 * base for base in bases]), found


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


class Operations(TorchDispatchMode):
    """Counts the operations of PyTorch."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> int:
    with Operations() as seen:
        call()
    return seen.count


def keep_memory() -> None:
    """Tells the allocator of the C library to give nothing back to the system.

    Else a pass of a middling model takes up to a third longer whenever its activations happen to be given back and
    faulted in again, block by block, with a probe or without: it depends on what lies at the end of the heap.
    """
    try:
        adjust = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # no glibc
        return
    adjust(-1, 2**30)  # M_TRIM_THRESHOLD
    adjust(-4, 0)  # M_MMAP_MAX: no piece of memory of its own for a large tensor
