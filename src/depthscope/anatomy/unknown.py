"""Models of no known family: their repeated blocks are found, or the user names them by `blocks=`:

layers.*            every module of that name; a "*" does not cross a dot
layers.*@1>0        the tokens are the second argument, and the first item of what is returned
layers.*@x>tokens   an argument by its name, an item by its key; layers.*@1 if nothing but the tokens is returned
layers.*@0>+        what is returned is added to the tokens by whoever calls the module
first,layers.*@1    several, in the order of the blocks

This is what can be said of a model that has not run. `discovery` looks at a pass, and sees more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import NamedTuple

from torch import nn

from depthscope import walking
from depthscope.anatomy.structure import Anatomy, BlockAnatomy, Path, Spot

NOTE = "unknown family: the blocks' inputs and outputs are seen, and attention where its shape shows it"
MOST = 0.5  # of a stage's parameters, at least, are in its blocks

Named = tuple[str, nn.Module]


# --- how `blocks=` names modules ---------------------------------------------------------------------


class Ends(NamedTuple):
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


def read(pattern: str) -> list[tuple[str, Ends]]:
    """The globs of a pattern, each with its ends."""

    def steps(text: str) -> Path:
        return tuple(int(step) if step.isdigit() else step for step in text.split(".")) if text else ()

    found = []
    for glob, _, ends in (part.strip().partition("@") for part in pattern.split(",")):
        enters, _, leaves = ends.partition(">")
        entrance = steps(enters)
        if ends and not entrance:
            raise ValueError(f"expected an argument after the @ of blocks={pattern!r}: its number from 0, or its name")
        said = Ends()
        if ends:
            where = (int(isinstance(entrance[0], str)), *entrance)
            said = Ends(where, steps(leaves.removeprefix("+")), leaves.startswith("+"))
        found.append((glob, said))
    return found


def modules_named(model: nn.Module, glob: str) -> list[Named]:
    """The modules whose names a glob fits, part by part."""
    parts = glob.split(".")
    named = ((name.split("."), name, module) for name, module in walking.named_modules(model))
    return [
        (name, module)
        for words, name, module in named
        if len(words) == len(parts) and all(map(fnmatchcase, words, parts))
    ]


def spell(model: nn.Module, blocks: Sequence[BlockAnatomy]) -> str:
    """The pattern that names these blocks and their ends, and no others."""
    said: list[str] = []
    for ends, group in groupby(blocks, key=ends_of):
        names = [block.name for block in group]
        columns = zip(*(name.split(".") for name in names), strict=False)
        glob = ".".join(words.pop() if len(words := set(column)) == 1 else "*" for column in columns)
        fits = [name for name, _ in modules_named(model, glob)] == names
        said += [each + ends.spelled for each in ([glob] if fits else names)]
    return ",".join(said)


def ends_of(block: BlockAnatomy) -> Ends:
    """Where the tokens of a block of no known family enter and leave."""
    leaves = block.spots["output"]
    return Ends(block.spots["input"].path, leaves.path, leaves.added_to is not None)


# --- which blocks there are --------------------------------------------------------------------------


def named_blocks(model: nn.Module, pattern: str) -> Anatomy:
    """The blocks that a pattern such as "encoder.layer.*" names."""
    found: list[tuple[str, nn.Module, Ends]] = []
    for glob, ends in read(pattern):
        modules = modules_named(model, glob)
        if not modules:
            lists = ", ".join(repr(name) for name, module in walking.named_modules(model) if name and _is_list(module))
            raise ValueError(f"no module is named {glob!r}; lists of modules in this model: {lists or 'none'}")
        found += [(name, module, ends) for name, module in modules]
    return unknown_anatomy(found, f"blocks named by the user: {pattern}")


def repeated_blocks(model: nn.Module) -> Anatomy:
    """The blocks of the largest list of modules. They may be of several classes."""
    everything = walking.named_modules(model)
    candidates = {name: blocks for name, module in everything if len(blocks := _repeated(name, module)) > 1}
    if not candidates:
        names = [f"{name} ({type(module).__name__})" for name, module in everything if name]
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        raise ValueError(
            f"no repeated blocks in {type(model).__name__}: looked for a ModuleList or Sequential with two or more "
            f"modules of one class among {', '.join(names[:12]) or 'no submodules'}{more}; name them with "
            "blocks='path.to.layers.*'"
        )
    chosen = max(candidates, key=lambda name: size_of([module for _, module in candidates[name]]))
    found = [(name, module, Ends()) for name, module in candidates[chosen]]
    others = [name or "the model" for name in candidates if not (nested(name, chosen) or nested(chosen, name))]
    left_out = (f"other lists of modules were not measured: {', '.join(others)}",) if others else ()
    return replace(unknown_anatomy(found, NOTE), guessed=True, left_out=left_out)


def unknown_anatomy(found: Sequence[tuple[str, nn.Module, Ends]], note: str) -> Anatomy:
    """An anatomy of blocks that show their inputs and outputs alone. A module that is there twice is hooked once.

    Tokens are on axis 0 where PyTorch's own attention in the blocks says that the batch comes second.
    """
    once: dict[int, BlockAnatomy] = {}
    for name, module, ends in found:
        once.setdefault(id(module), BlockAnatomy(name, module, ends.spots(module)))
    inside = (module for block in once.values() for module in walking.modules(block.module))
    own = [module.batch_first for module in inside if isinstance(module, nn.MultiheadAttention)]
    return Anatomy("unknown", tuple(once.values()), token_axis=0 if own and not any(own) else 1, notes=(note,))


def is_solid(module: nn.Module) -> bool:
    """Whether a module could be a block: it has parameters, and is more than one of PyTorch's layers, or of a class
    that is made of one."""
    if any(next(child.parameters(), None) is not None for child in module.children()):
        return True
    kinds = (kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn."))
    own = any(parameter.ndim > 1 for parameter in walking.parameters(module))  # a norm has none
    return own and next(kinds) is nn.Module


def has_parts(module: nn.Module) -> bool:
    """Whether a module is made of more than PyTorch's layers: a block with its attention is, an expert is not."""
    return any(map(is_solid, module.children()))


def nested(inner: str, outer: str) -> bool:
    """Whether a module is part of another, by their names; it is part of itself."""
    return f"{inner}.".startswith(f"{outer}.") or not outer


def size_of(modules: Sequence[nn.Module]) -> int:
    """The number of their parameters, each counted once."""
    return sum({id(p): p.numel() for module in modules for p in walking.parameters(module)}.values())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _repeated(name: str, modules: nn.Module) -> list[Named]:
    """The children of a list of which at least two are of one class: all of them, of whatever class. In a Sequential,
    which may begin with an embedding and end with a head, those from the first to the last that has its like."""
    if not _is_list(modules):
        return []
    prefix = f"{name}." if name else ""
    listed = modules._modules.items()  # named_children() would drop a block that stands there twice
    children = [(prefix + key, child) for key, child in listed if child is not None and is_solid(child)]
    kinds = Counter(type(module) for _, module in children)
    alike = [index for index, (_, module) in enumerate(children) if kinds[type(module)] > 1]
    if not alike:
        return []
    return children[alike[0] : alike[-1] + 1] if isinstance(modules, nn.Sequential) else children


def left_out(modules: Sequence[Named], blocks: Sequence[BlockAnatomy]) -> tuple[str, ...]:
    """A note on lists of modules that look like blocks and stand beside those of known families, among all modules."""
    known = {block.name for block in blocks}
    around = {outer for name in known for outer in ("", *walking.paths_around(name))}
    found: list[str] = []
    for name, module in modules:
        inside = known & {"", *walking.paths_around(name), name}
        if name in around or inside or any(nested(path, name) or nested(name, path) for path in found):
            continue
        alike = [child for _, child in _repeated(name, module)]
        # A block has two matrices or more.
        if len(alike) > 1 and all(sum(p.ndim == 2 for p in walking.parameters(child)) > 1 for child in alike):
            found.append(name)
    return (f"of no known family, and not measured (blocks= names them): {', '.join(found)}",) if found else ()
