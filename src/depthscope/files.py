"""Files that are there whole or not at all.

What is written is made in a scratch folder beside its place: its name is random, only its owner can enter it, and it
is locked while its process lives. Complete, it is renamed to `ready`, and from then on counts: what is ready is put in
place, if its process was killed by the next one that writes there. What is not ready is removed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from depthscope.locks import Held, NoLocks, lock

_SCRATCH = ".depthscope-"
_LOCK, _NEW, _READY, _DONE = "lock", "new", "ready", "done"
_PARTS = _GONE, _FIRST, _LAST = "gone", "first", "last"  # what is to be removed, put in place, put in place after that


def write_whole(target: Path, write: Callable[[Path], object]) -> Path:
    """Calls `write` with another path, and puts the file in the target's place once it is complete."""
    write_folder(target.parent, {target.name: write})
    return target


def write_json(target: Path, value: Any) -> Path:
    """Strict JSON: nan and infinity are refused."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return write_whole(target, lambda path: write_text(path, text))


def write_text(path: Path, text: str) -> None:
    """As UTF-8. Half of a pair of surrogates, which UTF-8 has no bytes for, is written as JSON spells it: \\ud800."""
    path.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def read_json(path: Path) -> Any:
    """What is in a file of JSON; whatever else it holds is a ValueError; a pipe, which has no end, is refused."""
    try:
        return json.loads(require_file(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def require_format(found: Any, known: Iterable[int]) -> int:
    """The number of a format that can be read here; what a later version of depthscope has written says so."""
    formats = sorted(known)
    if type(found) is int and found in formats:
        return found
    named = " or ".join(map(str, formats))
    if type(found) is int and found > formats[-1]:
        raise ValueError(f"expected format {named}, got {found}: a later version of depthscope wrote it; update")
    raise ValueError(f"expected format {named}, got {found!r}")


def content_sum(value: Any) -> str:
    """SHA-256 of what JSON says, however it is spelled; a ValueError for what is nested too deeply to be read."""
    try:
        return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_folder(
    folder: Path,
    writers: Mapping[str, Callable[[Path], object]],
    *,
    obsolete: Iterable[str] = (),
    forced: bool = False,
) -> Path:
    """Several files of one folder, which belong together: all are made first, then all take their places.

    If one cannot be made, the folder is as it was. The last one says that the others are there: it goes first and
    comes last, so that a reader never takes files of two writings for one. `obsolete` are names that go with the files
    they belong to. `forced`: all of it reaches the disk before it counts, and its places before this function ends. A
    name may lead into a folder ("before/x.json"), whose other files stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    with _scratch_in(folder) as scratch:
        new = scratch / _NEW
        for part in _PARTS:
            (new / part).mkdir(parents=True)
        for name in set(obsolete) - writers.keys():
            _refuse_obstacle(folder / name, is_folder=False)
            (new / _GONE / quote(name, safe="")).touch()
        *_, last = writers
        for name, write in writers.items():
            made = new / (_LAST if name == last else _FIRST) / quote(name, safe="")  # a name may lead into a folder
            try:
                write(made)
            except OSError as error:  # of the disk: it names the file that could not be written, not the scratch file
                first = error
                while isinstance(first.__cause__, OSError):  # of a file inside a file
                    first = first.__cause__
                raise OSError(
                    f"could not write {folder / name}: {in_words(first)}; make room there, or check --out"
                ) from first
            _refuse_obstacle(folder / name, is_folder=made.is_dir())
        if forced:
            for path in [*new.rglob("*"), new]:
                force_to_disk(path)
        os.rename(new, scratch / _READY)
    if forced:
        force_to_disk(folder)
    return folder


def write_whole_folder(target: Path, write: Callable[[Path], object], *, forced: bool = False) -> Path:
    """Calls `write` with a new folder, and renames that to the target once it is complete. If anything fails, the
    target is as it was. `forced`: as for `write_folder`."""

    def make(path: Path) -> None:
        path.mkdir()
        write(path)

    write_folder(target.parent, {target.name: make}, forced=forced)
    return target


def _refuse_obstacle(target: Path, *, is_folder: bool) -> None:
    """A folder cannot be replaced by a file, nor a file by a folder."""
    if target.is_dir() != is_folder and os.path.lexists(target):
        there = "a file" if is_folder else "a folder"
        raise OSError(f"could not write {target}: there is {there} in its place; remove it, or choose another --out")


def in_words(error: Exception) -> str:
    """What the system says, without the numbers that libraries put around it: [Errno 28], (os error 28)."""
    said = str((error.strerror if isinstance(error, OSError) else None) or error)
    return re.sub(r" *[\[(](?:os error|errno) \d+[\])]", "", said, flags=re.IGNORECASE).strip()


def append_line(path: Path, line: str) -> None:
    """Adds a line in one write. If that fails (a full disk) the file is as it was, and the error names it."""
    data = line.encode("utf-8")
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if (written := os.write(file.fileno(), data)) < len(data):
                raise OSError(f"only {written} of {len(data)} bytes had room")
        except OSError as error:
            with suppress(OSError):
                file.truncate(size)
            raise OSError(f"could not write {path}: {error.strerror or error}") from error


def remove_leftovers(folder: Path) -> None:
    """Ends what killed processes have begun in a folder: what was ready is put in place, all else is removed."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError, Held, NoLocks):  # in use, or gone by now
            if scratch.is_symlink() or scratch.stat().st_uid != os.geteuid():
                continue  # it could put in place what another user has prepared
            if not (scratch / _LOCK).exists():
                scratch.rmdir()  # if it is empty: about to be locked, or all but removed
                continue
            handle = lock(scratch / _LOCK)
            try:
                _settle(scratch)
            finally:
                os.close(handle)


@contextmanager
def _scratch_in(folder: Path) -> Iterator[Path]:
    """A scratch folder, locked where there are locks; what is ready in it at the end is put in place."""
    handle = None
    while True:
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=_SCRATCH))
        with suppress(Held, FileNotFoundError):  # another process has taken it for a leftover
            with suppress(NoLocks):
                handle = lock(scratch / _LOCK)
            break
    try:
        try:
            yield scratch
        except BaseException:
            _remove(scratch)
            raise
        try:
            _settle(scratch)
        except OSError as error:
            if not any(scratch.glob("old-*")):  # else it has what was there before, and the next writer ends it
                _remove(scratch)
            place = error.filename2 or error.filename or folder
            raise OSError(f"could not write {place}: {in_words(error)}; check --out") from error
    finally:
        if handle is not None:
            os.close(handle)


def _settle(scratch: Path) -> None:
    """Puts in place what is ready, from wherever that was interrupted, and removes the scratch folder."""
    folder, ready = scratch.parent, scratch / _READY
    if ready.is_dir():
        gone, first, last = ([*(ready / part).iterdir()] for part in _PARTS)
        for path in [*(last if first or gone else []), *gone]:
            (folder / unquote(path.name)).unlink(missing_ok=True)
        for path in [*first, *last]:
            target = folder / unquote(path.name)
            target.parent.mkdir(exist_ok=True)
            _put(path, target, aside=scratch / f"old-{path.name}")
        os.rename(ready, scratch / _DONE)
    _remove(scratch)


def _remove(scratch: Path) -> None:
    """The lock last: what has none is empty."""
    for path in scratch.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        (scratch / _LOCK).unlink(missing_ok=True)
        scratch.rmdir()


def _put(path: Path, target: Path, aside: Path) -> None:
    if not (path.is_dir() and target.is_dir()):
        os.replace(path, target)
        return
    os.rename(target, aside)  # a folder that is not empty cannot be replaced in one go
    try:
        os.rename(path, target)
    except OSError:
        os.rename(aside, target)
        raise


def require_file(path: Path) -> Path:
    """The path; refused if it is no file: a pipe or a device has no end, and reading it would wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "expected a file, got a folder, a pipe or a device", str(path))
    return path


def require_own_file(path: Path) -> Path:
    """The path; refused if it is no file, or a link that leaves its folder: what others send may point anywhere.

    The hub's cache keeps the files of `snapshots/…` as links to its own `blobs`: those stay.
    """
    try:
        real = require_file(path).resolve()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError(f"expected a file in {str(path)!r}, got a folder, a pipe or a device") from None
    in_cache = real.parent.name == "blobs" and (real.parent.parent / "snapshots").is_dir()
    if in_cache or real.is_relative_to(path.parent.resolve()):
        return path
    raise ValueError(f"expected a file in {str(path)!r}, got a link that leaves its folder; put the file itself there")


def sum_of(path: Path) -> dict[str, Any]:
    """Length and SHA-256 of a file."""
    require_file(path)
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": file_digest(file, "sha256").hexdigest()}


def force_to_disk(path: Path) -> None:
    """Of a file its content, of a folder its names: a rename must not reach the disk before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(folder: Path) -> None:
    """Tries the folder, or, where it is not there yet, the one that it would be in: minutes of computing are not spent
    on results that cannot be kept. Nothing stays there."""
    wanted = folder.absolute()
    there = next((path for path in (wanted, *wanted.parents) if os.path.lexists(path)), wanted)
    names = [name for name in wanted.relative_to(there).parts if name != ".."]
    try:
        str(folder).encode()  # libraries that write our files take no other names
        with tempfile.TemporaryFile(dir=there):
            pass
        if names:  # each is tried elsewhere: another process may be making the same folders
            with tempfile.TemporaryDirectory(dir=there, prefix=_SCRATCH) as scratch:
                Path(scratch, *names).mkdir(parents=True)
    except (OSError, UnicodeEncodeError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else "its name is no UTF-8"
        raise OSError(
            f"expected a folder that can be written for --out, got {str(folder)!r}: {reason}; choose another"
        ) from None
