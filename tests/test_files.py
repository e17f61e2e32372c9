"""Files and folders that are there whole or not at all, whatever happens while they are written."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from depthscope.files import write_whole_folder


def writing(text: str):
    return lambda folder: (folder / "a").write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {path.name: (path / "a").read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(("existing", "left"), [("replace", "new"), ("keep", "old")])
def test_a_folder_that_is_there_is_replaced_or_kept(tmp_path: Path, existing, left: str, forced: bool):
    target = tmp_path / "parent" / "folder"
    assert write_whole_folder(target, writing("old"), existing=existing, forced=forced) == target
    write_whole_folder(target, writing("new"), existing=existing, forced=forced)
    assert content(target.parent) == {"folder": left}


@pytest.mark.parametrize("existing", ["replace", "keep"])
def test_what_fails_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch, existing):
    write_whole_folder(tmp_path / "folder", writing("old"))

    def fail(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole_folder(tmp_path / "folder", fail, existing=existing)
    assert content(tmp_path) == {"folder": "old"}

    rename = Path.rename

    def refuse(path: Path, to: Path) -> Path:
        if (path / "new").exists():
            raise OSError("no room for a name")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no room for a name"):
        write_whole_folder(tmp_path / "folder", lambda folder: (folder / "new").write_text(""), existing="replace")
    assert content(tmp_path) == {"folder": "old"}


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
    found = content(tmp_path)
    assert found.pop("folder") == "old"
    (left,) = found
    assert left.startswith(".folder-")
