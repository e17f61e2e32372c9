"""Training runs that take milliseconds: a tiny classifier, and a task with a memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.models import BlockConfig, Encoder
from depthscope_lab.training import ImageConfig, Outcome, Run, Share, train
from depthscope_lab.training.checkpoint import read_newest
from depthscope_lab.training.data import LabelledImages
from depthscope_lab.training.display import Display
from depthscope_lab.training.images import ImageClassification
from depthscope_lab.training.randomness import derived_generator
from depthscope_lab.training.recipes import IN_IMAGES, fill
from depthscope_lab.training.variants import variant_of


def tiny_config(**changes: Any) -> ImageConfig:
    chosen = variant_of(changes.pop("variant", "deescalated"))
    config = ImageConfig(
        dataset="digits",
        depth=2,
        width=16,
        ffn_width=32,
        heads=2,
        patch_size=4,
        batch_size=8,
        lr=1e-3,
        epochs=5,
        weight_decay=0.1,
    )
    return fill(config, "tiny", chosen, IN_IMAGES).changed(**changes)


def tiny_images(train: int = 36, test: int = 12) -> LabelledImages:
    """Four steps per epoch, four images left over."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(17, (train + test, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (train + test,), generator=generator)
    return LabelledImages(
        "tiny", images[:train], labels[:train], images[train:], labels[train:], white=16, mean=(0.5,), std=(0.3,)
    )


def tiny_task(config: ImageConfig) -> ImageClassification:
    return ImageClassification(config, tiny_images())


class MemoryTask:
    """Streams of numbers, one per sample of the batch; the model gets its last output as a further token."""

    unit = "tokens"
    steps_per_epoch = 4

    def __init__(self, config: ImageConfig):
        self.config = config
        self.units_per_step = config.batch_size

    def build(self) -> nn.Module:
        block = BlockConfig(self.config.width, self.config.heads, self.config.ffn_width)
        return Encoder(self.config.depth, block, generator=derived_generator(self.config.seed, "weights")).double()

    def batch(self, step: int, share: Share, device: torch.device) -> Tensor:
        shape = (self.config.batch_size, 3, self.config.width)
        everything = torch.randn(shape, generator=derived_generator(0, "stream", step), dtype=torch.float64)
        return everything[share.of(self.config.batch_size)].to(device)

    def loss(self, model: nn.Module, batch: Tensor, carry: Any) -> tuple[Tensor, Any]:
        memory = batch.new_zeros(len(batch), 1, batch.shape[-1]) if carry is None else carry["memory"]
        output = model(torch.cat([memory, batch], dim=1))
        return (output[:, 1:] - batch.roll(1, dims=-1)).square().mean(), {"memory": output[:, -1:]}

    def evaluate(self, model: nn.Module, share: Share, device: torch.device) -> dict[str, float]:
        loss, _ = self.loss(model, self.batch(10**6, share, device), None)
        return {"test_loss": loss.item(), "count": 1.0}

    def report(self, means: dict[str, float]) -> dict[str, float]:
        return means

    def describe(self) -> dict[str, Any]:
        return {"name": "streams"}


class Recorder(Display):
    """Keeps what it is told; `at_step` is called after each logged step."""

    def __init__(self, at_step: Callable[[int], object] = lambda _step: None):
        self.messages: list[str] = []
        self.losses: list[float] = []
        self.at_step = at_step

    def say(self, message: str) -> None:
        self.messages.append(message)

    def logged(self, step: int, values: Mapping[str, float], seconds_left: float) -> None:
        self.losses.append(values["loss"])
        self.at_step(step)


def run_in(
    folder: Path, config: ImageConfig, *, display: Recorder | None = None, task: Any = None, **options: Any
) -> tuple[Outcome, list[float]]:
    """A run that logs every step; its outcome and losses."""
    display = display or Recorder()
    run = Run(folder, **{"log_every": 1, "tracker": "none", "cpu": True} | options)
    outcome = train(task or tiny_task(config), config, run, display=display)
    return outcome, display.losses


def saved(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Every tensor of the newest checkpoint."""
    found = read_newest(folder / "checkpoints", print)
    assert found is not None
    return found.files


def assert_bitwise_equal(first: dict[str, dict[str, Tensor]], second: dict[str, dict[str, Tensor]]) -> None:
    assert first.keys() == second.keys()
    for file, tensors in first.items():
        assert tensors.keys() == second[file].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second[file][name]), f"{file}: {name}"
