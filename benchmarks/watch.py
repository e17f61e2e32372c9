"""What watching costs a training run: ratios from one run, medians over alternating rounds.

    python benchmarks/watch.py        # about five minutes on 2 cores

single    one watched training step ÷ the same step without a watch, with its quartiles. The target is 1.05.
operations  calls of torch's operators in such a step, without and with a watch: they carry no noise
idle      a step between two watched ones ÷ the same step without a watch
every 50  both together: (49 · idle + single) ÷ 50
counter   what the hook between watched steps takes, in microseconds
run       50 steps with a watch, the first of them watched, ÷ 50 steps without; ViT only
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    """A step of AdamW, timed."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]):
        self.model, self.loss = model.train(), loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def __call__(self) -> float:
        start = time.perf_counter()
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


class Operations(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(act: Callable[[], object]) -> int:
    with Operations() as counted:
        act()
    return counted.count


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
        f"{name:<30} single {_spread(single)}  idle {_spread(between)}  "
        f"every {EVERY}: {total:.4f}, of which the watched step {1 + (once - 1) / EVERY:.4f}"
        f"; counter {microseconds:.1f} µs; operations {counts[0]} → {counts[1]}"
    )


def _spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} (quartiles {low:.3f}–{high:.3f})"


def compare_runs(name: str, step: Training, rounds: int = 3) -> None:
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


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {ROUNDS} rounds")
    for title, make in MODELS.items():
        training = Training(*make())
        compare(title, training)
        compare(f"{title.split(',')[0]}, gradients", training, gradients=True)
        if make is vit:
            compare_runs(title, training)
