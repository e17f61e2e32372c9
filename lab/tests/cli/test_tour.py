"""What becomes of a tour's chapter, a process of its own, when the tour is told to end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from depthscope_lab.cli import tour as tours

CHAPTER = """#!{python} -SE
import signal, sys, time
def end(number, frame):
    open({saved!r}, "w").write(str(int(number)))
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
open({began!r}, "w").close()
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_chapter_is_told_of_a_signal_and_saves_what_it_has(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    chapter, began, saved = (tmp_path / part for part in ("chapter", "began", "saved"))
    chapter.write_text(CHAPTER.format(python=sys.executable, began=str(began), saved=str(saved)))
    chapter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(chapter))
    monkeypatch.setattr(tours, "chapters", lambda _quick: [("one", "", "demo", "")] * 2)

    waits = threading.Event()

    class Process(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            waits.set()
            return super().wait(timeout)

    monkeypatch.setattr(tours.subprocess, "Popen", Process)

    def tell() -> None:
        waits.wait()
        while not began.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        tours.tour(tmp_path / "out")
    assert ended.value.code == 128 + number
    assert saved.read_text() == str(int(number))
    assert capfd.readouterr().err == "depthscope: interrupted\n"
