"""The parts of a model that has several trunks: encoder and decoder, vision and text. Found by where blocks stand.

Blocks whose paths differ in numbers only are one trunk. A trunk's root is the outermost module that has it alone, and
its name is that module's: `vision_tower` is "vision", `model.decoder` is "decoder".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from depthscope.anatomy.structure import BlockAnatomy
from depthscope.walking import paths_around

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
    in_order = sorted(trunks, key=lambda trunk: _runs_later(names[trunk]))  # else as they stand in the model
    return tuple(_renamed(block, names[trunk], trunks[trunk]) for trunk in in_order for block in trunks[trunk])


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


def _shared(path: list[str], other: list[str]) -> int:
    """How many words two paths have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), min(len(path), len(other)))


def _names(roots: dict[str, list[str]]) -> dict[str, str]:
    """Trunk → name: the root's path without what all have in common, in short if the short names differ."""
    common = 0
    while (
        all(len(root) > common + 1 for root in roots.values()) and len({root[common] for root in roots.values()}) == 1
    ):
        common += 1
    long = {trunk: root[common:] for trunk, root in roots.items()}
    short = {trunk: ".".join(map(_short, root)) for trunk, root in long.items()}
    return short if len(set(short.values())) == len(short) else {trunk: ".".join(root) for trunk, root in long.items()}


def _short(name: str) -> str:
    return next((name.removesuffix(kind) for kind in _KINDS if name.endswith(kind) and name != kind), name)


def _runs_later(name: str) -> bool:
    return any(word in _LATER for word in name.replace(".", "_").split("_"))


def _renamed(block: BlockAnatomy, trunk: str, beside: list[BlockAnatomy]) -> BlockAnatomy:
    """A trunk of several parts of its own, as stages are, keeps their names after its own."""
    several = len({other.part for other in beside}) > 1
    return replace(block, part=f"{trunk} {block.part}" if several else trunk)


def without_nested(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Blocks that stand inside other blocks belong to these."""
    names = {name for name, _ in found}
    return [(name, module) for name, module in found if not any(around in names for around in paths_around(name))]
