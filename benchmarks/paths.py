"""What the sum over attention paths costs: ratios from one run, medians over alternating rounds.

    python benchmarks/paths.py            # all of it, about ten minutes on 2 cores
    python benchmarks/paths.py full       # one part of: full, depth, memory

full    `depthscope.paths` ÷ one forward pass, in BERT-base: 12 blocks × 12 heads, 2.3e13 paths
depth   the same ratio by the number of blocks L: value passes grow as L², so that the ratio grows as L
memory  peak memory of a process that follows paths beyond one that only runs the model, in token matrices, by L
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from depthscope.attention_paths import paths
from depthscope.models import BlockConfig, Encoder

ROUNDS = 3
DEPTHS = (4, 8, 16, 32)
SHAPE = (4, 64, 256)  # of the tokens where depth varies


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(plain: Callable[[], object], other: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median over the rounds of (other ÷ plain), each other between two plain ones."""
    plain(), other()
    found = []
    for _ in range(rounds):
        before, spent, after = seconds(plain), seconds(other), seconds(plain)
        found.append(2 * spent / (before + after))
    return statistics.median(found)


def full() -> None:
    from transformers import BertConfig, BertModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, ids = BertModel(BertConfig()).eval(), torch.randint(30_000, (4, 128))
    with torch.no_grad():
        times = ratio(lambda: model(ids), lambda: paths(model, ids))
        found = paths(model, ids)
    count = sum(found.counts.values())
    error = found.metadata["largest_error"]
    print(f"BERT-base, 4 × 128 tokens, {count:.1e} paths: {times:.2f} × one forward pass, sum within {error:.0e}")


def shared(depth: int) -> nn.Module:
    """Blocks that share their weights, so that memory is not theirs."""
    model = Encoder(depth, BlockConfig(SHAPE[2], 8), generator=torch.Generator().manual_seed(0)).eval()
    model.blocks = nn.ModuleList([model.blocks[0]] * depth)
    return model


def by_depth() -> None:
    tokens = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(1))
    for depth in DEPTHS:
        model = shared(depth)
        with torch.no_grad():
            times = ratio(lambda m=model: m(tokens), lambda m=model: paths(m, tokens), rounds=3)
        print(f"{depth:>3} blocks: {times:6.2f} × one forward pass, {times / (depth + 3):.3f} × (L + 3)")


def peak(depth: int, what: str) -> float:
    code = [sys.executable, __file__, "peak", str(depth), what]
    return float(subprocess.run(code, capture_output=True, text=True, check=True).stdout)


def print_peak(depth: int, what: str) -> None:
    tokens = torch.randn(16, 128, SHAPE[2], generator=torch.Generator().manual_seed(1))
    model = shared(depth)
    with torch.no_grad():
        model(tokens) if what == "forward" else paths(model, tokens)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def memory() -> None:
    size = 16 * 128 * SHAPE[2] * 4 / 1024  # of a token matrix, in KiB
    for depth in DEPTHS:
        extra = (peak(depth, "paths") - peak(depth, "forward")) / size
        print(f"{depth:>3} blocks: {extra:6.0f} token matrices, {extra / (depth + 2):.1f} × (L + 2)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = {"full": full, "depth": by_depth, "memory": memory}
    if sys.argv[1:2] == ["peak"]:
        print_peak(int(sys.argv[2]), sys.argv[3])
    else:
        for name in sys.argv[1:] or parts:
            parts[name]()
