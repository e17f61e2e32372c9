"""What spectra cost: on a small ViT against the plain pass, and on long contexts as they grow.

    python benchmarks/spectra.py          # all of it, some minutes on 2 cores
    python benchmarks/spectra.py time     # one part of: time, long, memory, command

time    a probe with one spectral measure ÷ the plain pass, ViT 12 × 192 with 8 × 197 tokens: median and quartiles of
        alternating pairs, in processor time; and how far the measures are from their dense forms
long    one head of width 32 at 1 k, 4 k and 16 k tokens, streamed: sweeps over the rows, and time ÷ one fused
        attention of that head
memory  peak memory of a process that does that, above one that only makes the queries and keys
command `depthscope probe llama --tokens … --measures spectral` (2 blocks of width 128, 4 heads, one sequence) at 1 k,
        4 k and 16 k tokens: time and peak memory of the whole command
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from depthscope import measures as m
from depthscope.measures.sweeps import survey
from depthscope.models import BlockConfig, VisionTransformer, pre_norm
from depthscope.probing import probe

ROUNDS = 7
MEASURES = ("frobenius_norm", "stable_rank", "effective_rank", "delta", "second_eigenvalue")
LENGTHS = (1024, 4096, 16_384)


def compare_time() -> None:
    model = VisionTransformer(12, BlockConfig(192, 3, placement=pre_norm), image_size=224, patch_size=16).eval()
    images = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    ratios: dict[str, list[float]] = {name: [] for name in MEASURES}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, found in ratios.items():
                plain = _seconds(lambda: model(images))
                measured = partial(probe, model, images, measures=[name], stations="output")
                found.append(_seconds(measured) / plain)
        for name, found in ratios.items():
            low, middle, high = statistics.quantiles(found)
            errors = probe(model, images, measures=[name], stations="output").metadata["error_bounds"]
            bound = f", error at most {errors[name]:.0e}" if name in errors else ""
            print(f"{name:<20} {middle:5.2f} ({low:.2f}–{high:.2f}) × plain{bound}")


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def head(n: int, *, causal: bool) -> m.ScoredAttention:
    query, key = torch.randn(2, 1, n, 32, generator=torch.Generator().manual_seed(n))
    return m.ScoredAttention(query, key, 32**-0.5, causal=causal)


LONG: dict[str, Callable[[m.ScoredAttention], object]] = {
    "survey": survey,  # entropy, sinks, largest logit, and |λ₂| of a causal head
    "delta": m.bounded_delta,
    "second_eigenvalue": m.bounded_second_eigenvalue,
    "omega and mu": lambda p: m.mu(p, p.query),
}


class Counted(m.ScoredAttention):
    """Counts how often its rows are swept over."""

    sweeps = 0

    def tiles(self):  # type: ignore[no-untyped-def]
        Counted.sweeps += 1
        return super().tiles()


def compare_long() -> None:
    for causal in (True, False):
        for n in LENGTHS:
            p = head(n, causal=causal)
            q, k = p.query, p.key
            one = q[None], k[None], q[None]  # (batch, heads, n, d): three axes would not be fused
            fused = min(_seconds(partial(F.scaled_dot_product_attention, *one, is_causal=causal)) for _ in range(3))
            for name, compute in LONG.items():
                Counted.sweeps = 0
                counted = Counted(q, k, p.scale, causal=causal)
                start = time.process_time()
                found = compute(counted)
                spent = time.process_time() - start
                is_bounded = isinstance(found, m.Bounded)
                bound = f", {float(found.value):.4f} to {float(found.error):.0e}" if is_bounded else ""
                kind = "causal" if causal else "full"
                print(
                    f"{kind:<6} {n:>6} tokens {name:<18} {Counted.sweeps:>2} sweeps {spent:7.2f} s, "
                    f"{spent / fused:5.1f} × its attention{bound}"
                )


def compare_memory() -> None:
    for name in ("nothing", *LONG):
        peaks = []
        for n in LENGTHS:
            command = [sys.executable, __file__, "--peak", name, str(n)]
            peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1e6)
        print(f"{name:<18} " + ", ".join(f"{n}: {peak:.0f} MB" for n, peak in zip(LENGTHS, peaks, strict=True)))


def peak(name: str, n: int) -> None:
    """Prints the most memory that this process ever had, in bytes."""
    p = head(n, causal=False)
    if name != "nothing":
        LONG[name](p)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _command(n: int, *options: str) -> tuple[dict[str, Any], float, float]:
    """What the command prints, its processor time in seconds, and its peak memory in GB."""
    shape = ("--depth", "2", "--width", "128", "--heads", "4", "--samples", "1", "--tokens", str(n))
    command = [sys.executable, "-m", "depthscope", "probe", "llama", *shape, *options, "--estimate", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return json.loads(printed), used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6


def compare_command() -> None:
    for n in LENGTHS:
        found, seconds, memory = _command(n, "--measures", "spectral")
        bounds = {name: f"{bound:.0e}" for name, bound in found["metadata"]["error_bounds"].items()}
        print(f"{n:>6} tokens {seconds:7.1f} s of processor time, peak {memory:.2f} GB, bounds {bounds}", flush=True)


PARTS = {
    "time": compare_time,
    "long": compare_long,
    "memory": compare_memory,
    "command": compare_command,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        peak(sys.argv[2], int(sys.argv[3]))
    else:
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
