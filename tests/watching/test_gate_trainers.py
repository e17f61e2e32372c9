"""The gate inside real trainers: they stop, and their last good checkpoint is kept and named."""

import json
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
from depthscope.watching.callbacks import go_on
from depthscope.watching.gate import make_gate
from depthscope.watching.keeping import Keeper
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


class Killed(RuntimeError):
    pass


def hugging_face(
    folder: Path,
    at: int | None,
    every: int = 2,
    *,
    dies: int | None = None,
    resume: str | None = None,
    watched: bool = True,
    rule: str = RULE,
    **options: Any,
) -> tuple[Any, list[Alarm]]:
    """A training; before the step `dies` it is broken off, as by a signal."""
    import transformers as hf

    class Death(hf.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == dies:
                raise Killed

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
    if watched:
        trainer.add_callback(depthscope.DepthCallback(trainer, every=every, stop_if=rule, on_alarm=raised.append))
    trainer.add_callback(Death())
    trainer.train(resume_from_checkpoint=resume)
    return trainer, raised


def test_hugging_face_counts_on_after_it_was_killed(tmp_path: Path):
    """Looks 4 and 6 were bad when it died, and 2 was good: the third bad one is 8, not the first of three."""
    with pytest.raises(Killed):
        hugging_face(tmp_path, 4, dies=7, save_steps=1)
    trainer, (alarm,) = hugging_face(tmp_path, None, resume=str(tmp_path / "checkpoint-7"), save_steps=1)
    assert (alarm.since, alarm.step, alarm.good) == (4, 8, 2)
    assert trainer.state.global_step == 9
    assert alarm.checkpoint == tmp_path / "good-checkpoint-2"
    assert (alarm.checkpoint / "model.safetensors").stat().st_size > 0


def test_hugging_face_begins_to_count_after_a_checkpoint_without_a_gate(tmp_path: Path):
    hugging_face(tmp_path, 1, watched=False, max_steps=3)
    last = str(tmp_path / "checkpoint-3")
    trainer, (alarm,) = hugging_face(tmp_path, None, resume=last, restore_callback_states_from_checkpoint=True)
    assert (alarm.since, alarm.step, alarm.good) == (4, 8, None)
    assert trainer.state.global_step == 9


DAMAGED = [
    ["a list"],
    {"gate": {}},
    {"gate": [1], "checkpoints": {}},
    {"gate": {f"stop if {RULE}": [4, 2]}, "checkpoints": {}},
    {"gate": {f"stop if {RULE}": [4, "2", None]}, "checkpoints": {}},
    {"gate": {f"stop if {RULE}": [None, 2, None]}, "checkpoints": {}},
    {"gate": {}, "checkpoints": {"two": "checkpoint-2"}},
    {"gate": {}, "checkpoints": ["checkpoint-2"]},
]


@pytest.mark.parametrize("state", DAMAGED)
def test_a_damaged_state_is_refused_in_one_line(state: Any):
    gate = make_gate(RULE, None, ["token_similarity"], ["output"])
    with pytest.raises(ValueError, match=r"^the .* in the checkpoint (is|are) damaged: [^\n]*$"):
        go_on(state, gate, Keeper(links=False))


def test_hugging_face_refuses_a_damaged_state(tmp_path: Path):
    with pytest.raises(Killed):
        hugging_face(tmp_path, 4, dies=7, save_steps=1)
    path = tmp_path / "checkpoint-7" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["stateful_callbacks"]["depthscope"] = {"gate": {f"stop if {RULE}": "4"}, "checkpoints": {}}
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="the state of the gate in the checkpoint is damaged"):
        hugging_face(tmp_path, None, resume=str(path.parent), save_steps=1)


def test_hugging_face_counts_anew_after_steps_without_a_gate(tmp_path: Path):
    """Looks 4 and 6 were bad; from 7 to 11 nobody looked, and the Trainer handed the counts on."""
    with pytest.raises(Killed):
        hugging_face(tmp_path, 4, dies=7, save_steps=1)
    first, second = (str(tmp_path / f"checkpoint-{step}") for step in (7, 11))
    hugging_face(tmp_path, None, resume=first, save_steps=1, watched=False, max_steps=11)
    _, (alarm,) = hugging_face(tmp_path, None, resume=second, save_steps=1, max_steps=20)
    assert (alarm.since, alarm.step, alarm.good) == (12, 16, None)


def test_of_other_rules_a_resumed_hugging_face_counts_anew(tmp_path: Path):
    """Looks 4 and 6 were bad by the old rule; the new one is asked at 8 for the first time."""
    with pytest.raises(Killed):
        hugging_face(tmp_path, 4, dies=7, save_steps=1)
    last = str(tmp_path / "checkpoint-7")
    _, (alarm,) = hugging_face(tmp_path, None, resume=last, save_steps=1, rule="token_similarity>0.98 for 2 after 0")
    assert (alarm.since, alarm.step, alarm.good) == (8, 10, None)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hugging_face_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path, accumulation: int):
    trainer, (alarm,) = hugging_face(tmp_path, 4 * accumulation, gradient_accumulation_steps=accumulation)
    assert (alarm.since, alarm.step, alarm.good) == (4, 8, 2)  # looks: 0, 2 are good, 4, 6, 8 are not
    assert trainer.state.global_step == 9
    assert alarm.checkpoint is None  # the first was saved at 3
    assert "no checkpoint was saved by then" in str(alarm)
    trainer, (alarm,) = hugging_face(tmp_path / "later", 7 * accumulation, gradient_accumulation_steps=accumulation)
    assert (alarm.since, alarm.step, alarm.good) == (8, 12, 6)
    assert alarm.checkpoint == tmp_path / "later" / "good-checkpoint-6"
    assert f"the last good checkpoint is {alarm.checkpoint}" in str(alarm)
    assert {path.name for path in (tmp_path / "later").iterdir()} == {"good-checkpoint-6", "checkpoint-12"}
    assert (alarm.checkpoint / "model.safetensors").stat().st_size > 0


def test_hugging_face_names_its_own_checkpoint_where_all_are_kept(tmp_path: Path):
    _, (alarm,) = hugging_face(tmp_path, 7, save_total_limit=None)
    assert alarm.checkpoint == tmp_path / "checkpoint-6"
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in (3, 6, 9, 12)}


def test_hugging_face_goes_on_where_nothing_collapses(tmp_path: Path):
    trainer, raised = hugging_face(tmp_path, None)
    assert (trainer.state.global_step, raised) == (14, [])
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-14"}


def test_hugging_face_goes_on_while_the_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Collapsing, "slope", -1.0)
    for accumulation in (1, 2):  # the Trainer forgets its sum of losses where it logs
        options = {"gradient_accumulation_steps": accumulation, "logging_steps": 3}
        trainer, raised = hugging_face(tmp_path, 1, **options)
        assert (trainer.state.global_step, raised) == (14, [])


# --- Lightning --------------------------------------------------------------------------------------------


def lightning_fit(
    folder: Path, at: int | None, top: int = 1, steps: int = 14, **resumed: str
) -> tuple[Any, list[Alarm]]:
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
        saver = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=top)
        callback = depthscope.DepthCallback(every=2, stop_if=RULE, on_alarm=raised.append)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", callbacks=[saver, callback], **quiet)
        trainer.fit(Module(), DataLoader(list(X), batch_size=2), **resumed)
    return trainer, raised


def test_lightning_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path):
    trainer, (alarm,) = lightning_fit(tmp_path, 7)
    assert (alarm.since, alarm.step, alarm.good) == (8, 12, 6)
    assert trainer.global_step == 13
    assert alarm.checkpoint == tmp_path / "good-epoch=0-step=6.ckpt"
    assert {path.name for path in tmp_path.iterdir()} == {"good-epoch=0-step=6.ckpt", "epoch=0-step=12.ckpt"}
    assert torch.load(alarm.checkpoint, weights_only=True)["global_step"] == 6


def test_lightning_names_its_own_checkpoint_where_all_are_kept_and_goes_on_where_nothing_collapses(tmp_path: Path):
    _, (alarm,) = lightning_fit(tmp_path / "all", 7, top=-1)
    assert alarm.checkpoint == tmp_path / "all" / "epoch=0-step=6.ckpt"
    trainer, raised = lightning_fit(tmp_path / "well", None)
    assert (trainer.global_step, raised) == (14, [])
    assert len(list((tmp_path / "well").iterdir())) == 1
    _, (alarm,) = lightning_fit(tmp_path / "none", 7, top=0)
    assert "checkpoint" not in str(alarm)


def test_lightning_goes_on_while_the_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Collapsing, "slope", -1.0)
    trainer, raised = lightning_fit(tmp_path, 1)
    assert (trainer.global_step, raised) == (14, [])


def test_lightning_counts_on_from_a_checkpoint(tmp_path: Path):
    lightning_fit(tmp_path, 6, top=-1, steps=9)  # looks 6 and 8 are bad
    _, (alarm,) = lightning_fit(tmp_path, None, top=-1, ckpt_path=str(tmp_path / "epoch=0-step=9.ckpt"))
    assert (alarm.since, alarm.step, alarm.good) == (6, 10, 4)
    assert alarm.checkpoint == tmp_path / "epoch=0-step=3.ckpt"


# --- keeping ----------------------------------------------------------------------------------------------


def test_each_rule_keeps_its_own_last_good_checkpoint(tmp_path: Path):
    """One rule holds from the second look on, the other not yet: two checkpoints are wanted, and no more."""
    keeper = Keeper(links=True)
    for step in range(4):
        (path := tmp_path / f"c{step}").write_text(str(step))
        keeper.look(step, path, [0, step])
        path.unlink()  # as a trainer does that keeps the newest only
    assert {path.name for path in tmp_path.iterdir()} == {"good-c0", "good-c3"}
    assert keeper.find(0) == tmp_path / "good-c0"
    assert keeper.find(None) is keeper.find(2) is None
    keeper.close()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["0"]


def test_a_checkpoint_that_cannot_be_kept_does_not_end_the_training(tmp_path: Path):
    keeper = Keeper(links=True)
    with pytest.warns(UserWarning, match="is not kept"):
        keeper.look(0, tmp_path / "gone", [0])
    assert keeper.find(0) == tmp_path / "gone"
