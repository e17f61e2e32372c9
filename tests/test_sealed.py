"""What is saved says its kind and its sums: what differs from what was written is refused and named."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from depthscope.files import write_folder
from depthscope.sealed import (
    append_sealed,
    read_record,
    read_tables,
    record_writer,
    require_whole_log,
    with_record,
    write_tables,
)

LINES = [json.dumps({"step": step, "loss": 1 / (step + 1)}) for step in range(6)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for line in LINES:
        append_sealed(tmp_path / "log.jsonl", "metrics 1", line + "\n")
    return tmp_path / "log.jsonl"


def test_a_log_is_its_lines_with_a_sum_each(log: Path):
    require_whole_log(log, "metrics 1")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [{name: row[name] for name in ("step", "loss")} for row in rows] == list(map(json.loads, LINES))
    assert all(len(row["sum"]) == 8 for row in rows)


def test_every_byte_that_differs_and_every_line_that_is_gone_is_seen(log: Path):
    whole = log.read_bytes()
    for place, letter in enumerate(whole[:-1]):  # without its last newline the last line is torn
        log.write_bytes(whole[:place] + bytes([letter ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="is damaged: line"):
            require_whole_log(log, "metrics 1")
    lines = whole.splitlines(keepends=True)
    for gone in range(len(lines) - 1):  # the last one is missed by who knows its length, below
        log.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
        with pytest.raises(ValueError, match="is damaged: line"):
            require_whole_log(log, "metrics 1")


def test_a_kill_tears_the_last_line_and_that_is_no_damage(log: Path):
    whole = log.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        log.write_bytes(whole[:end])
        require_whole_log(log, "metrics 1")
    log.write_bytes(whole[:start])
    append_sealed(log, "metrics 1", LINES[-1] + "\n")
    assert log.read_bytes() == whole  # it goes on as if it had not been killed


def test_a_log_that_ends_before_its_checkpoint_or_is_of_another_kind_is_refused(log: Path):
    from depthscope.files import sum_of

    written = sum_of(log)
    append_sealed(log, "metrics 1", LINES[0])
    require_whole_log(log, "metrics 1", written)  # it may be longer by now
    with pytest.raises(ValueError, match="line 1"):
        require_whole_log(log, "watch 1")
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:4]))
    require_whole_log(log, "metrics 1")
    with pytest.raises(ValueError, match=r"first .* bytes are not what was written"):
        require_whole_log(log, "metrics 1", written)


def test_lines_of_before_there_were_sums_are_read_and_gone_on_from(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    log.write_text(LINES[0] + "\n" + LINES[1] + "\n")
    require_whole_log(log, "metrics 1")
    for line in LINES[2:4]:
        append_sealed(log, "metrics 1", line)
    require_whole_log(log, "metrics 1")
    log.write_text(log.read_text() + LINES[4] + "\n")  # by then there are sums
    with pytest.raises(ValueError, match="line 5 of 5"):
        require_whole_log(log, "metrics 1")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "changed": lambda path: path.write_bytes(path.read_bytes().replace(b"1", b"2")),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "fifo": fifo,
    "link": link,
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", ["about.json", "table.parquet"])
def test_tables_and_their_record_are_what_was_written_or_refused(kind: str, name: str, tmp_path: Path):
    table = pd.DataFrame({"x": [1, 2]})
    write_tables(tmp_path, "about.json", "numbers", 1, {"n": 1}, {"table.parquet": table})
    (again,), about = read_tables(tmp_path, "about.json", "numbers", 1, {"table.parquet": ""}, "numbers")
    assert again.equals(table)
    assert about == {"n": 1}
    DAMAGES[kind](tmp_path / name)
    with pytest.raises(ValueError, match=name) as refused:
        read_tables(tmp_path, "about.json", "numbers", 1, {"table.parquet": ""}, "numbers")
    assert "\n" not in str(refused.value)


def test_a_record_of_another_kind_and_a_file_that_is_not_its_own_are_refused(tmp_path: Path):
    table = {"a.txt": lambda path: path.write_text("a")}
    write_folder(tmp_path, with_record(table, "one.json", "one", 1, {"x": "\ud800"}))
    record = read_record(tmp_path / "one.json", "one")
    assert record.content == {"x": "\ud800"}
    assert record.require(tmp_path / "a.txt").read_text() == "a"
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(ValueError, match=r"b.txt is not of what was written there"):
        record.require(tmp_path / "b.txt")
    with pytest.raises(ValueError, match="is another file: expected 'two', got 'one'"):
        read_record(tmp_path / "one.json", "two")
    with pytest.raises(ValueError, match="expected other names"):
        record_writer("one", 1, {"kind": "mine"})(tmp_path / "c.json")
