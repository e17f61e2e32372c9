"""The heat map of a watch reaches the trackers of both trainers: one picture that grows, beside some scalars."""

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.watching.pictures import NAME, Painter, picture_of, sender
from samples import seeded

X = torch.randn(24, 7, 16, generator=seeded(1))
LOOKS = [0, 2, 4, 6, 8, 10, 12]  # of 14 steps, every second
DRAWN = [2, 6, 12]  # after 2 and 4 looks, and at the end


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    found.Reload()
    return found


def check(found: Any, drawn: list[int]) -> None:
    """One picture under one name, with colours in it, and no more than seven scalars."""
    assert found.Tags()["images"] == [NAME]
    images = found.Images(NAME)
    assert [image.step for image in images] == drawn
    assert all(image.encoded_image_string.startswith(b"\x89PNG") and image.width > 400 for image in images)
    depth = [tag for tag in found.Tags()["scalars"] if "depth/" in tag]
    assert 0 < len(depth) <= 7
    assert [event.step for event in found.Scalars(depth[0])] == LOOKS


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder(3, BlockConfig(16, 4))

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        return {"loss": self.encoder(x).square().mean()}


def test_hugging_face_sends_it_to_tensorboard(tmp_path: Path):
    import transformers as hf
    from transformers.integrations import TensorBoardCallback

    settings: dict[str, Any] = {"max_steps": 14, "per_device_train_batch_size": 2, "save_strategy": "no"}
    settings |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    arguments = hf.TrainingArguments(str(tmp_path / "out"), **settings)
    trainer = hf.Trainer(Model(), arguments, train_dataset=[{"x": x, "labels": 0} for x in X])
    trainer.remove_callback(hf.PrinterCallback)
    trainer.add_callback(TensorBoardCallback(writer := SummaryWriter(str(tmp_path / "board"))))
    trainer.add_callback(depthscope.DepthCallback(trainer, every=2))
    trainer.train()
    check(events(tmp_path / "board"), DRAWN)
    assert writer.all_writers is None  # closed by the Trainer, and again by us


def test_lightning_sends_it_to_tensorboard_and_passes_over_a_table(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of its imports, its advice
        lightning = pytest.importorskip("lightning.pytorch")
        from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = Model()

            def training_step(self, batch: Tensor, _index: int) -> Tensor:
                return self.net(batch)["loss"]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        loggers = [CSVLogger(tmp_path, "table", ""), TensorBoardLogger(tmp_path, "board", "")]
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(
            max_steps=14, accelerator="cpu", logger=loggers, callbacks=[depthscope.DepthCallback(every=2)], **quiet
        )
        trainer.fit(Module(), DataLoader(list(X), batch_size=2))
        assert sender(loggers[0]) is None
    check(events(tmp_path / "board"), DRAWN)


def a_watch() -> depthscope.watching.Watch:
    encoder = Encoder(3, BlockConfig(16, 4)).train()
    with depthscope.watch(encoder, every=1) as watch:
        for _ in range(2):
            encoder(X[:2])
    return watch


def test_weights_and_biases_get_it_from_either_trainer():
    """Stand-ins with the calls that its documentation names: the package is not installed here."""
    logged: list[Any] = []
    module = SimpleNamespace(log=logged.append, Image=lambda figure: ("image", figure))
    of_trainer = SimpleNamespace(_wandb=module)
    of_lightning = SimpleNamespace(log_image=lambda key, images, step: logged.append((key, images, step)))
    painter = Painter(a_watch(), lambda: [of_trainer, of_lightning, object()])
    painter.look()
    assert logged == []  # a single step is no map
    painter.look()
    (first, (key, images, step)) = logged
    (kind, figure) = first[NAME]
    assert (kind, first["train/global_step"], key, step, images) == ("image", 1, NAME, 1, [figure])
    painter.draw()
    assert len(logged) == 2  # all is drawn


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


def test_a_tracker_that_fails_does_not_end_the_training():
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    painter = Painter(a_watch(), lambda: [SimpleNamespace(log_image=fail)])
    painter.look()
    with pytest.warns(UserWarning, match="was not logged: OSError: no room"):
        painter.look()


def test_a_tracker_that_fails_does_not_cost_the_others_their_picture():
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    class Lost:
        @property
        def experiment(self) -> None:
            raise RuntimeError("no connection")

    logged: list[Any] = []
    other = SimpleNamespace(log_image=lambda key, images, step: logged.append((key, step)))
    painter = Painter(a_watch(), lambda: [SimpleNamespace(log_image=fail), other])
    painter.look()
    with pytest.warns(UserWarning, match="was not logged: OSError: no room"):
        painter.look()
    assert logged == [(NAME, 1)]
    with pytest.warns(UserWarning, match="was not logged: RuntimeError: no connection"):
        Painter(a_watch(), lambda: [Lost()]).look()


def test_only_the_first_process_of_hugging_face_sends_it(tmp_path: Path):
    """In the others Weights & Biases was never begun, and `wandb.log` fails."""
    import transformers as hf

    settings: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 2, "save_strategy": "no"}
    settings |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    logged: list[Any] = []

    class Tracker(hf.TrainerCallback):  # type: ignore[misc]
        _wandb = SimpleNamespace(log=logged.append, Image=lambda figure: figure)

    class Second(hf.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.is_world_process_zero = False

    for callbacks, pictures in ([Tracker()], 2), ([Tracker(), Second()], 0):
        logged.clear()
        arguments = hf.TrainingArguments(str(tmp_path), **settings)
        data = [{"x": x, "labels": 0} for x in X]
        trainer = hf.Trainer(Model(), arguments, train_dataset=data, callbacks=callbacks)
        trainer.remove_callback(hf.PrinterCallback)
        trainer.add_callback(depthscope.DepthCallback(trainer, every=1))
        trainer.train()
        assert len(logged) == pictures


def test_without_token_similarity_the_first_measure_is_drawn():
    encoder = Encoder(3, BlockConfig(16, 4)).train()
    with depthscope.watch(encoder, every=1, measures=["frobenius_norm"], stations=["after_ffn"]) as watch:
        for _ in range(2):
            encoder(X[:2])
    assert picture_of(watch.records).axes[0].get_title(loc="left") == "frobenius norm, after ffn"
