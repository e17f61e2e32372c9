"""What the numbers of a study hang on besides its configuration: our code, the libraries, the data that it was given.

An earlier run counts only if all three are what they were. The code is a hash over every source file of depthscope and
of the lab except those of the rooms that show things (`cli`, `drawing`, `report`), and, for a study of another package,
over that package too. In our own studies, words change more often than numbers: of `papers` only those definitions
count that `compute` can come to by name (`_definitions`), without docstrings and comments. What is found in other ways
(registries, entry points, subprocesses) lies outside of `papers`, and is taken as a whole; an edit that could change a
number must never go unseen. Who judges and draws is in another hash: when that alone differs, the numbers are kept, and
judged and drawn again.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import depthscope
import depthscope_lab

SHOWING = {"cli", "drawing", "report"}  # rooms that change no number and no verdict
LIBRARIES = ("torch", "numpy", "transformers", "scikit-learn")  # what draws, multiplies, initialises, brings data
_PAPERS = "depthscope_lab.papers."
_IMPORTS = (ast.Import, ast.ImportFrom)
_ALWAYS, _WHOLE = "", "*"  # in place of a name: what a module does when it is imported; all of it
Files = list[tuple[str, Path]]


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
    """Of what computes: the sources of depthscope and of the lab, of its studies what `compute` comes to.

    All of the studies if it is defined elsewhere; then with the package that defines it.
    """
    files, reached = _sources(compute), _definitions(compute)
    if reached is not None:
        files = [(name, path) for name, path in files if not (name.startswith(_SLASHED) and name.endswith(".py"))]
    return hashlib.sha256(json.dumps([_hash_files(files), reached]).encode()).hexdigest()


_SLASHED = _PAPERS.replace(".", "/")


def words_hash(compute: Callable[..., Any]) -> str:
    """Of all these sources, with those that judge and draw."""
    return _hash_files(_sources(compute))


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


def _sources(compute: Callable[..., Any]) -> Files:
    """Those of both packages, but for what shows; and those of the outermost package that defines `compute`."""
    houses = [Path(str(package.__file__)).parent for package in (depthscope, depthscope_lab)]
    found: Files = []
    for house in houses:
        files = (path for ending in ("py", "json") for path in house.rglob(f"*.{ending}"))
        found += _named((path for path in files if path.relative_to(house).parts[0] not in SHOWING), house.parent)
    try:
        source = inspect.getsourcefile(inspect.unwrap(compute))
    except TypeError:  # an object that can be called: its class has a file
        source = inspect.getsourcefile(type(compute))
    if source is None or not (root := Path(source)).exists() or any(map(root.is_relative_to, houses)):
        return found
    while (root.parent / "__init__.py").exists():
        root = root.parent
    return found + _named([root] if root.is_file() else root.rglob("*.py"), root.parent)


def _definitions(compute: Callable[..., Any]) -> dict[str, str] | None:
    """By module and name, the syntax of every definition in `papers` that `compute` can come to, itself first.

    A name in a definition leads to the statements that bind it in the module, an import of it to the module it is from;
    a module that is imported whole, to all of it. What a module does besides binding names counts always. None if
    `compute` is no function of a module of `papers`.
    """
    start = (getattr(compute, "__module__", ""), getattr(compute, "__qualname__", ""))
    if not start[0].startswith(_PAPERS) or not start[1].isidentifier():
        return None
    modules: dict[str, dict[str, list[ast.stmt]]] = {}
    found: dict[str, str] = {}
    waiting = [start]
    while waiting:
        module, name = waiting.pop()
        if (key := f"{module}:{name}") in found:
            continue
        if module not in modules:
            modules[module] = _statements(_file_of(module))
            waiting.append((module, _ALWAYS))
        if name == _WHOLE:
            waiting += [(module, other) for other in modules[module]]
        statements = modules[module].get(name, [])
        found[key] = "".join(ast.dump(one) for one in statements if not isinstance(one, _IMPORTS))
        for one in statements:
            if isinstance(one, _IMPORTS):
                waiting += _imported(one, name)
                continue
            for node in ast.walk(one):
                if isinstance(node, _IMPORTS):  # inside of a function
                    waiting += _imported(node)
                elif isinstance(node, ast.Name):
                    waiting.append((module, node.id))
    return found


def _statements(path: Path) -> dict[str, list[ast.stmt]]:
    """The statements of a module by the names that they bind, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    found: dict[str, list[ast.stmt]] = {}
    for one in tree.body:
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            names = {one.name}
        elif isinstance(one, _IMPORTS):
            names = {alias.asname or alias.name.partition(".")[0] for alias in one.names}
        else:
            names = {
                node.id for node in ast.walk(one) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            if not (isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign) and names):
                names |= {_ALWAYS}
        for name in names:
            found.setdefault(name, []).append(one)
    return found


def _imported(statement: ast.Import | ast.ImportFrom, name: str = "") -> Iterator[tuple[str, str]]:
    """What in `papers` is imported under this name, or under any: modules and names in them."""
    for alias in statement.names:
        whole = alias.name if isinstance(statement, ast.Import) else f"{statement.module}.{alias.name}"
        if whole.startswith(_PAPERS) and name in ("", alias.asname or alias.name.partition(".")[0]):
            is_module = _file_of(whole).exists()
            yield (whole, _WHOLE) if is_module else (str(getattr(statement, "module", "")), alias.name)


def _file_of(module: str) -> Path:
    path = Path(str(depthscope_lab.__file__)).parents[1].joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _named(files: Iterable[Path], root: Path) -> Files:
    return sorted((path.relative_to(root).as_posix(), path) for path in files)


def _hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """sha256 over the names and contents of files, in the order given."""
    whole = hashlib.sha256()
    for name, path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{name}\0{content}\n".encode())
    return whole.hexdigest()
