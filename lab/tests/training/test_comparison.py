"""Comparisons: which runs, with which command; done once, continued, failed, refused, stopped."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest

from depthscope.exit_codes import code_of
from depthscope.locks import OWNER, owned
from depthscope.report import read_metrics
from depthscope_lab.training import Outcome, comparison, vit_digits
from depthscope_lab.training.checkpoint import checkpoints_in
from depthscope_lab.training.comparison import Cell, Launch, Result, cells_of, last_step, run_cells
from depthscope_lab.training.comparison_results import curves, final_values, summarise
from depthscope_lab.training.logs import append_metrics
from processes import ENVIRONMENT

SMALL = {"depth": 1, "width": 8, "heads": 1, "ffn_width": 8, "steps": 3}
OPTIONS = {"log_every": 1, "tracker": "none", "cpu": True}


def small(variant="post", **changes) -> Cell:
    return Cell(vit_digits(variant).changed(**(SMALL | changes)))


def no_process(*_a, **_k):
    raise AssertionError("a process was started")


def test_all_combinations_with_each_variants_own_learning_rate():
    configs = [vit_digits(variant) for variant in ("post", "pre")]
    cells = cells_of(configs, depths=(12, 24), seeds=(0, 1), lr_factors=(1, 3))
    assert len({cell.name for cell in cells}) == 2 * 2 * 2 * 2
    assert {cell.config.lr for cell in cells if cell.config.variant == "post"} == {5e-5, 1.5e-4}
    assert {cell.config.lr for cell in cells if cell.config.variant == "pre"} == {1e-3, 3e-3}
    assert "pre-depth24-lr0.003-warmup0-seed1" in {cell.name for cell in cells}
    (cell,) = cells_of([vit_digits("post").changed(warmup_steps=7)])
    assert (cell.config.depth, cell.config.warmup_steps) == (48, 7)


def test_a_run_is_done_once_and_its_end_is_read(tmp_path: Path, monkeypatch):
    launch = Launch(tmp_path, options=OPTIONS)
    cells = [small(), small(lr=1e30)]
    seen: list[tuple[int, int]] = []
    results = run_cells(cells, launch, lambda done, running: seen.append((done, len(running))))
    assert seen[0] == (0, 1)
    assert seen[-1] == (2, 0)
    good, bad = results
    assert good.failed is None
    assert bad.failed is not None
    assert bad.failed.startswith("the loss is not finite at step")
    assert last_step(cells[0], launch)["step"] == 3

    frame = curves(results, launch)
    whole, broken = final_values(frame).to_dict("records")
    rows = read_metrics(launch.run_folder(cells[0]) / "metrics.jsonl")
    assert whole["loss"] == next(row["loss"] for row in rows if row["step"] == 3 and "loss" in row)
    assert whole["test_loss"] == rows[-1]["test_loss"]
    assert pd.isna(broken["loss"])
    assert pd.isna(broken["test_accuracy"])
    summary = summarise(frame)
    assert [(row["runs"], row["failed"], row["best_lr"]) for row in summary] == [(1, 0, True), (1, 1, False)]
    json.dumps(summary, allow_nan=False)

    monkeypatch.setattr(comparison._SPAWN, "Process", no_process)
    assert run_cells(cells, launch) == results
    with pytest.raises(AssertionError, match="a process was started"):  # other data is another run
        run_cells(cells, Launch(tmp_path, "elsewhere", options=OPTIONS))

    # In this process: the same numbers, the same ends.
    here = Launch(tmp_path / "here", in_process=True, options=OPTIONS)
    seen.clear()
    again = run_cells(cells, here, lambda done, running: seen.append((done, len(running))))
    assert (seen[0], seen[-1]) == ((0, 1), (2, 0))
    pd.testing.assert_frame_equal(curves(again, here), frame)
    assert again[0] == good
    assert again[1].failed is not None
    assert again[1].failed.startswith("the loss is not finite at step")
    monkeypatch.setattr("depthscope_lab.training.loop.train", no_process)
    assert run_cells(cells, here) == again  # what is done is not run again


def test_a_mistake_ends_the_comparison_with_what_the_run_said(tmp_path: Path):
    with pytest.raises(ValueError, match=r"run post-.* ended with code 2: .*brings its data"):
        run_cells([small()], Launch(tmp_path, "folder", options=OPTIONS))
    assert not list(tmp_path.rglob("outcome.json"))


def test_stopped_it_lets_its_runs_save_and_goes_on_from_there(tmp_path: Path):
    launch = Launch(tmp_path, options=OPTIONS | {"checkpoint_every": 1_000_000})
    cell = small(steps=100_000)
    stopper = threading.Event()

    def stop_at_the_first_step(_done: int, _running: object) -> None:
        if last_step(cell, launch) and not stopper.is_set():
            stopper.set()
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run_cells([cell], launch, stop_at_the_first_step)
    assert stopper.is_set()
    assert len(list(launch.run_folder(cell).glob("checkpoints/step-*"))) == 1
    assert not (launch.run_folder(cell) / "outcome.json").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    before = last_step(cell, launch)["step"]
    time.sleep(0.3)
    assert last_step(cell, launch)["step"] == before  # nothing runs on


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_in_this_process_a_run_that_is_stopped_saves_its_work_first(tmp_path: Path, number, code: int):
    launch = Launch(tmp_path, in_process=True, options=OPTIONS | {"checkpoint_every": 1_000_000})
    cell = small(steps=20)

    def stop_at_step_5(_done: int, _running: object) -> None:
        if last_step(cell, launch).get("step") == 5:
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt) as stopped:
        run_cells([cell], launch, stop_at_step_5)
    assert code_of(stopped.value) == code
    assert [path.name for path in launch.run_folder(cell).glob("checkpoints/step-*")] == ["step-00000006"]
    assert not (launch.run_folder(cell) / "outcome.json").exists()
    assert run_cells([cell], launch)[0].failed is None
    assert last_step(cell, launch)["step"] == 20


PARENT = """
import sys
from pathlib import Path
from depthscope_lab.training import vit_digits
from depthscope_lab.training.comparison import Cell, Launch, run_cells
small = {"depth": 1, "width": 8, "heads": 1, "ffn_width": 8, "steps": 100_000}
options = {"log_every": 1, "tracker": "none", "cpu": True, "checkpoint_every": 1_000_000}
if __name__ == "__main__":
    run_cells([Cell(vit_digits("post").changed(**small))], Launch(Path(sys.argv[1]), options=options))
"""


def test_killed_its_runs_save_their_work_and_end_with_it(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], env=ENVIRONMENT)
    launch, cell = Launch(tmp_path), small(steps=100_000)
    folder, patience = launch.run_folder(cell), time.monotonic() + 120
    while not last_step(cell, launch) and time.monotonic() < patience:
        time.sleep(0.05)
    with pytest.raises(ValueError, match=f"in use by process (?!{process.pid} )"), owned(folder):
        pass
    process.kill()
    process.wait()
    while (folder / OWNER).exists() and time.monotonic() < patience:
        time.sleep(0.05)
    with owned(folder):
        assert len(checkpoints_in(folder / "checkpoints")) == 1


def ended_at_once(_task, config, run, *, display):
    """In place of a training: one that has logged one number, and is over."""
    assert not run.checkpoints.exists()  # it would go on from there, and end without its numbers
    run.checkpoints.mkdir(parents=True)
    append_metrics(run.metrics, 1, {"loss": 2.0})
    return Outcome(1, 1, {}, None)


def test_of_a_finished_run_damaged_numbers_are_refused_and_a_damaged_note_is_written_anew(tmp_path: Path, monkeypatch):
    launch = Launch(tmp_path, in_process=True)
    monkeypatch.setattr("depthscope_lab.training.loop.train", ended_at_once)
    results = run_cells([small()], launch)
    metrics = launch.run_folder(small()) / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole.replace("2.0", "3.0"))
    with pytest.raises(ValueError, match=r"metrics.jsonl is not what the run wrote: remove .*, and it is run again"):
        run_cells([small()], launch)
    metrics.write_text(whole)
    monkeypatch.setattr("depthscope_lab.training.loop.train", no_process)
    assert run_cells([small()], launch) == results
    (metrics.parent / "outcome.json").write_text("[]")
    with pytest.raises(AssertionError, match="a process was started"):
        run_cells([small()], launch)


def test_more_runs_than_anybody_waits_for_are_refused_at_once():
    with pytest.raises(ValueError, match="at most 10000 runs, got 10000000000 seeds × 4 others = 40000000000"):
        cells_of([vit_digits("post")] * 2, seeds=range(10**10), lr_factors=(1, 2))


def test_the_table_has_what_the_task_reported_and_nothing_that_only_follows_from_it(tmp_path: Path):
    cell, launch = small(), Launch(tmp_path)
    launch.run_folder(cell).mkdir(parents=True)
    rows = [
        {"loss": 2.0, "lr": 0.1, "images_per_second": 9.0, "epoch": 1.0},
        {"bleu": 5.0, "valid_perplexity": 1.0, "valid_loss": None, "test_loss": 4.0},
        {"token_similarity": 0.5, "depth/t_sim_last": 0.5},
    ]
    for row in rows:
        append_metrics(launch.run_folder(cell) / "metrics.jsonl", 1, {k: v or float("nan") for k, v in row.items()})
    frame = curves([Result(cell, None)], launch)
    quantities = ["loss", "test_loss", "valid_loss", "bleu", "token_similarity"]
    assert list(frame["quantity"]) == quantities
    assert frame["value"].tolist() == pytest.approx([2.0, 4.0, float("nan"), 5.0, 0.5], nan_ok=True)
    assert list(final_values(frame).columns[-4:]) == quantities[:4]


def test_means_and_spread_are_over_seeds_and_the_training_loss_chooses_the_rate():
    frame = pd.DataFrame(
        [
            ("post", 1, lr, 0, seed, step, name, value)
            for lr, offset in ((0.1, 0.0), (0.2, -0.5))
            for seed in (0, 1)
            for step, late in ((10, 5.0), (95, 1.0), (100, 3.0))
            for name, value in (("loss", late + offset + seed), ("test_loss", late - offset), ("test_accuracy", 0.5))
        ],
        columns=["variant", "depth", "lr", "warmup_steps", "seed", "step", "quantity", "value"],
    )
    first, second = summarise(frame)
    assert first["loss"] == pytest.approx(2.5)  # the mean of 1 and 3, of 2 and 4
    assert first["loss_std"] == pytest.approx(0.5**0.5)
    assert first["test_loss"] == 3.0
    assert second["test_loss"] == 3.5
    assert (first["best_lr"], second["best_lr"]) == (False, True)
