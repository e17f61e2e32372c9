"""The loop in one process: continued bit by bit, stopped, refused, explained."""

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from depthscope.locks import OWNER, Held, lock, owned
from depthscope.report import read_metrics
from depthscope_lab.training import NonFiniteLoss, Share
from depthscope_lab.training.checkpoint import CheckpointNotWritten, checkpoints_in
from tiny_training import (
    MemoryTask,
    Recorder,
    assert_bitwise_equal,
    run_in,
    saved,
    tiny_config,
    tiny_task,
)


class Crash(Exception):
    pass


def crash_at(step: int) -> Recorder:
    """Ends a run as abruptly as an exception can, before anything is saved."""

    def end(now: int) -> None:
        if now == step:
            raise Crash

    return Recorder(end)


@pytest.mark.parametrize("task", [tiny_task, MemoryTask])
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "clip_norm": 0.1, "warmup_steps": 15, "schedule": "cosine"}])
def test_a_run_is_continued_bit_by_bit(tmp_path: Path, task, changes):
    config = tiny_config(**changes)
    _, losses = run_in(tmp_path / "whole", config, task=task(config))
    display = crash_at(13)
    with pytest.raises(Crash):
        run_in(tmp_path / "parts", config, task=task(config), display=display, checkpoint_every=10)
    assert [path.name for path in checkpoints_in(tmp_path / "parts" / "checkpoints")] == ["step-00000010"]
    outcome, rest = run_in(tmp_path / "parts", config, task=task(config), resume=True)
    assert outcome.step == 20
    assert display.losses[:10] + rest == losses
    assert_bitwise_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    curves = [
        [(row["step"], row.get("loss"), row.get("test_loss")) for row in read_metrics(folder / "metrics.jsonl")]
        for folder in (tmp_path / "parts", tmp_path / "whole")
    ]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("remedy", ["mv-split", "reparameterise(interval=smooth)"])
def test_what_a_remedy_has_learned_is_continued_too(tmp_path: Path, remedy: str):
    config = tiny_config(variant=f"post+{remedy}", steps=8)
    _, losses = run_in(tmp_path / "whole", config)
    display = crash_at(6)
    with pytest.raises(Crash):
        run_in(tmp_path / "parts", config, display=display, checkpoint_every=4)
    _, rest = run_in(tmp_path / "parts", config, resume=True)
    assert display.losses[:4] + rest == losses
    assert_bitwise_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


def test_the_memory_matters_and_is_saved(tmp_path: Path):
    config = tiny_config(steps=4)
    run_in(tmp_path, config, task=MemoryTask(config))
    assert {name: tuple(tensor.shape) for name, tensor in saved(tmp_path)["carry"].items()} == {"0.memory": (8, 1, 16)}

    class Forgetful(MemoryTask):
        def loss(self, model, batch, carry):
            return super().loss(model, batch, None)

    _, losses = run_in(tmp_path / "with", config, task=MemoryTask(config))
    _, without = run_in(tmp_path / "without", config, task=Forgetful(config))
    assert losses[0] == without[0]
    assert losses[1:] != without[1:]


def test_the_mean_loss_between_logs_survives(tmp_path: Path):
    config = tiny_config()
    run_in(tmp_path / "whole", config, log_every=8)
    with pytest.raises(Crash):
        run_in(tmp_path / "parts", config, log_every=8, display=crash_at(16), checkpoint_every=11)
    run_in(tmp_path / "parts", config, log_every=8, resume=True)
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [row.get("loss") for row in whole] == [row.get("loss") for row in parts]


def test_losses_do_not_depend_on_how_a_batch_is_computed(tmp_path: Path):
    config = tiny_config(precision="float64")
    _, losses = run_in(tmp_path / "plain", config)
    for name, changes in {"a": {"accumulate": 4}, "b": {"checkpoint_activations": True}}.items():
        _, others = run_in(tmp_path / name, config.changed(**changes))
        assert others == pytest.approx(losses, rel=1e-10)  # 20 steps of float64, sums in another order
    _, different = run_in(tmp_path / "seed", config.changed(seed=1))
    assert different != pytest.approx(losses, rel=1e-3)


def test_a_step_is_adamws_with_the_gradient_clipped(tmp_path: Path):
    """Against a loop written out by hand, with settings of which none is torch's default.

    Torch's AdamW in its fused form: gradients that are 0 but for rounding grow into other numbers in another form.
    """
    config = tiny_config(
        precision="float64", steps=3, lr=0.01, beta1=0.5, beta2=0.7, weight_decay=0.3, clip_norm=0.05, warmup_steps=2
    )
    run_in(tmp_path, config)
    task = tiny_task(config)
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.5, 0.7), weight_decay=0.3, fused=True)
    for step, lr in enumerate((0.005, 0.01, 0.01)):
        loss, _ = task.loss(model, task.batch(step, Share(0, 1), torch.device("cpu")), None)
        optimizer.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.5
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    found = saved(tmp_path)["model"]
    assert found.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-14)


def test_training_learns_and_leaves_the_global_random_state_alone(tmp_path: Path):
    before = torch.random.get_rng_state()
    _, losses = run_in(tmp_path, tiny_config(lr=3e-3, epochs=20), checkpoint_every=100, evaluate_every=100)
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_mixed_precision_trains_close_to_single(tmp_path: Path):
    _, single = run_in(tmp_path / "single", tiny_config(steps=4))
    _, mixed = run_in(tmp_path / "mixed", tiny_config(steps=4, precision="bfloat16"))
    assert mixed != single
    assert mixed == pytest.approx(single, rel=0.02)  # bfloat16 has 8 bits: 0.4 % per operation
    assert {tensor.dtype for tensor in saved(tmp_path / "mixed")["model"].values()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, on import of the compiler
def test_compiled_it_trains_the_same(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("depthscope_lab.training.engine.COMPILER", "aot_eager")  # all of it but the code generation
    compiled = []
    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: compiled.append(options) or original(model, **options)
    )
    config = tiny_config(precision="float64", steps=6)
    _, losses = run_in(tmp_path / "plain", config)
    assert compiled == []
    _, others = run_in(tmp_path / "compiled", config.changed(compile=True))
    assert [options["backend"] for options in compiled] == ["aot_eager"]
    assert others == pytest.approx(losses, rel=1e-10)  # float64, other forms of the same operations
    assert saved(tmp_path / "compiled")["model"].keys() == saved(tmp_path / "plain")["model"].keys()
    torch._dynamo.reset()


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_obeyed_after_saving(tmp_path: Path, which: signal.Signals):
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    config = tiny_config()
    display = Recorder(lambda step: signal.raise_signal(which) if step == 6 else None)
    outcome, losses = run_in(tmp_path / "parts", config, display=display)
    assert (outcome.signal, outcome.complete) == (which, False)
    assert outcome.checkpoint is not None
    assert outcome.checkpoint.name == f"step-{outcome.step:08d}"
    assert outcome.step == len(losses) == 7  # the step that was under way is finished
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    run_in(tmp_path / "parts", config, resume=True)
    run_in(tmp_path / "whole", config)
    assert_bitwise_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


def test_a_second_signal_does_not_wait(tmp_path: Path):
    def twice(_step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path, tiny_config(), display=Recorder(twice))


def test_an_ignored_signal_stays_ignored(tmp_path: Path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome, _ = run_in(tmp_path, tiny_config(), display=Recorder(lambda _step: signal.raise_signal(signal.SIGINT)))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.complete


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path):
    run_in(tmp_path, tiny_config(steps=2))
    with pytest.raises(ValueError, match="has a run up to step-00000002: --resume continues it"):
        run_in(tmp_path, tiny_config(steps=2))


def test_a_folder_has_one_run_at_a_time(tmp_path: Path):
    def held(_step: int) -> None:
        with pytest.raises(Held):
            lock(tmp_path / OWNER)

    run_in(tmp_path, tiny_config(steps=1), display=Recorder(held))
    told = pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on .* since .*choose another --out")
    with owned(tmp_path), told:
        run_in(tmp_path, tiny_config(steps=1), resume=True)


def test_what_a_run_without_a_checkpoint_has_left_does_not_survive(tmp_path: Path):
    with pytest.raises(Crash):
        run_in(tmp_path, tiny_config(seed=1), display=crash_at(3), watch_every=1, checkpoint_every=100)
    (tmp_path / "depth.png").touch()
    for name in ("metrics.jsonl", "depth.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 19, "torn')
    run_in(tmp_path, tiny_config(steps=2), watch_every=None)
    assert {row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")} == {1, 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "config.json", "metrics.jsonl"]


def test_no_row_is_there_twice_after_a_crash_and_damaged_ones_are_told_of(tmp_path: Path):
    config = tiny_config()
    run_in(tmp_path / "whole", config, watch_every=1)
    with pytest.raises(Crash):
        run_in(tmp_path / "parts", config, display=crash_at(13), watch_every=1, checkpoint_every=5)
    run_in(tmp_path / "parts", config, watch_every=1, checkpoint_every=5, resume=True)
    for name in ("metrics.jsonl", "depth.jsonl"):
        whole, parts = (
            [(row["step"], *row.keys()) for row in map(json.loads, (tmp_path / folder / name).read_text().splitlines())]
            for folder in ("whole", "parts")
        )
        assert whole == parts
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "parts" / "metrics.jsonl").write_text("\n".join([lines[0], "damaged", *lines[2:]]) + "\n")
    display = Recorder()
    run_in(tmp_path / "parts", config, resume=True, display=display)
    assert any("1 lines of" in message and "could not be read" in message for message in display.messages)


def test_a_picture_that_a_killed_run_did_not_come_to_draw_is_drawn(tmp_path: Path):
    config = tiny_config(steps=4)
    run_in(tmp_path, config, watch_every=1)
    (tmp_path / "depth.png").unlink()
    run_in(tmp_path, config, watch_every=1, resume=True)
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")


def test_another_version_is_said_when_a_run_is_continued(tmp_path: Path, monkeypatch):
    config = tiny_config(steps=2)
    run_in(tmp_path, config)
    assert json.loads((tmp_path / "config.json").read_text())["versions"]["torch"] == torch.__version__
    display = Recorder()
    run_in(tmp_path, config, resume=True, display=display)
    assert not any("other versions" in message for message in display.messages)
    monkeypatch.setattr("depthscope_lab.training.session.__version__", "9.9")
    run_in(tmp_path, config, resume=True, display=display)
    assert any(
        re.search(r"other versions, .* may differ: depthscope: \S+ → 9.9$", message) for message in display.messages
    )


def test_a_disk_that_fills_up_between_checkpoints_says_the_file_and_the_last_good_checkpoint(tmp_path: Path):
    def fill(step: int) -> None:
        if step == 5:
            (tmp_path / "metrics.jsonl").unlink()
            (tmp_path / "metrics.jsonl").symlink_to("/dev/full")

    told = r"step 6 cannot be kept: could not write \S+metrics.jsonl: No space left.*; the last good .*-00000004$"
    with pytest.raises(OSError, match=told):
        run_in(tmp_path, tiny_config(), display=Recorder(fill))


def test_a_checkpoint_of_another_model_is_one_line(tmp_path: Path):
    config = tiny_config(steps=2)
    run_in(tmp_path, config)

    class Wider(type(tiny_task(config))):
        def build(self):
            model = super().build()
            model.head = torch.nn.Linear(16, 11)
            return model

    with pytest.raises(ValueError, match=r"step-00000002' is not of the model that is built now: .*head.weight"):
        run_in(tmp_path, config, task=Wider(config, tiny_task(config).data), resume=True)


def test_a_complete_run_is_not_run_again(tmp_path: Path):
    first, _ = run_in(tmp_path, tiny_config(steps=2))
    again, losses = run_in(tmp_path, tiny_config(steps=2), resume=True)
    assert losses == []
    assert again == first
    assert again.complete


def test_resume_without_a_checkpoint_starts_and_says_so(tmp_path: Path):
    display = Recorder()
    outcome, _ = run_in(tmp_path, tiny_config(steps=2), resume=True, display=display)
    assert outcome.complete
    assert any("starting at step 0" in message for message in display.messages)


def test_a_changed_configuration_is_refused_with_the_difference(tmp_path: Path):
    run_in(tmp_path, tiny_config(steps=2))
    with pytest.raises(ValueError, match=r"changed since: lr: 0.001 → 0.002; steps: 2 → 4$"):
        run_in(tmp_path, tiny_config(steps=4, lr=2e-3), resume=True)
    config = tiny_config(steps=2)
    other = tiny_task(config)
    other.data.train_labels[0] = (other.data.train_labels[0] + 1) % 10
    with pytest.raises(ValueError, match="changed since: fingerprint: "):
        run_in(tmp_path, config, task=other, resume=True)


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_is_used(tmp_path: Path):
    config = tiny_config()
    run_in(tmp_path / "whole", config)
    with pytest.raises(Crash):
        run_in(tmp_path / "parts", config, display=crash_at(13), checkpoint_every=6)
    newest = checkpoints_in(tmp_path / "parts" / "checkpoints")[-1]
    assert newest.name == "step-00000012"
    (newest / "model.safetensors").write_bytes(b"")
    display = Recorder()
    run_in(tmp_path / "parts", config, display=display, resume=True, checkpoint_every=6)
    assert "step-00000012" in display.messages[0]
    assert "continuing at step 6 of 20" in display.messages[1]
    assert_bitwise_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_says_what_is_left(tmp_path: Path):
    def close_the_folder(step: int) -> None:
        if step == 5:  # the first checkpoint is there; its folder becomes one that nothing can be written to
            (tmp_path / "run" / "checkpoints").rename(tmp_path / "kept")
            (tmp_path / "run" / "checkpoints").symlink_to("/dev/null")

    with pytest.raises(CheckpointNotWritten, match=r"checkpoint of step 8: .*; the last good \S+ is \S+04$"):
        run_in(tmp_path / "run", tiny_config(), display=Recorder(close_the_folder))
    (tmp_path / "run" / "checkpoints").unlink()
    (tmp_path / "kept").rename(tmp_path / "run" / "checkpoints")
    outcome, losses = run_in(tmp_path / "run", tiny_config(), resume=True)
    assert (outcome.step, len(losses)) == (20, 16)


class Overflowing(type(tiny_task(tiny_config()))):
    """From the fifth step on, block 2 multiplies by infinity."""

    def build(self):
        model = super().build()
        self.blow_up = False
        model.encoder.blocks[1].register_forward_hook(
            lambda _module, _inputs, output: output * float("inf") if self.blow_up else None
        )
        return model

    def batch(self, step, share, device):
        self.blow_up = step >= 4
        return super().batch(step, share, device)


def test_a_nonfinite_loss_names_step_block_and_checkpoint(tmp_path: Path):
    config = tiny_config(depth=3)
    task = Overflowing(config, tiny_task(config).data)
    with pytest.raises(NonFiniteLoss, match=r"at step 5: first in block 2; .* is \S+step-00000004;"):
        run_in(tmp_path, config, task=task)
    weights = saved(tmp_path)["model"]
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_nonfinite_input_weight_or_head_is_told_apart(tmp_path: Path):
    def broken(name: str):
        class Broken(type(tiny_task(tiny_config()))):
            def build(self):
                model = super().build()
                with torch.no_grad():
                    model.get_parameter(name).view(-1)[0] = torch.nan
                return model

        return Broken(tiny_config(), tiny_task(tiny_config()).data)

    for name, where in (
        ("positions", "in what enters block 1"),
        ("encoder.blocks.0.ffn.0.weight", "first in block 1"),
        ("head.weight", "all blocks are finite, what follows is not"),
    ):
        with pytest.raises(NonFiniteLoss, match=f"at step 1: .*{where}.*weight {name} is not.*no checkpoint"):
            run_in(tmp_path / name, tiny_config(), task=broken(name))


class Exploding(type(tiny_task(tiny_config()))):
    """The fourth update gives a weight, or the optimizer's memory of one, that no float32 can hold."""

    what = "weight"

    def build(self):
        model = super().build()
        self.model = model
        return model

    def batch(self, step, share, device):
        for number, parameter in enumerate(self.model.parameters()):
            if step == 3 and number == 2 and self.what == "moment":
                parameter.register_hook(lambda gradient: torch.full_like(gradient, 1e30))
        return super().batch(step, share, device)

    def evaluate(self, model, share, device):
        if self.what == "weight":
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = torch.inf
        found = super().evaluate(model, share, device)
        return found | {"test_loss": math.nan} if self.what == "test loss" else found


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("weight", r"the weight \S+ is not finite at step 4: .*no checkpoint was written"),
        ("moment", r"the optimizer's 2.exp_avg_sq is not finite at step 4: .*no checkpoint was written"),
        ("test loss", r"the test loss is not finite at step 4, the last one; the last good checkpoint is \S+04:"),
    ],
)
def test_a_run_that_ends_with_what_is_not_finite_does_not_end_well(tmp_path: Path, what: str, told: str):
    config = tiny_config(steps=4)
    task = Exploding(config, tiny_task(config).data)
    task.what = what
    with pytest.raises(NonFiniteLoss, match=told):
        run_in(tmp_path, config, task=task, watch_every=1)
    assert len(checkpoints_in(tmp_path / "checkpoints")) == (what == "test loss")
    assert (tmp_path / "depth.png").exists()  # worth seeing now
    if what == "test loss":
        with pytest.raises(NonFiniteLoss, match=told):  # nor is it well when it is looked at again
            run_in(tmp_path, config, task=task, resume=True)


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="1 processes × 3 accumulated parts divide, got 8"):
        run_in(tmp_path, tiny_config(accumulate=3))


def test_what_a_run_leaves_behind(tmp_path: Path):
    config = tiny_config(variant="post")
    run_in(tmp_path, config, tracker="tensorboard", log_every=5, watch_every=8)
    assert json.loads((tmp_path / "config.json").read_text())["config"] == config.as_json()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == [5, 10, 15, 20]
    assert [row["step"] for row in rows if "test_accuracy" in row] == [4, 8, 12, 16, 20]
    assert logged[-1]["epoch"] == 5
    assert all(row["images_per_second"] > 0 for row in logged)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "depthscope"))
    events.Reload()
    assert [event.step for event in events.Scalars("depth/t_sim_last")] == [0, 8, 16]
    assert [event.step for event in events.Scalars("loss")] == [5, 10, 15, 20]
    assert events.Tags()["images"] == ["depth/heat_map"]
    assert [image.step for image in events.Images("depth/heat_map")] == [20]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in logged])


def test_a_tracker_that_fails_to_take_the_picture_does_not_end_a_run(tmp_path: Path, monkeypatch):
    def fails(_figure: object, _step: int) -> None:
        raise RuntimeError("no connection")

    display = Recorder()
    monkeypatch.setattr("depthscope_lab.training.observation.sender", lambda _tracker: fails)
    run_in(tmp_path, tiny_config(variant="post", epochs=1), tracker="tensorboard", watch_every=2, display=display)
    assert "the picture of the depth was not logged: RuntimeError: no connection" in display.messages
    assert (tmp_path / "depth.png").exists()


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="the tracker wandb needs its package: pip install wandb"):
        run_in(tmp_path, tiny_config(), tracker="wandb")


def test_depth_is_watched_by_default_behind_the_ffn_and_behind_the_remedy(tmp_path: Path):
    from depthscope.watching import load_records

    display = Recorder()
    outcome, _ = run_in(tmp_path, tiny_config(steps=5), watch_every=2, display=display)
    assert outcome.complete
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "token_similarity" in row]
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert all(0.01 < row["token_similarity"] < 1 for row in rows)
    assert all(row["depth/t_sim_last"] == pytest.approx(0, abs=1e-9) for row in rows)  # the remedy's whole point
    records = load_records(tmp_path / "depth.jsonl")
    behind = records[(records["station"] == "after_ffn") & (records["measure"] == "token_similarity")]
    last = behind[behind["block"] == 2]
    assert last["value"].tolist() == [row["token_similarity"] for row in rows]
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")


def test_watching_changes_no_bit_of_a_run(tmp_path: Path):
    for name, every in (("watched", 1), ("alone", None)):
        run_in(tmp_path / name, tiny_config(steps=4, accumulate=2), watch_every=every)
    assert_bitwise_equal(saved(tmp_path / "watched"), saved(tmp_path / "alone"))
    assert not (tmp_path / "alone" / "depth.jsonl").exists()
    assert not any("token_similarity" in row for row in read_metrics(tmp_path / "alone" / "metrics.jsonl"))


def test_evaluation_is_without_dropout_and_training_goes_on_with_it(tmp_path: Path):
    config = tiny_config(steps=8)
    modes: list[tuple[str, bool]] = []

    class Listening(type(tiny_task(config))):
        def loss(self, model, batch, carry):
            modes.append(("trains", model.training))
            return super().loss(model, batch, carry)

        def evaluate(self, model, share, device):
            modes.append(("evaluates", model.training))
            return super().evaluate(model, share, device)

    run_in(tmp_path, config, task=Listening(config, tiny_task(config).data), watch_every=None)
    epoch = [("trains", True)] * 4 + [("evaluates", False)]
    assert modes == epoch * 2
