"""What watching costs a training run: ratios of processor time from one run, medians over alternating rounds with their
quartiles.

    python benchmarks/watch.py        # about six minutes; one part of it: vit, bert or run

vit, bert   one watched training step ÷ the same step without a watch, with gradients and without (the target is 1.05);
            a step between two watched ones ÷ the same step without a watch; both together, with every 50th watched;
            what the hook between watched steps takes; and the operations of PyTorch in a step, without and with a watch
run         50 steps with a watch, the first of them watched, ÷ 50 steps without, in turn; the ViT
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from timing import keep_memory, operations, spread_of
from torch import Tensor, nn

import depthscope
from depthscope.models import BlockConfig, VisionTransformer, pre_norm

ROUNDS = 15
EVERY = 50


def vit() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = VisionTransformer(12, BlockConfig(192, 3, placement=pre_norm), image_size=32, patch_size=4)
    images = torch.randn(8, 3, 32, 32)
    return model, lambda called: called(images).square().mean()


def bert() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from transformers import BertConfig, BertModel

    ids = torch.randint(30_000, (2, 128))
    return BertModel(BertConfig()), lambda called: called(ids).last_hidden_state.square().mean()


MODELS = {"ViT 12 × 192, 8 × 65 tokens": vit, "BERT-base, 2 × 128 tokens": bert}


class Training:
    """A step of AdamW, timed: processor time of one thread."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]):
        self.model, self.loss = model.train(), loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def __call__(self) -> float:
        start = time.process_time()
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - start


def compare(name: str, step: Training, *, gradients: bool = False) -> None:
    watch = depthscope.watch(step.model, EVERY, gradients=gradients)
    number = 0

    def watched() -> float:
        nonlocal number
        watch.open()
        watch.step(number)
        number += EVERY
        seconds = step()
        watch.close()
        return seconds

    def idle() -> float:
        watch.open()
        watch.step(number - 1)
        seconds = step()
        watch.close()
        return seconds

    step(), watched(), idle()
    single, between = [], []
    for _ in range(ROUNDS):
        plain = step()
        single.append(watched() / plain)
        plain = step()
        between.append(idle() / plain)
    once, rest = statistics.median(single), statistics.median(between)
    total = ((EVERY - 1) * rest + once) / EVERY
    watch.open()
    watch.step(1)
    counter = next(iter(step.model._forward_pre_hooks.values()))
    start = time.perf_counter()
    for _ in range(10_000):
        counter(step.model, (), {})
    microseconds = (time.perf_counter() - start) * 100
    watch.close()
    counts = operations(step), operations(watched)
    print(
        f"{name:<30} single {spread_of(single)}  idle {spread_of(between)}  "
        f"every {EVERY}: {total:.4f}, of which the watched step {1 + (once - 1) / EVERY:.4f}"
        f"; counter {microseconds:.1f} µs; operations {counts[0]} → {counts[1]}"
    )


def compare_runs(name: str, step: Training, rounds: int = 2) -> None:
    found = []
    for _ in range(rounds):
        plain = watched = 0.0
        watch = depthscope.watch(step.model, EVERY)
        for number in range(EVERY):  # in turn, so that both see the same machine
            plain += step()
            watch.open()
            watch.step(number)
            watched += step()
            watch.close()
        found.append(watched / plain)
    print(f"{name:<30} run of {EVERY} steps: {statistics.median(found):.4f} ({min(found):.4f}–{max(found):.4f})")


def show(title: str) -> None:
    training = Training(*MODELS[title]())
    compare(title, training)
    compare(f"{title.split(',')[0]}, gradients", training, gradients=True)


VIT, BERT = MODELS
PARTS = {
    "vit": lambda: show(VIT),
    "bert": lambda: show(BERT),
    "run": lambda: compare_runs(VIT, Training(*vit())),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keep_memory()
    print(f"torch {torch.__version__}, one thread, medians of {ROUNDS} rounds")
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
