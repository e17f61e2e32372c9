"""How the trackers of Accelerate get the heat map of a watch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.utils.tensorboard import SummaryWriter

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.watching.pictures import NAME, sender
from zoo import TOKENS


def test_weights_and_biases_get_it_from_accelerate():
    """`depthscope train --set tracker=wandb`: its tracker wraps pictures itself."""
    from accelerate.tracking import WandBTracker

    class Tracker(WandBTracker):
        def __init__(self) -> None:
            self.logged: list[Any] = []

        def log_images(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            self.logged.append((values, step))

    tracker = Tracker()
    send = sender(tracker)
    assert send is not None
    send("figure", 7)
    assert tracker.logged == [({NAME: ["figure"]}, 7)]
    assert sender(object()) is None


def test_tensorboard_gets_it(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    encoder = Encoder(3, BlockConfig(16, 4)).train()
    with depthscope.watch(encoder, every=1) as watch:
        for _ in range(2):
            encoder(TOKENS)
    with SummaryWriter(str(tmp_path)) as writer:
        send = sender(SimpleNamespace(writer=writer))
        assert send is not None
        send(watch.heat_map(), 1)
    found = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    found.Reload()
    (image,) = found.Images(NAME)
    assert (image.step, image.encoded_image_string[:4]) == (1, b"\x89PNG")
    assert image.width > 400
