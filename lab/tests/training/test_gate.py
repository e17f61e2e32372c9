"""The gate of our own loop: where it stops, what it keeps, how it goes on; and in a comparison."""

from pathlib import Path
from typing import Any

import pytest

from collapsing import CollapsingTask
from depthscope.report import read_metrics
from depthscope_lab.training import Outcome
from depthscope_lab.training.checkpoint import checkpoints_in, newest_until
from depthscope_lab.training.comparison import Cell, Launch, Result, keep_result, read_result
from depthscope_lab.training.comparison_results import curves, summarise
from tiny_training import Recorder, assert_bitwise_equal, run_in, saved, tiny_config

RULE = "token_similarity>0.99 in half of the blocks for 3 after 0"


def run(folder: Path, at: int, *, display: Recorder | None = None, until: int | None = None, **options: Any) -> Outcome:
    task = CollapsingTask(at, until)
    settings = {"stop_if": (RULE,), "watch_every": 2, "checkpoint_every": 3, "keep": 1}
    return run_in(folder, task.config, task=task, display=display, **settings | options)[0]


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_in(folder / "checkpoints")]


def test_a_planted_collapse_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path):
    said = Recorder()
    outcome = run(tmp_path, 7, display=said)  # looks: …, 4, 6 are good; 8, 10, 12 are not
    assert (outcome.step, outcome.total_steps, outcome.complete, outcome.signal) == (13, 20, False, None)
    good = tmp_path / "checkpoints" / "step-00000006"
    for part in (RULE, "since step 8", "; step 12: ", "at block 2", f"the last good checkpoint is {good}"):
        assert part in (outcome.stopped or "")
    assert names(tmp_path) == [good.name, "step-00000013"]  # keep=1, and the good one
    assert said.messages == [f"stopping: {outcome.stopped}"]
    assert (tmp_path / "depth.png").exists()


def test_a_run_that_does_not_collapse_or_comes_back_goes_on_and_keeps_no_more(tmp_path: Path):
    for name, times in {"well": (99, None), "back": (7, 11)}.items():  # it holds at 8 and 10
        outcome = run(tmp_path / name, times[0], until=times[1])
        assert (outcome.complete, outcome.stopped) == (True, None)
        assert len(names(tmp_path / name)) == 2  # the newest, and the last good one beside it


def test_a_run_goes_on_while_its_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CollapsingTask, "slope", -1.0)
    outcome = run(tmp_path, 1)
    assert (outcome.complete, outcome.stopped) == (True, None)


def test_a_warning_is_said_and_the_run_goes_on(tmp_path: Path):
    said = Recorder()
    outcome = run(tmp_path, 7, display=said, stop_if=(), warn_if=(RULE,))
    assert (outcome.complete, outcome.stopped) == (True, None)
    (message,) = said.messages
    assert message.startswith(f"warning: {RULE} holds since step 8")


def test_a_rule_from_the_first_look_on_has_no_good_checkpoint(tmp_path: Path):
    outcome = run(tmp_path, 0)
    assert outcome.step == 5
    assert "it held from the first look on; the loss has not fallen: " in (outcome.stopped or "")
    assert (outcome.stopped or "").endswith("; no checkpoint was saved by then")


class Crash(Exception):
    pass


@pytest.mark.parametrize("crash", [10, 11])
def test_a_count_goes_on_after_a_crash(tmp_path: Path, crash: int):
    """Bit by bit: the same stop, the same sentence, the same state as of a run that was never broken off."""

    def end(step: int) -> None:
        if step == crash:
            raise Crash

    with pytest.raises(Crash):
        run(tmp_path / "parts", 7, display=Recorder(end), checkpoint_every=1)
    outcome = run(tmp_path / "parts", 7, checkpoint_every=1, resume=True)
    whole = run(tmp_path / "whole", 7, checkpoint_every=1)
    assert outcome.step == whole.step == 13
    assert (outcome.stopped or "").replace("parts", "whole") == whole.stopped
    assert names(tmp_path / "parts") == names(tmp_path / "whole") == ["step-00000006", "step-00000013"]
    assert_bitwise_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


def test_stopped_and_continued_it_stops_again_unless_the_rule_goes(tmp_path: Path):
    run(tmp_path, 7)
    again = run(tmp_path, 7, resume=True)
    assert again.step == 15  # the next look
    assert "since step 8" in (again.stopped or "")
    assert names(tmp_path) == ["step-00000006", "step-00000015"]
    assert run(tmp_path, 7, resume=True, stop_if=()).complete


def test_a_gate_at_the_last_step_is_closed_too(tmp_path: Path):
    outcome = run(tmp_path, 15, watch_every=1, stop_if=("token_similarity>0.99 for 5 after 0",))
    assert outcome.complete
    assert "; step 19: " in (outcome.stopped or "")


def test_half_precision_and_accumulation(tmp_path: Path):
    task = CollapsingTask(7)
    config = task.config.changed(precision="bfloat16", accumulate=2)
    task.config = config
    options = {"stop_if": (RULE,), "watch_every": 2, "evaluate_every": 1}
    outcome, _ = run_in(tmp_path, config, task=task, **options)
    assert (outcome.step, "since step 8" in (outcome.stopped or "")) == (13, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_if": ("token_similarity",)}, "^expected --stop-if"),
        ({"warn_if": ("nothing>1",)}, r"^warn_if 'nothing>1' asks for 'nothing', which is not measured: take one of"),
        ({"stop_if": ("delta>1",)}, "asks for 'delta', which is not measured"),
        ({"stop_if": (RULE,), "watch_every": None}, "watch_every=none watches none"),
        ({"stop_if": ("branch_ratio>1",)}, "say at which branch"),
    ],
)
def test_a_rule_that_cannot_be_decided_is_refused_before_the_start(tmp_path: Path, options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        run_in(tmp_path / "run", tiny_config(), **options)
    assert not (tmp_path / "run").exists()


def test_what_a_rule_asks_for_is_watched_too(tmp_path: Path):
    rule = "effective_rank<1.5 in half of the blocks at ffn_input after 0"
    outcome = run(tmp_path, 7, stop_if=(rule,))
    assert (outcome.stopped or "").startswith(
        f"{rule} holds since step 8; step 8: 1 at block 2, 1 of 2 blocks below 1.5"
    )


def test_a_handful_of_scalars(tmp_path: Path):
    """Trackers get the last block and the largest, at two stations, whatever the depth."""
    run_in(tmp_path, tiny_config(depth=12, steps=1))
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "token_similarity" in row]
    assert [len([name for name in row if name.startswith("depth/")]) for row in rows] == [10]


def test_newest_until(tmp_path: Path):
    for step in (3, 6, 9):
        (tmp_path / f"step-{step:08d}").mkdir()
    found = [newest_until(tmp_path, step) for step in (None, 2, 3, 8, 99)]
    assert [path and path.name[-1] for path in found] == [None, None, "3", "6", "9"]


# --- comparisons ------------------------------------------------------------------------------------------


def test_a_comparison_marks_a_stopped_run_and_loses_nothing(tmp_path: Path):
    launch = Launch(tmp_path, options={"stop_if": (RULE, "token_similarity>1 at block 2")})
    cells = [Cell(tiny_config(seed=seed)) for seed in (0, 1)]
    for cell in cells:
        folder = launch.run_folder(cell)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "lr": 1}\n', encoding="utf-8")
    results = [Result(cells[0], None, "stopped at step 13 of 20: since step 8"), Result(cells[1], None)]
    for result in results:
        keep_result(result, launch)
    assert [read_result(cell, launch) for cell in cells] == results
    other = Launch(tmp_path, options={"stop_if": (RULE,)})
    assert [read_result(cell, other) for cell in cells] == [None, results[1]]  # under other rules it goes on
    frame = curves(results, launch)
    assert frame["quantity"].tolist() == ["stopped", "loss", "loss"]
    (row,) = summarise(frame)
    assert (row["failed"], row["stopped"], row["runs"], row["loss"]) == (0, 1, 2, 2.0)


def test_rules_are_settings_and_options(tmp_path: Path):
    from depthscope_lab.cli.settings import separated

    _, of_run = separated("vit-digits", ["stop_if=token_similarity>1"], False, [RULE])
    assert of_run["stop_if"] == ("token_similarity>1", RULE)
