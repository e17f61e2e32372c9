"""What a training step of a deep and narrow model costs: ratios from one run, medians over alternating rounds, in
seconds of processor time of one thread (the machine may be shared).

    python lab/benchmarks/deep.py

Up to 1000 blocks of width 32 of the recipe vit-digits, batch 16, with AdamW as it is by default, and fused
(as in `depthscope train`). Target: the same time per block at each depth.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import pairwise

import torch
from torch.optim import AdamW

from depthscope_lab.training import Share, vit_digits
from depthscope_lab.training.data import load_digits
from depthscope_lab.training.images import ImageClassification

ROUNDS = {50: 20, 200: 10, 1000: 5}  # by depth
FORMS = {"default": AdamW, "fused": partial(AdamW, fused=True)}
PARTS_OF_A_STEP = ("forward", "backward", "optimiser")


class Stepper:
    """A model, trained step by step."""

    def __init__(self, form: str, depth: int):
        config = vit_digits("post").changed(depth=depth, width=32, ffn_width=64, heads=4, batch_size=16)
        self.task = ImageClassification(config, load_digits())
        self.model = self.task.build()
        self.optimiser = FORMS[form](self.model.parameters(), lr=1e-5, betas=(0.9, 0.999), weight_decay=0.1)
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


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for depth, rounds in ROUNDS.items():
        steppers = {form: Stepper(form, depth) for form in FORMS}
        found = [{form: stepper.step() for form, stepper in steppers.items()} for _ in range(rounds + 1)][1:]
        for form in steppers:
            each = [statistics.median(part) * 1000 / depth for part in zip(*(one[form] for one in found), strict=True)]
            parts = ", ".join(f"{name} {value:.2f}" for name, value in zip(PARTS_OF_A_STEP, each, strict=True))
            ratio = statistics.median(sum(one["default"]) / sum(one[form]) for one in found)
            print(
                f"{depth} blocks, {form:<8} {sum(each):.2f} ms a block ({parts}): default ÷ this {ratio:.2f}",
                flush=True,
            )
