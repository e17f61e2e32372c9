"""Loops that are compiled where numba is installed: what happens where it is not, or does not work."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import depthscope
from depthscope import compiling
from depthscope.compiling import Compiled, compiled

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="the extra `fast` is not installed")


def doubled(x: Any, first: int, last: int) -> None:
    for i in range(first, last):
        x[i] *= 2


def attempt(loops: Any) -> None:
    x = np.ones(2)
    loops(x, 1, 2)
    assert x.tolist() == [1, 2]


@needs_numba
def test_machine_code_goes_to_the_users_cache_or_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled(doubled, attempt).loops is not None
    assert list((tmp_path / "depthscope" / "kernels").rglob("*.nbi"))
    assert not list(Path(depthscope.__file__).parent.rglob("*.nb[ci]"))
    for file in tmp_path.rglob("*.nb[ci]"):
        file.write_bytes(file.read_bytes()[:20])  # a cache that is broken is left
    found = compiled(doubled, attempt)
    assert (found.loops is not None, found.trouble) == (True, "")
    (tmp_path / "file").write_text("in which no folder can be made")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert compiling._cache_folder() == ""


@needs_numba
def test_loops_that_cannot_be_compiled_or_are_wrong_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import numba

    def cannot(*_: object) -> None:
        raise RuntimeError("LLVM has no such processor\nmore")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(numba, "njit", lambda **_: lambda _loops: cannot)
    assert compiled(doubled, attempt) == Compiled(None, "RuntimeError: LLVM has no such processor")
    monkeypatch.setattr(numba, "njit", lambda **_: lambda _loops: lambda *_: None)
    found = compiled(doubled, attempt)
    assert (found.loops, found.trouble[:14]) == (None, "AssertionError")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)  # plain Python would take minutes
    assert compiled(doubled, attempt) == Compiled(None)


def test_without_numba_there_are_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "find_spec", lambda _name: None)
    assert compiled(doubled, attempt) == Compiled(None)


@pytest.mark.parametrize(("value", "expected"), [("off", False), (" No ", False), ("0", False), ("on", True)])
def test_they_can_be_refused(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEPTHSCOPE_KERNEL", value)
    assert compiling.wanted() is expected


@pytest.mark.parametrize(("numbers", "parts"), [(2**20, 3), (2**20 - 1, 1)])
def test_threads_share_what_is_large(numbers: int, parts: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    calls: list[tuple[int, int]] = []
    compiling.over_sequences(lambda first, last: calls.append((first, last)), (), 7, numbers)
    assert len(calls) == parts
    assert sorted(i for first, last in calls for i in range(first, last)) == list(range(7))
