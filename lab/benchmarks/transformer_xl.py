"""What a training step of Transformer-XL costs: ours ÷ the equations as written, CPU time, from one run.

    python lab/benchmarks/transformer_xl.py          # all of it, about five minutes on one core
    python lab/benchmarks/transformer_xl.py time     # one part of: time, memory, depth, remedies, fused

time      a training step (forward, backward, Adam) ÷ the same model with its attention as the paper and the
          authors' code write it: einsum over (n, m, batch, head), the shift by padding and copying
memory    the same, peak memory of a process above that of one that only builds model and optimiser
depth     a step at several depths ÷ a step with 8 blocks
remedies  a step with de-escalation (prefix, and the paper's mean over the segment) ÷ one without
fused     the attention alone, without gradients ÷ forward only with gradients: what the fused kernel gives,
          which training cannot have, since the position bias needs a gradient
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models.token_means import Full, Prefix
from depthscope_lab.models import CarriedMean, TransformerXL, TransformerXLConfig
from depthscope_lab.models.relative_attention import Place, RelativeAttention
from depthscope_lab.models.transformer_xl import Context

ROUNDS = 9
VOCABULARY = 2000
# name → configuration, rows, segment = memory
SHAPES = {
    "4 × 410, 4 × 150 tokens": (TransformerXLConfig(VOCABULARY, 4, 410, 10, 820, dropout=0.0), 4, 150),
    "8 × 128, 8 × 64 tokens": (TransformerXLConfig(VOCABULARY, 8, 128, 4, 256, dropout=0.0), 8, 64),
    "8 × 64, 8 × 32 tokens": (TransformerXLConfig(VOCABULARY, 8, 64, 4, 128, dropout=0.0), 8, 32),
}
MEMORY_SHAPE = "4 × 410, 4 × 150 tokens"


class AsWritten(RelativeAttention):
    """Tokens on axis 0, queries of the memory computed and thrown away, padding copied: as in the authors' code."""

    def forward(self, x: Tensor, past: Tensor, place: Place) -> Tensor:
        n, h = x.shape[1], self.heads
        seen = torch.cat([past, x], dim=1).transpose(0, 1)  # (m + n, batch, d)
        q = self.query(seen)[-n:].unflatten(-1, (h, -1))
        k, v = (project(seen).unflatten(-1, (h, -1)) for project in (self.key, self.value))
        r = self.position(place.encodings[1:]).unflatten(-1, (h, -1))
        content = torch.einsum("ibhd,jbhd->ijbh", q + place.u, k)
        by_distance = torch.einsum("ibhd,jhd->ijbh", q + place.v, r)
        scores = (content + _shift_by_padding(by_distance)) * self.scale
        scores = scores.masked_fill(place.hidden.isinf()[:, :, None, None], -torch.inf)
        y = torch.einsum("ijbh,jbhd->ibhd", F.softmax(scores, dim=1), v)
        return self.output(y.flatten(-2)).transpose(0, 1)


def _shift_by_padding(scores: Tensor) -> Tensor:
    n, m = scores.shape[:2]
    padded = torch.cat([scores.new_zeros(n, 1, *scores.shape[2:]), scores], dim=1)
    return padded.view(m + 1, n, *scores.shape[2:])[1:].view_as(scores)


def training_step(shape: str, as_written: bool = False, **changes: object) -> Callable[[], object]:
    """A step over one segment with a full memory."""
    config, rows, n = SHAPES[shape]
    model = TransformerXL(replace(config, context=Context(n), **changes), torch.Generator().manual_seed(0))
    if as_written:
        for block in model.blocks:
            block.attention.__class__ = AsWritten
    optimiser = torch.optim.Adam(model.parameters(), lr=2.5e-4)
    ids = torch.randint(VOCABULARY, (rows, n + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        memory = model(ids[:, :-1]).memory

    def step() -> None:
        optimiser.zero_grad()
        model(ids[:, :-1], ids[:, 1:], memory).losses.mean().backward()
        optimiser.step()

    return step


def ratio(call: Callable[[], object], base: Callable[[], object]) -> float:
    """Median over rounds of call ÷ base, each pair timed back to back."""
    for warm in (call, base):
        warm()
    return statistics.median(_seconds(call) / _seconds(base) for _ in range(ROUNDS))


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()  # one thread: other processes on the machine do not count
    call()
    return time.process_time() - start


def compare_time() -> None:
    for shape in SHAPES:
        print(f"{shape:<26} training step {ratio(training_step(shape), training_step(shape, True)):.3f} × as written")


def compare_memory() -> None:
    found = {}
    for mode in ("idle", "ours", "written"):
        command = [sys.executable, __file__, "--peak", mode]
        found[mode] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    above = {mode: found[mode] - found["idle"] for mode in ("ours", "written")}
    print(
        f"{MEMORY_SHAPE:<26} peak memory {found['ours'] / found['written']:.3f} × as written; above model and "
        f"optimiser {above['ours'] / 1e6:.0f} MB, {above['ours'] / above['written']:.3f} × as written"
    )


def compare_depth() -> None:
    shape = "8 × 64, 8 × 32 tokens"
    few = training_step(shape)
    for depth in (16, 30, 60, 120):
        found = ratio(training_step(shape, depth=depth), few)
        print(f"{depth:>4} blocks: {found:.2f} × the step of 8, {found * 8 / depth:.3f} × its time per block")


def compare_remedies() -> None:
    for shape in SHAPES:
        for mean in (Prefix(), Full()):
            found = ratio(training_step(shape, carried_mean=CarriedMean(mean=mean)), training_step(shape))
            print(f"{shape:<26} {type(mean).__name__:<24} {found:.3f} × without")


def compare_fused() -> None:
    for shape, (config, rows, n) in SHAPES.items():
        model = TransformerXL(replace(config, dropout=0.0))
        attention: nn.Module = model.blocks[0].attention
        x, past = torch.randn(rows, n, config.width), torch.randn(rows, n, config.width)
        place = model._place(n, n, Context(n))

        def plain(attention=attention, x=x, past=past, place=place) -> None:
            attention(x, past, place)

        found = ratio(torch.no_grad()(plain), plain)
        print(f"{shape:<26} attention forward, fused {found:.3f} × unfused")


def peak(mode: str) -> None:
    """Runs in a process of its own and prints the most memory that it ever had, in bytes."""
    step = training_step(MEMORY_SHAPE, as_written=mode == "written")
    if mode != "idle":
        for _ in range(3):
            step()
    # Not `ru_maxrss`: a child begins with its parent's.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(int(line.split()[1]) * 1024)


PARTS = {
    "time": compare_time,
    "memory": compare_memory,
    "depth": compare_depth,
    "remedies": compare_remedies,
    "fused": compare_fused,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--peak"]:
        peak(sys.argv[2])
    else:
        print(f"torch {torch.__version__}, 1 thread, medians of {ROUNDS} rounds")
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
