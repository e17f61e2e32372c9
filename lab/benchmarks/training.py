"""What a training step costs: ratios from one run, medians over alternating rounds.

    python lab/benchmarks/training.py            # minutes on 2 cores; one of: torch depth data

torch  a step of our ViT ÷ a step of the same ViT around PyTorch's nn.TransformerEncoder. Target: at most 1.05.
depth  seconds per step and block at 25, 50, 100 and 200 blocks. Target: the same at each, so that time is linear.
data   a batch (drawn, augmented, normalised) ÷ the whole step, as in the loop. Target: below 0.05. CIFAR-10's
       pixels are made up here: neither augmentation nor model takes longer for real ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import BlockConfig, VisionTransformer, post_norm, pre_norm
from depthscope_lab.training import ImageConfig, Share, vit_cifar10, vit_digits
from depthscope_lab.training.data import LabelledImages, load_digits
from depthscope_lab.training.images import ImageClassification

ROUNDS = 9
WIDTH, HEADS, FFN_WIDTH, DEPTH = 192, 8, 384, 12
CPU = torch.device("cpu")


class TorchViT(nn.Module):
    """Our ViT with PyTorch's encoder in place of ours."""

    def __init__(self, ours: VisionTransformer, *, norm_first: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, FFN_WIDTH, dropout=0.0, activation="relu", batch_first=True, norm_first=norm_first
        )
        ours.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.model = ours

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)


def stepper(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], float]:
    """A step of AdamW, timed."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)

    def step() -> float:
        start = time.perf_counter()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step()
    return step


def against_torch() -> None:
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    for name, placement in (("post-norm", post_norm), ("pre-norm", pre_norm)):
        block = BlockConfig(WIDTH, HEADS, FFN_WIDTH, placement=placement)
        ours, theirs = (VisionTransformer(DEPTH, block, image_size=32, patch_size=4) for _ in range(2))
        mine = stepper(ours, images, labels)
        torchs = stepper(TorchViT(theirs, norm_first=placement is pre_norm), images, labels)
        pairs = [(mine(), torchs()) for _ in range(ROUNDS)]
        show(f"torch  {name}, {DEPTH} × {WIDTH}, 16 images", [first / second for first, second in pairs], "ratio")


def against_depth() -> None:
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    block = BlockConfig(64, 4, 128)
    depths = (25, 50, 100, 200)
    steps = {
        depth: stepper(VisionTransformer(depth, block, image_size=32, patch_size=8), images, labels) for depth in depths
    }
    rounds = [{depth: steps[depth]() / depth for depth in depths} for _ in range(ROUNDS)]
    for depth in depths:
        milliseconds = statistics.median(found[depth] for found in rounds) * 1000
        relative = [found[depth] / found[depths[0]] for found in rounds]
        show(f"depth  {depth:>3} blocks: {milliseconds:.3f} ms per block", relative, f"÷ that of {depths[0]} blocks")


def data_share() -> None:
    tasks = {
        "vit-digits, 48 blocks": (vit_digits("post"), load_digits()),
        "vit-cifar10, 80 blocks, AutoAugment": (vit_cifar10("post").changed(batch_size=16), made_up_cifar10()),
        "the same without AutoAugment": (
            vit_cifar10("post").changed(batch_size=16, augment=False),
            made_up_cifar10(),
        ),
    }
    for name, (config, data) in tasks.items():
        found = share_of(config, data, rounds=ROUNDS if config.dataset == "digits" else 3)
        show(f"data   {name}, batch {config.batch_size}", found, "of the step")


def share_of(config: ImageConfig, data: LabelledImages, rounds: int) -> list[float]:
    task = ImageClassification(config, data)
    model = task.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    found = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        batch = task.batch(number, Share(0, 1), CPU)
        drawn = time.perf_counter()
        loss, _ = task.loss(model, batch, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((drawn - start) / (time.perf_counter() - start))
    return found[1:]  # the first warms up


def made_up_cifar10() -> LabelledImages:
    images = torch.randint(256, (10_000, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(10, (10_000,))
    return LabelledImages(
        "made up", images, labels, images[:100], labels[:100], white=255, mean=(0.5,) * 3, std=(0.25,) * 3
    )


def show(name: str, found: list[float], what: str) -> None:
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"{name:<60} {middle:.4f} {what} (quartiles {low:.4f}–{high:.4f})", flush=True)


PARTS = {"torch": against_torch, "depth": against_depth, "data": data_share}

if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {ROUNDS} rounds")
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
