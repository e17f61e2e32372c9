"""What the numbers of a study hang on besides its configuration: our code, the libraries, the data that it was given.

An earlier run counts only if all three are what they were. The code is a hash over every source file of depthscope and
of the lab except those of the rooms that show things (`cli`, `drawing`, `report`), and, for a study of another package,
over that package too: an edit that could change a number must never go unseen.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import depthscope
import depthscope_lab

SHOWING = {"cli", "drawing", "report"}  # rooms that change no number and no verdict
LIBRARIES = ("torch", "numpy", "transformers", "scikit-learn")  # what draws, multiplies, initialises, brings data


def provenance(compute: Callable[..., Any], data: str | None) -> dict[str, Any]:
    """The hashes and versions that `config.json` keeps: `code`, `libraries`, `data` (None if none was given)."""
    return {"code": code_hash(compute), "libraries": library_versions(), "data": data_hash(data)}


def short_hash(made_with: dict[str, Any]) -> str:
    """Twelve digits that name a provenance, for a folder."""
    return hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:12]


def changes(before: Any, now: dict[str, Any], data: str | None) -> str:
    """What differs between two provenances, in words; empty if nothing does."""
    versions = before.get("libraries") if isinstance(before, dict) else None
    if not isinstance(versions, dict):
        return "nothing says which code computed the earlier run"
    found = [] if before.get("code") == now["code"] else ["the code has changed"]
    for name in sorted({*versions, *now["libraries"]}):
        old, new = versions.get(name), now["libraries"].get(name)
        if old != new:
            found.append(f"{name} was {old or 'absent'} and is {new or 'absent'}")
    if before.get("data") != now["data"]:
        found.append(f"the data in {data} have changed")
    return "; ".join(found)


def code_hash(compute: Callable[..., Any]) -> str:
    """Over the sources of both packages, but for what shows, and of the outermost package that defines `compute`."""
    houses = [Path(str(package.__file__)).parent for package in (depthscope, depthscope_lab)]
    found: list[tuple[str, Path]] = []
    for house in houses:
        files = (path for ending in ("py", "json") for path in house.rglob(f"*.{ending}"))
        found += _named((path for path in files if path.relative_to(house).parts[0] not in SHOWING), house.parent)
    try:
        source = inspect.getsourcefile(inspect.unwrap(compute))
    except TypeError:  # an object that can be called: its class has a file
        source = inspect.getsourcefile(type(compute))
    if source is not None and (root := Path(source)).exists() and not any(map(root.is_relative_to, houses)):
        while (root.parent / "__init__.py").exists():
            root = root.parent
        found += _named([root] if root.is_file() else root.rglob("*.py"), root.parent)
    return _hash_files(found)


def library_versions() -> dict[str, str]:
    """Python (its manual is a text that studies read) and the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def data_hash(data: str | None) -> str | None:
    """Of a file, or of all files of a folder with their names; None for what is not on this disk."""
    if data is None or not (root := Path(data)).exists():
        return None
    if root.is_file():
        return _hash_files([(root.name, root)])
    return _hash_files(_named((path for path in root.rglob("*") if path.is_file()), root))


def _named(files: Iterable[Path], root: Path) -> list[tuple[str, Path]]:
    return sorted((path.relative_to(root).as_posix(), path) for path in files)


def _hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """sha256 over the names and contents of files, in their order."""
    whole = hashlib.sha256()
    for name, path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{name}\0{content}\n".encode())
    return whole.hexdigest()
