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

CHAPTER = """#!/bin/sh
trap 'kill $!; echo TERM > {saved}; exit 143' TERM
trap 'kill $!; echo INT > {saved}; exit 130' INT
sleep 60 &
echo > {began}
wait
"""


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143)])
def test_a_chapter_is_told_of_a_signal_and_saves_what_it_has(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    chapter, began, saved = (tmp_path / part for part in ("chapter", "began", "saved"))
    chapter.write_text(CHAPTER.format(began=began, saved=saved))
    chapter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(chapter))
    monkeypatch.setattr(tours, "chapters", lambda _quick: [tours.Chapter("one", "", ("demo",))] * 2)

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
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        tours.tour(tmp_path / "out")
    assert ended.value.code == code
    assert saved.read_text().strip() == name
    assert capfd.readouterr().err == "depthscope: interrupted\n"
