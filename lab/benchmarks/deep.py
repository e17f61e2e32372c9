"""What a training step of a deep and narrow model costs: ratios from one run, medians over alternating rounds, in
seconds of processor time of one thread (the machine may be shared).

    python lab/benchmarks/deep.py                # minutes on 1 core; one of: step depth memory

step    1000 blocks of width 32 of the recipe vit-digits, at its batch of 64 and at 16: the plain loop over the blocks
        with torch's AdamW ÷ the same with QuickAdamW (what `depthscope train` does), ÷ `at_once` and QuickAdamW.
        Target: a ratio of 2.
depth   milliseconds per block at 50, 200 and 1000 blocks, batch 16. Target: the same at each, so that time is linear.
memory  peak memory of a process that trains 2 steps, beyond one that only builds the model, at the same depths.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise

import torch

from depthscope_lab.models import AtOnceEncoder
from depthscope_lab.training import Share, vit_digits
from depthscope_lab.training.data import load_digits
from depthscope_lab.training.images import ImageClassification
from depthscope_lab.training.optimiser import QuickAdamW

ROUNDS = 5
DEPTHS = (50, 200, 1000)
FORMS = ("plain", "quick", "at once")
PARTS_OF_A_STEP = ("forward", "backward", "optimiser")
BETAS, DECAY, RATE = (0.9, 0.999), 0.1, 1e-5


class Stepper:
    """A model of one form, trained step by step."""

    def __init__(self, form: str, depth: int, batch: int):
        config = vit_digits("post").changed(depth=depth, width=32, ffn_width=64, heads=4, batch_size=batch)
        self.task = ImageClassification(config, load_digits())
        self.model = self.task.build()
        if form == "at once":
            AtOnceEncoder.turn(self.model.encoder)
        make = torch.optim.AdamW if form == "plain" else QuickAdamW
        self.optimiser = make(self.model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
        self.number = 0

    def step(self) -> list[float]:
        """Seconds of each part; the batch is not counted."""
        batch = self.task.batch(self.number, Share(0, 1), torch.device("cpu"))
        self.number += 1
        times = [time.process_time()]
        loss, _ = self.task.loss(self.model, batch, None)
        times.append(time.process_time())
        loss.backward()
        times.append(time.process_time())
        self.optimiser.step()
        self.optimiser.zero_grad()
        times.append(time.process_time())
        return [after - before for before, after in pairwise(times)]


def alternating(depth: int, batch: int, rounds: int = ROUNDS) -> dict[str, list[list[float]]]:
    """Form → seconds of each part of a step, round by round; the first round warms up."""
    steppers = {form: Stepper(form, depth, batch) for form in FORMS}
    found = [{form: stepper.step() for form, stepper in steppers.items()} for _ in range(rounds + 1)]
    return {form: [one[form] for one in found[1:]] for form in FORMS}


def step() -> None:
    for batch in (16, 64):
        found = alternating(1000, batch)
        for form in FORMS:
            middle = [statistics.median(part) for part in zip(*found[form], strict=True)]
            parts = ", ".join(f"{name} {value:.2f}" for name, value in zip(PARTS_OF_A_STEP, middle, strict=True))
            ratios = [sum(plain) / sum(own) for plain, own in zip(found["plain"], found[form], strict=True)]
            low, ratio, high = statistics.quantiles(ratios, n=4)
            print(f"step   batch {batch}, {form:<8} {sum(middle):.2f} s ({parts}): plain is {ratio:.2f} × as slow "
                  f"(quartiles {low:.2f}–{high:.2f})", flush=True)  # fmt: skip


def depth() -> None:
    found = {blocks: alternating(blocks, 16, 3) for blocks in DEPTHS}
    for form in FORMS:
        each = [statistics.median(map(sum, found[blocks][form])) / blocks * 1000 for blocks in DEPTHS]
        print(f"depth  {form:<8} " + ", ".join(f"{b} blocks {ms:.2f} ms" for b, ms in zip(DEPTHS, each, strict=True)))


def memory() -> None:
    for form in FORMS:
        said = []
        for blocks in DEPTHS:
            built, trained = (_peak_of(form, blocks, steps) for steps in (0, 2))
            said.append(f"{blocks} blocks {(trained - built) / 1e6:.0f} MB")
        print(f"memory {form:<8} " + ", ".join(said), flush=True)


def _peak_of(form: str, blocks: int, steps: int) -> int:
    command = [sys.executable, __file__, "--peak", form, str(blocks), str(steps)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _peak(form: str, blocks: int, steps: int) -> None:
    stepper = Stepper(form, blocks, 16)
    for _ in range(steps):
        stepper.step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


PARTS = {"step": step, "depth": depth, "memory": memory}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--peak"]:
        _peak(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        print(f"torch {torch.__version__}, 1 thread, {ROUNDS} rounds")
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
