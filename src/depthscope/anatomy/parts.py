"""The parts of a model that has several trunks: encoder and decoder, vision and text. Found by where blocks stand.

Blocks whose paths differ in numbers only are one trunk. A trunk's root is the outermost module that has it alone, and
its name is that module's: `vision_tower` is "vision", `model.decoder` is "decoder".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from depthscope.anatomy.structure import BlockAnatomy

_KINDS = ("_model", "_tower", "_encoder", "_backbone", "_transformer")  # a name says the same without
_LATER = ("text", "language", "decoder", "lm", "llm")  # what reads text or another part runs after the others


def in_parts(blocks: Sequence[BlockAnatomy]) -> tuple[BlockAnatomy, ...]:
    """The blocks with the names of their parts, in the order in which the parts run."""
    trunks: dict[str, list[BlockAnatomy]] = {}
    for block in blocks:
        trunks.setdefault(_trunk(block.name), []).append(block)
    if len(trunks) == 1:
        return tuple(blocks)
    names = _names({trunk: _root(trunk, trunks) for trunk in trunks})

    def runs_later(trunk: str) -> bool:
        return not {*_LATER}.isdisjoint(names[trunk].replace(".", "_").split("_"))

    found = []
    for trunk in sorted(trunks, key=runs_later):  # else as they stand in the model
        several = len({block.part for block in trunks[trunk]}) > 1  # parts of its own, as stages are
        for block in trunks[trunk]:
            found.append(replace(block, part=f"{names[trunk]} {block.part}" if several else names[trunk]))
    return tuple(found)


def roots_of(blocks: Iterable[BlockAnatomy]) -> frozenset[str]:
    """The paths of the modules that have one trunk alone; none where there is one trunk only."""
    trunks = dict.fromkeys(_trunk(block.name) for block in blocks)
    return frozenset(".".join(_root(trunk, trunks)) for trunk in trunks) if len(trunks) > 1 else frozenset()


def _trunk(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _root(trunk: str, all_trunks: Iterable[str]) -> list[str]:
    """The shortest path that leads to this trunk and to no other."""
    own = trunk.split(".")
    return own[: 1 + max(_shared(own, other.split(".")) for other in all_trunks if other != trunk)]


def _shared(*paths: list[str]) -> int:
    """How many words all paths have in common at their beginning."""
    columns = enumerate(zip(*paths, strict=False))
    return next((number for number, words in columns if len(set(words)) > 1), min(map(len, paths)))


def _names(roots: dict[str, list[str]]) -> dict[str, str]:
    """Trunk → name: the root's path without what all have in common, in short if the short names differ."""
    common = min(_shared(*roots.values()), min(map(len, roots.values())) - 1)
    long = {trunk: root[common:] for trunk, root in roots.items()}
    short = {trunk: ".".join(map(_short, root)) for trunk, root in long.items()}
    return short if len(set(short.values())) == len(short) else {trunk: ".".join(root) for trunk, root in long.items()}


def _short(name: str) -> str:
    return next((name.removesuffix(kind) for kind in _KINDS if name.endswith(kind) and name != kind), name)
