"""A folder has one owner, and that is over when its process is, however it ends."""

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from depthscope.locks import OWNER, owned

HOLD = """
import sys, time
from pathlib import Path
from depthscope.locks import owned
with owned(Path(sys.argv[1])):
    print(flush=True)
    time.sleep(60)
"""


def test_a_second_owner_is_told_who_the_first_is_until_that_is_killed(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    today = time.strftime("%Y-%m-%d", time.gmtime())
    hints = f"in use by process {process.pid} on {socket.gethostname()!r} since '{today}"
    with pytest.raises(ValueError, match=re.escape(hints)), owned(tmp_path):
        pass
    process.kill()
    process.communicate()
    with owned(tmp_path):
        pass


def test_in_one_process_too_and_it_ends_with_an_exception(tmp_path: Path):
    def refused_inside() -> None:
        with owned(tmp_path):
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"), owned(tmp_path):
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        refused_inside()
    with owned(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_say_who_it_is_is_another_process(tmp_path: Path):
    with owned(tmp_path):
        (tmp_path / OWNER).write_text("{")
        with pytest.raises(ValueError, match="in use by another process"), owned(tmp_path):
            pass


def test_where_there_are_no_locks_it_is_said(tmp_path: Path, monkeypatch):
    def none(_handle: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    said = pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\): nothing keeps a second run out")
    with said, owned(tmp_path):
        pass


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / OWNER).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), owned(tmp_path):
        pass
    assert victim.read_text() == "precious"
