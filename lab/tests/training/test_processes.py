"""Runs in processes of their own: killed without warning, told to stop, two at a time."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from depthscope.report import read_metrics
from depthscope_lab.training import Run, make_task, train, vit_digits
from depthscope_lab.training.checkpoint import checkpoints_in
from processes import ENVIRONMENT, TORCHRUN
from tiny_training import assert_bitwise_equal, run_in, saved, tiny_config

HERE = Path(__file__).parent


def test_killed_at_once_and_continued_the_weights_are_the_same(tmp_path: Path):
    code = (
        "import os, signal, sys, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "from tiny_training import Recorder, run_in, tiny_config\n"
        "kill = lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 13 else None\n"
        "run_in(Path(sys.argv[1]), tiny_config(), display=Recorder(kill), checkpoint_every=10)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "parts")], env=ENVIRONMENT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in checkpoints_in(tmp_path / "parts" / "checkpoints")] == ["step-00000010"]
    assert read_metrics(tmp_path / "parts" / "metrics.jsonl")[-1]["step"] == 13
    run_in(tmp_path / "parts", tiny_config(), resume=True)
    run_in(tmp_path / "whole", tiny_config())
    assert_bitwise_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


def test_killed_at_random_moments_a_run_ends_as_one_that_was_never_killed(tmp_path: Path):
    command = [sys.executable, str(HERE / "killed_at_random.py"), "0", str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    for name in ("metrics.jsonl", "depth.jsonl"):
        rows = [
            [(row["step"], *row) for row in map(json.loads, (tmp_path / folder / name).read_text().splitlines())]
            for folder in ("parts", "whole")
        ]
        assert rows[0] == rows[1]
    assert (tmp_path / "parts" / "depth.png").exists()
    assert not list((tmp_path / "parts").rglob(".*"))  # no lock, nothing unfinished


def test_told_to_stop_the_program_saves_and_ends_with_the_usual_code(tmp_path: Path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "depthscope", "train", "vit-digits", "--depth", "2", "--epochs", "100000"]
    process = subprocess.Popen(
        [*command, "--out", str(out), "--set", "log_every=1", "--set", "tracker=none", "--cpu"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not read_metrics(out / "metrics.jsonl"):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    (path,) = checkpoints_in(out / "checkpoints")[-1:]
    assert str(path) in errors.splitlines()[-1]
    assert "--resume" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_two_processes_give_the_losses_of_one(tmp_path: Path):
    settings = {"depth": 2, "steps": 8, "accumulate": 2, "precision": "float64"}
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [*TORCHRUN, "-m", "depthscope", "train", "vit-digits", *options, "--out", str(tmp_path / "two")]
    result = subprocess.run(
        [*command, "--set", "log_every=1", "--set", "tracker=none", "--cpu"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    config = vit_digits("deescalated").changed(**settings)
    train(make_task(config), config, Run(tmp_path / "one", log_every=1, tracker="none", cpu=True))
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("loss", "test_loss", "test_accuracy"):
        found = [[row[name] for row in rows if name in row] for rows in (one, two)]
        assert len(found[0]) == (8 if name == "loss" else 1)
        assert found[1] == pytest.approx(found[0], rel=1e-10)  # float64 sums in another order, 8 steps
    record = json.loads((tmp_path / "two" / "checkpoints" / "step-00000008" / "state.json").read_text())
    assert record["processes"] == 2


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes of `two_processes.py` print."""
    folder = tmp_path_factory.mktemp("two")
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "two_processes.py"), "8", str(rank), str(folder / "meeting")],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(text) for text in printed]


def test_a_gate_stops_all_processes_at_the_same_step(two: list[dict[str, Any]]):
    assert [one["own"] for one in two] == [[4, False], [4, True]]
    assert [one["ours"][0] for one in two] == [6, 6]
    assert "since step 3; step 5: " in two[0]["ours"][1]
    assert two[1]["ours"][1] == "a rule in the first process holds"


def test_sharded_over_two_processes_the_losses_are_the_same(tmp_path: Path, two: list[dict[str, Any]]):
    found = two[0]
    _, losses = run_in(tmp_path / "one", tiny_config(precision="float64", steps=8))
    assert found["losses"] == pytest.approx(losses, rel=1e-10)  # float64 sums in another order, 8 steps
    assert found["local"] < 0.6 * found["all"]
