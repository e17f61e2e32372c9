"""How `blocks=` names modules, and the tokens among what they take and return.

layers.*            every module of that name; a "*" does not cross a dot
layers.*@1>0        the tokens are the second argument, and the first item of what is returned
layers.*@x>tokens   an argument by its name, an item by its key; layers.*@1 if nothing but the tokens is returned
layers.*@0>+        what is returned is added to the tokens by whoever calls the module
first,layers.*@1    several, in the order of the blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import NamedTuple

from torch import nn

from depthscope import walking
from depthscope.anatomy.structure import BlockAnatomy, Path, Spot


class Stream(NamedTuple):
    """Where the tokens enter a module and leave it."""

    entrance: Path | None = None
    exit: Path | None = None
    added: bool = False  # what leaves is added to what has entered

    def spots(self, module: nn.Module) -> dict[str, Spot]:
        """The two stations that a block of no known family shows."""
        added_to = self.entrance if self.added else None
        return {"input": Spot(module, "in", self.entrance), "output": Spot(module, "out", self.exit, added_to)}

    @property
    def spelled(self) -> str:
        if self.entrance is None or self.exit is None:
            return ""
        leaves = "+" * self.added + ".".join(map(str, self.exit))
        return "@" + ".".join(map(str, self.entrance[1:])) + (f">{leaves}" if leaves else "")


def read(pattern: str) -> list[tuple[str, Stream]]:
    """The globs of a pattern, each with its stream."""
    return [(glob, _stream(pattern, rest)) for glob, _, rest in (p.strip().partition("@") for p in pattern.split(","))]


def _stream(pattern: str, text: str) -> Stream:
    if not text:
        return Stream()
    enters, _, leaves = text.partition(">")
    entrance, added = _steps(enters), leaves.startswith("+")
    if not entrance:
        raise ValueError(f"expected an argument behind the @ of blocks={pattern!r}: its number from 0, or its name")
    return Stream((int(isinstance(entrance[0], str)), *entrance), _steps(leaves.removeprefix("+")), added)


def _steps(text: str) -> Path:
    return tuple(int(step) if step.isdigit() else step for step in text.split(".")) if text else ()


def modules_named(model: nn.Module, glob: str) -> list[tuple[str, nn.Module]]:
    """The modules whose names a glob fits, part by part."""
    parts = glob.split(".")
    return [
        (name, module)
        for name, module in walking.named_modules(model)
        if len(name.split(".")) == len(parts)
        and all(fnmatchcase(have, want) for have, want in zip(name.split("."), parts, strict=True))
    ]


def spell(model: nn.Module, blocks: Sequence[BlockAnatomy]) -> str:
    """The pattern that names these blocks and their streams, and no others."""
    said = []
    for stream, group in groupby(blocks, key=stream_of):
        said += [glob + stream.spelled for glob in _globs(model, [block.name for block in group])]
    return ",".join(said)


def stream_of(block: BlockAnatomy) -> Stream:
    """Where the tokens of a block of no known family enter and leave."""
    leaves = block.spots["output"]
    return Stream(block.spots["input"].path, leaves.path, leaves.added_to is not None)


def _globs(model: nn.Module, names: list[str]) -> list[str]:
    """One glob, if there is one that fits these names and no others; else the names."""
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    glob = ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)
    return [glob] if [name for name, _ in modules_named(model, glob)] == names else names
