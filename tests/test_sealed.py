"""What is saved says its kind and its sums: what differs from what was written is refused and named."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from depthscope.files import append_line, sum_of, write_folder
from depthscope.sealed import (
    read_record,
    read_tables,
    record_writer,
    require_whole_log,
    with_record,
    write_tables,
)

LINES = "".join(json.dumps({"step": step, "loss": 1 / (step + 1)}) + "\n" for step in range(6))


def test_a_log_is_lines_of_json_and_begins_as_it_did(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    log.write_text(LINES)
    written = sum_of(log)
    append_line(log, '{"step": 6, "sum": "01234567"}\n')  # as an earlier version wrote it; by now it is longer
    log.write_text(log.read_text() + '{"step": 7')  # a kill tears the last line, and that is no damage
    require_whole_log(log, written)
    log.write_text(LINES.replace("0.5", "0.6"))
    require_whole_log(log)
    with pytest.raises(ValueError, match=r"first .* bytes are not what was written"):
        require_whole_log(log, written)
    log.write_text(LINES.replace("0.5}", "0.5"))
    with pytest.raises(ValueError, match="is damaged: line 2"):
        require_whole_log(log)


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
