"""The gate inside real trainers: they stop, and go on where nothing collapses or the loss falls."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.watching import Alarm
from samples import seeded

RULE = "token_similarity>0.99 for 3 after 0"


class Collapsing(nn.Module):
    """Its tokens become alike in block 2 with the pass `at`, passes in training mode counted from 0."""

    slope = 1.0  # of its loss

    def __init__(self, at: int | None):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder(3, BlockConfig(16, 4))
        self.at, self.passes = at, 0
        self.register_buffer("steps", torch.zeros(()))  # also those before a checkpoint

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        if self.training:
            if self.passes == self.at:
                with torch.no_grad():
                    self.encoder.blocks[1].norm2.weight.zero_()
                    self.encoder.blocks[1].norm2.bias.normal_(generator=seeded(0))
                self.encoder.blocks[1].norm2.requires_grad_(False)
            self.passes += 1
            self.steps += 1
        return {"loss": self.encoder(x).square().mean() + self.slope * self.steps.item()}


X = torch.randn(24, 7, 16, generator=seeded(1))


# --- Hugging Face -----------------------------------------------------------------------------------------


def hugging_face(folder: Path, at: int | None, *, resume: str | None = None, **options: Any) -> tuple[Any, list[Alarm]]:
    import transformers as hf

    settings = {
        "output_dir": str(folder),
        "max_steps": 14,
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    raised: list[Alarm] = []
    trainer = hf.Trainer(
        Collapsing(at),
        hf.TrainingArguments(**settings | options),
        train_dataset=[{"x": x, "labels": 0} for x in X],
        eval_dataset=[{"x": x, "labels": 0} for x in X[:2]],
    )
    trainer.remove_callback(hf.PrinterCallback)
    trainer.add_callback(depthscope.DepthCallback(trainer, every=2, stop_if=RULE, on_alarm=raised.append))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, raised


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hugging_face_stops(tmp_path: Path, accumulation: int):
    trainer, (alarm,) = hugging_face(tmp_path, 4 * accumulation, gradient_accumulation_steps=accumulation)
    assert (alarm.since, alarm.step, alarm.good) == (4, 8, 2)  # looks: 0, 2 are good, 4, 6, 8 are not
    assert trainer.state.global_step == 9
    assert "checkpoint" not in str(alarm)


def test_hugging_face_counts_anew_from_a_checkpoint(tmp_path: Path):
    """Looks 2 and 4 were bad when it stopped: the third bad one after the checkpoint is 10."""
    hugging_face(tmp_path, 2, max_steps=6)
    trainer, (alarm,) = hugging_face(tmp_path, None, resume=str(tmp_path / "checkpoint-6"))
    assert (alarm.since, alarm.step, alarm.good) == (6, 10, None)
    assert trainer.state.global_step == 11


def test_hugging_face_goes_on_where_nothing_collapses(tmp_path: Path):
    trainer, raised = hugging_face(tmp_path, None)
    assert (trainer.state.global_step, raised) == (14, [])


def test_hugging_face_goes_on_while_the_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Collapsing, "slope", -1.0)
    for accumulation in (1, 2):  # the Trainer forgets its sum of losses where it logs
        options = {"gradient_accumulation_steps": accumulation, "logging_steps": 3}
        trainer, raised = hugging_face(tmp_path, 1, **options)
        assert (trainer.state.global_step, raised) == (14, [])


# --- Lightning --------------------------------------------------------------------------------------------


def lightning_fit(at: int | None) -> tuple[Any, list[Alarm]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of its imports, its advice
        lightning = pytest.importorskip("lightning.pytorch")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = Collapsing(at)

            def training_step(self, batch: Tensor, _index: int) -> Tensor:
                return self.net(batch)["loss"]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        raised: list[Alarm] = []
        callback = depthscope.DepthCallback(every=2, stop_if=RULE, on_alarm=raised.append)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet["enable_checkpointing"] = False
        trainer = lightning.Trainer(max_steps=14, accelerator="cpu", callbacks=[callback], **quiet)
        trainer.fit(Module(), DataLoader(list(X), batch_size=2))
    return trainer, raised


def test_lightning_stops_and_goes_on_where_nothing_collapses():
    trainer, (alarm,) = lightning_fit(7)
    assert (alarm.since, alarm.step, alarm.good) == (8, 12, 6)
    assert trainer.global_step == 13
    trainer, raised = lightning_fit(None)
    assert (trainer.global_step, raised) == (14, [])


def test_lightning_goes_on_while_the_loss_falls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Collapsing, "slope", -1.0)
    trainer, raised = lightning_fit(1)
    assert (trainer.global_step, raised) == (14, [])
