"""Saved files say what they are, so that no reader takes for whole what is damaged, missing or of another kind.

A *record* is an object of JSON with its kind, the number of its format, the sums of the files that were written
together with it (`files`, by name), and a sum of all that (`sha256`). A *log* grows line by line, and its process may
be killed at any moment: what is torn after its last whole line is no damage.

Files of before there were sums are read as they are. Links that leave their folder, pipes and devices are not opened.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.files import content_sum, read_json, require_format, require_own_file, sum_of, write_folder, write_text

if TYPE_CHECKING:
    import pandas as pd

COMMANDS = "commands.json"  # how the files of a folder were made
Writer = Callable[[Path], object]
_OWN = ("kind", "format", "files", "sha256")


@dataclass(frozen=True)
class Record:
    """What a record says, and the sums of the files beside it.

    `summed`: it has a sum of its own, which is right; `sealed`: and a kind. Earlier versions wrote some without.
    """

    content: dict[str, Any]
    files: dict[str, Any]
    summed: bool
    sealed: bool

    def require(self, path: Path, name: str = "", *, listed: bool = False) -> Path:
        """The path of a file that was written together with the record, if it is as it was; a ValueError if not.

        `name` is what the record may call it, if not by its own name.
        One that is not listed is taken as it is beside a record of an earlier version, but where such listed all.
        """
        known = self.files.get(path.name, self.files.get(name))
        if known is None and (self.sealed or listed):
            raise ValueError(f"{path} is not of what was written there")
        try:
            if known is not None and sum_of(require_own_file(path)) != known:
                raise ValueError(f"{path} is damaged: it is not what was written")
            return require_own_file(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None


def record_writer(kind: str, format: int, content: Mapping[str, Any], files: Mapping[str, Any] | None = None) -> Writer:
    """What writes a record to a path. It is strict JSON: nan and infinity are refused."""
    if taken := [name for name in _OWN if name in content]:
        raise ValueError(f"expected other names than {', '.join(_OWN)} in what is saved, got {taken[0]!r}")

    def write(path: Path) -> None:
        whole = {"kind": kind, "format": format, **content, **({} if files is None else {"files": files})}
        whole = json.loads(json.dumps(whole, allow_nan=False))  # names of keys as they come back
        summed = {**whole, "sha256": content_sum(whole)}
        write_text(path, json.dumps(summed, indent=2, ensure_ascii=False) + "\n")

    return write


def with_record(
    writers: Mapping[str, Writer], name: str, kind: str, format: int, content: Mapping[str, Any]
) -> dict[str, Writer]:
    """For `write_folder`: what writes files, and last the record that has their sums."""
    sums: dict[str, Any] = {}

    def write(name: str, path: Path) -> None:
        writers[name](path)
        sums[name] = sum_of(path)

    return {other: partial(write, other) for other in writers} | {name: record_writer(kind, format, content, sums)}


def read_record(path: Path, kind: str, formats: Iterable[int] = (1,), *, unnumbered: int | None = None) -> Record:
    """What `sealed` wrote, if it is of this kind; else a ValueError, a FileNotFoundError if there is none.

    `unnumbered` is the format of files of before they had a number.
    """
    try:
        found = read_json(require_own_file(path))
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: expected an object, got {type(found).__name__}")
    named = found.get("kind", kind)
    if named != kind:
        raise ValueError(f"{path} is another file: expected {kind!r}, got {named!r}")
    try:
        require_format(found.get("format", None if "kind" in found else unnumbered), formats)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read here: {error}") from None
    written = found.pop("sha256", None)
    if (written is not None or "kind" in found) and written != content_sum(found):
        raise ValueError(f"{path} is damaged: it is not what was written")
    files = found.get("files") or {}
    if not isinstance(files, dict):
        raise ValueError(f"{path} is damaged: its files are no object")
    content = {name: value for name, value in found.items() if name not in _OWN}
    return Record(content, files, summed=written is not None, sealed="kind" in found)


def read_kept(path: Path, kind: str, known: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier process has kept there of this kind, if it says what is `known` of it; None if nothing.

    None, too, for what is damaged, with a warning: it is made again.
    """
    try:
        record = read_record(path, kind)
    except FileNotFoundError:
        return None
    except ValueError as error:
        warnings.warn(f"{error}; it is made again", stacklevel=2)
        return None
    plain = json.loads(json.dumps(known))  # as it comes back
    return record.content if {name: record.content.get(name) for name in plain} == plain else None


def read_commands(folder: Path) -> dict[str, Any]:
    """By command, what was typed and the line of Python that does the same; a FileNotFoundError where none are kept."""
    return read_record(folder / COMMANDS, "commands", unnumbered=1).content


def write_tables(
    folder: Path,
    name: str,
    kind: str,
    format: int,
    content: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    obsolete: Iterable[str] = (),
) -> Path:
    """Tables as parquet files, and the record of this name that has their sums; all or none of them."""
    writers = {file: partial(table.to_parquet, index=False) for file, table in tables.items()}
    return write_folder(folder, with_record(writers, name, kind, format, content), obsolete=obsolete)


def read_tables(
    folder: Path, name: str, kind: str, format: int, tables: Mapping[str, str], called: str
) -> tuple[list[pd.DataFrame], dict[str, Any]]:
    """What `write_tables` wrote; a ValueError says what is missing or damaged, and that these are no `called`.

    `tables` are the names of the files, each with what records of earlier versions may call it.
    """
    import pandas as pd

    try:
        record = read_record(folder / name, kind, (format,))
        return [
            pd.read_parquet(record.require(folder / file, other, listed=True)) for file, other in tables.items()
        ], record.content
    except FileNotFoundError:
        raise ValueError(f"no {called} in {folder}: {name} is missing") from None
    except (ValueError, OSError) as error:  # pyarrow's errors are of these kinds
        raise ValueError(f"{folder} holds no {called}: {' '.join(str(error).split())[:300]}") from None


def require_whole_log(path: Path, written: Any = None) -> None:
    """A ValueError if a line of a log is no object of JSON; a last line that a kill has torn is no damage.

    `written` are length and sum of its beginning at some time.
    """
    try:
        data = require_own_file(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(line), dict):
                continue
        raise ValueError(f"{path} is damaged: line {number} is not what was written")
    length = written.get("bytes") if isinstance(written, dict) else None
    if isinstance(length, int) and sha256(data[:length]).hexdigest() != written["sha256"]:
        raise ValueError(f"{path} is damaged: its first {length} bytes are not what was written")
