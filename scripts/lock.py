"""Writes `hashes/`: the SHA-256 of the wheels of every version in `constraints.txt`, which `make` lets pip compare.

    make lock     # seconds; after constraints.txt has changed and `.venv` has been made anew from it

`run.txt` has what `make demo` installs, `develop.txt` what `make test` installs besides. The sums are those that the
index of pip's configuration gives (the simple API, PEP 503), for CPython 3.11 to 3.14 on the machines that torch has
wheels for. torch itself is not among them: with CUDA and without it is another file of the same version.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
BY_VERSION_ONLY = {"torch"}
# What `make demo` runs, and what builds it in place.
RUN = ("depthscope[figures,huggingface,report]", "depthscope-lab", "hatchling", "editables")
PYTHONS = [(3, minor) for minor in range(11, 15)]
GLIBC = range(40, 4, -1)  # the minor versions that a manylinux tag may name; a wheel says the lowest that it needs
PLATFORMS = [
    *(f"manylinux_2_{minor}_{machine}" for minor in GLIBC for machine in ("x86_64", "aarch64")),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "manylinux2014_aarch64"),
    *mac_platforms((26, 0), "arm64"),
    "win_amd64",
]

Pins = dict[str, str]  # canonical name → version


def read_pins(constraints: str) -> Pins:
    """The lines `name==version`."""
    return {canonicalize_name(name): version for name, version in re.findall(r"(?m)^(\S+)==(\S+)$", constraints)}


def lock(pins: Pins, page_of: Callable[[str], str]) -> str:
    """The lines of a file for `pip install --require-hashes`; `page_of(name)` is a project's page of the index."""
    wanted = fitting_tags()
    lines = []
    for name, version in sorted(pins.items()):
        sums = sorted(wheel_sums(page_of(name), version, wanted))
        if not sums:
            raise SystemExit(f"lock: the index has no wheel of {name} {version} that fits: change constraints.txt")
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in sums)]))
    return "\n".join(lines) + "\n"


def fitting_tags() -> set[Tag]:
    """The tags of all wheels that one of our machines can install."""
    return {
        tag
        for python in PYTHONS
        for tags in (cpython_tags(python, platforms=PLATFORMS), compatible_tags(python, platforms=PLATFORMS))
        for tag in tags
    }


def wheel_sums(page: str, version: str, wanted: set[Tag]) -> set[str]:
    """The sums of the wheels of a version that have one of these tags, except those that were withdrawn."""
    found = set()
    for address in _links(page):
        parts = urlsplit(address)
        kind, _, digest = parts.fragment.partition("=")
        try:
            _, theirs, _, tags = parse_wheel_filename(unquote(parts.path.rsplit("/", 1)[-1]))
        except InvalidWheelFilename:
            continue  # a source, or a file of before there were rules
        if theirs == Version(version) and tags & wanted:
            if kind != "sha256" or not re.fullmatch("[0-9a-f]{64}", digest):
                raise SystemExit(f"lock: the index gives no SHA-256 for {parts.path}")
            found.add(digest)
    return found


def needed(names: Iterable[str]) -> set[str]:
    """These, as `name[extra]` too, and what they need, by what the packages say that are installed here."""
    found: set[tuple[str, str]] = set()  # a package, and one of its extras; "" without any
    waiting = [one for name in names for one in _parts(Requirement(name))]
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += _needed_by(*one)
    return {name for name, _ in found}


def _needed_by(name: str, extra: str) -> Iterator[tuple[str, str]]:
    try:
        texts = requires(name) or []
    except PackageNotFoundError:
        raise SystemExit(f"lock: {name} is not installed here: run this with the .venv that make has made") from None
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield from _parts(requirement)


def _parts(requirement: Requirement) -> Iterator[tuple[str, str]]:
    return ((canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras))


def _links(page: str) -> list[str]:
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            if tag == "a" and "data-yanked" not in given:
                found.append(given.get("href") or "")

    Links().feed(page)
    return found


def index_of_pip() -> str:
    """The index that pip is configured with: its help shows it as the default of --index-url."""
    command = [sys.executable, "-m", "pip", "install", "--help"]
    shown = subprocess.run(command, env=os.environ | {"COLUMNS": "2000"}, capture_output=True, text=True, check=True)
    (index,) = re.findall(r"--index-url <url>.*?\(default (\S+)\)", shown.stdout)
    return index.rstrip("/")


def main() -> None:
    index = index_of_pip()

    def page_of(name: str) -> str:
        with urlopen(Request(f"{index}/{name}/", headers={"Accept": "text/html"}), timeout=60) as answer:
            return answer.read().decode()

    pins = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    hashed = {name: version for name, version in pins.items() if name not in BY_VERSION_ONLY}
    run = needed(RUN)
    parts = {
        "run": {name: version for name, version in hashed.items() if name in run},
        "develop": {name: version for name, version in hashed.items() if name not in run},
    }
    for name, some in parts.items():
        text = "# Made by `make lock` from constraints.txt.\n" + lock(some, page_of)
        (ROOT / "hashes" / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"hashes/{name}.txt: {len(some)} packages, {text.count('--hash')} wheels")


if __name__ == "__main__":
    main()
