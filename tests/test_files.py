"""Files and folders that are there whole or not at all, whatever happens while they are written."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from depthscope.files import (
    append_line,
    remove_leftovers,
    require_writable,
    write_folder,
    write_json,
    write_whole,
    write_whole_folder,
)


def writing(text: str):
    return lambda folder: (folder / "a").write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {path.name: (path / "a").read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("forced", [False, True])
def test_a_folder_that_is_there_is_replaced(tmp_path: Path, forced: bool):
    target = tmp_path / "parent" / "folder"
    assert write_whole_folder(target, writing("old"), forced=forced) == target
    write_whole_folder(target, writing("new"), forced=forced)
    assert content(target.parent) == {"folder": "new"}


def test_what_fails_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch):
    write_whole_folder(tmp_path / "folder", writing("old"))

    def fail(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole_folder(tmp_path / "folder", fail)
    assert content(tmp_path) == {"folder": "old"}

    rename = os.rename

    def refuse(source, target) -> None:
        if Path(target).name == "folder" and (Path(source) / "new").exists():
            raise OSError("no room for a name")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="no room for a name"):
        write_whole_folder(tmp_path / "folder", lambda folder: (folder / "new").write_text(""))
    assert (tmp_path / "folder" / "a").read_text() == "old"


def test_killed_while_it_writes_the_folder_is_as_it_was(tmp_path: Path):
    write_whole_folder(tmp_path / "folder", writing("old"))
    code = (
        "import os, signal, sys; from pathlib import Path; from depthscope.files import write_whole_folder\n"
        "def write(folder):\n"
        "    (folder / 'a').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_whole_folder(Path(sys.argv[1]), write)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "folder")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "folder" / "a").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    write_whole_folder(tmp_path / "other", writing("next"))
    assert content(tmp_path) == {"folder": "old", "other": "next"}  # what was left is gone


KILLED = """
import os, sys
from pathlib import Path
from depthscope.files import write_folder
folder, first = Path(sys.argv[1]), int(sys.argv[2])
print(flush=True)
for number in range(first, 10**9):
    names = ("a", "b", "c", "says so") if number % 2 else ("a", "b", "extra", "says so")
    write_folder(folder, {name: lambda path: path.write_text(str(number)) for name in names}, obsolete=("c", "extra"))
"""


def whole(folder: Path) -> int | None:
    """The number of the writing that all files are of; None if nothing says that they are complete."""
    found = {path.name: path.read_text() for path in folder.iterdir() if path.name[0] != "."}
    if "says so" not in found:
        return None
    number = int(found["says so"])
    third = "c" if number % 2 else "extra"
    assert found == dict.fromkeys(("a", "b", third, "says so"), str(number))
    return number


def test_killed_at_random_moments_files_that_belong_together_are_of_one_writing(tmp_path: Path):
    chance, number = random.Random(0), 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(number)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 + chance.random() / 50)
        process.kill()
        process.communicate()
        before = whole(tmp_path)  # nothing is said to be whole that is not
        remove_leftovers(tmp_path)
        number = whole(tmp_path)
        assert number is not None  # nor was anything lost
        assert number >= (before or 0)
        assert len(list(tmp_path.iterdir())) == 4


def test_killed_between_two_names_the_next_start_puts_the_rest_in_place(tmp_path: Path):
    write_folder(tmp_path, dict.fromkeys(("a", "b", "says so"), lambda path: path.write_text("old")))
    code = (
        "import os, signal, sys; from pathlib import Path; from depthscope import files\n"
        "put = files._put\n"
        "def kill(path, target, aside):\n"
        "    if target.name == 'b': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    put(path, target, aside)\n"
        "files._put = kill\n"
        "write = lambda path: path.write_text('new')\n"
        "files.write_folder(Path(sys.argv[1]), {'a': write, 'b': write, 'says so': write})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert not (tmp_path / "says so").exists()
    remove_leftovers(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(("a", "b", "says so"), "new")


def test_what_belongs_to_an_older_writing_does_not_survive(tmp_path: Path):
    (tmp_path / "mine").write_text("of the user")
    for name in ("old", "extra"):
        (tmp_path / name).write_text("old")

    def fail(_path: Path) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_folder(tmp_path, {"old": lambda path: path.write_text("new"), "b": fail}, obsolete=("extra",))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()}["extra"] == "old"
    write_folder(tmp_path, {"old": lambda path: path.write_text("new")}, obsolete=("extra", "never there", "old"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"mine": "of the user", "old": "new"}


def test_a_living_process_keeps_its_scratch_and_another_users_folder_is_left_alone(tmp_path: Path, monkeypatch):
    def look(path: Path) -> None:
        remove_leftovers(tmp_path)
        path.write_text("whole")

    write_whole(tmp_path / "file", look)
    assert (tmp_path / "file").read_text() == "whole"
    planted = tmp_path / ".depthscope-planted" / "ready" / "last"
    planted.mkdir(parents=True)
    (planted / "file").write_text("planted")
    (tmp_path / ".depthscope-planted" / "lock").touch()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    remove_leftovers(tmp_path)
    assert (tmp_path / "file").read_text() == "whole"


def test_a_scratch_name_is_not_followed_through_a_link(tmp_path: Path):
    """Names that an attacker could predict were `.NAME-PID.SUFFIX`; now all are random, in a folder of their own."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / f".config-{os.getpid()}.json").symlink_to(victim)
    (folder / "config.json").symlink_to(victim)
    seen: list[Path] = []
    write_json(folder / "config.json", {})
    write_whole(folder / "b", lambda path: (seen.append(path), path.write_text("")))
    assert victim.read_text() == "precious"
    assert not (folder / "config.json").is_symlink()
    assert seen[0].parents[3] == folder
    assert not seen[0].parents[2].exists()


def test_a_file_has_the_usual_permissions(tmp_path: Path):
    plain = tmp_path / "plain"
    plain.write_text("")
    written = write_json(tmp_path / "whole", {})
    assert written.stat().st_mode == plain.stat().st_mode


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was_and_names_it(tmp_path: Path, monkeypatch):
    path = tmp_path / "lines"
    append_line(path, "one\n")
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:2]))
    with pytest.raises(OSError, match=r"could not write \S+lines: only 2 of 4 bytes"):
        append_line(path, "two\n")
    assert path.read_text() == "one\n"


def test_a_folder_is_tried_without_being_made(tmp_path: Path):
    require_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "b", Path("/proc/1/x"), Path("/dev/null/x")):
        with pytest.raises(OSError, match=f"can be written for --out, got '{wrong}': [^\\[]"):
            require_writable(wrong)
