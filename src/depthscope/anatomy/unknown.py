"""Models of no known family: their repeated blocks are found, or the user names them.

This is what can be said of a model that has not run. `discovery` looks at a pass, and sees more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from depthscope import walking
from depthscope.anatomy.block_patterns import Stream, modules_named, read
from depthscope.anatomy.structure import Anatomy, BlockAnatomy

NOTE = "unknown family: the blocks' inputs and outputs are seen, and attention where its shape shows it"
MOST = 0.5  # of a stage's parameters, at least, are in its blocks

Named = tuple[str, nn.Module]


def named_blocks(model: nn.Module, pattern: str) -> Anatomy:
    """The blocks that a pattern such as "encoder.layer.*" names; see `block_patterns`."""
    found: list[tuple[str, nn.Module, Stream]] = []
    for glob, stream in read(pattern):
        modules = modules_named(model, glob)
        if not modules:
            lists = ", ".join(repr(name) for name, module in walking.named_modules(model) if name and _is_list(module))
            raise ValueError(f"no module is named {glob!r}; lists of modules in this model: {lists or 'none'}")
        found += [(name, module, stream) for name, module in modules]
    return unknown_anatomy(found, f"blocks named by the user: {pattern}")


def repeated_blocks(model: nn.Module) -> Anatomy:
    """The blocks of the largest list of modules. They may be of several classes, and stand in stages."""
    candidates = {
        name: blocks for name, module in walking.named_modules(model) if len(blocks := _blocks_in(name, module)) > 1
    }
    if not candidates:
        raise ValueError(
            f"no repeated blocks in {type(model).__name__}: looked for a ModuleList or Sequential with two or more "
            f"modules of one class among {_looked_at(model)}; name them with blocks='path.to.layers.*'"
        )
    chosen = max(candidates, key=lambda name: size_of([module for _, module in candidates[name]]))
    found = [(name, module, Stream()) for name, module in candidates[chosen]]
    others = [
        name or "the model"
        for name, modules in candidates.items()
        if not any(nested(a, b) or nested(b, a) for a, _ in modules for b, _ in candidates[chosen])
    ]
    left_out = (f"other lists of modules were not measured: {', '.join(others)}",) if others else ()
    return replace(unknown_anatomy(found, NOTE, left_out), guessed=True)


def unknown_anatomy(found: Sequence[tuple[str, nn.Module, Stream]], note: str, left_out: Sequence[str] = ()) -> Anatomy:
    """An anatomy of blocks that show their inputs and outputs alone. A module that is there twice is hooked once."""
    once: dict[int, BlockAnatomy] = {}
    for name, module, stream in found:
        once.setdefault(id(module), BlockAnatomy(name, module, stream.spots(module)))
    blocks = tuple(once.values())
    return Anatomy("unknown", blocks, token_axis=_token_axis(blocks), notes=(note,), left_out=tuple(left_out))


def _token_axis(blocks: tuple[BlockAnatomy, ...]) -> int:
    """0 where PyTorch's own attention in the blocks says that the batch comes second."""
    own = [m for block in blocks for m in walking.modules(block.module) if isinstance(m, nn.MultiheadAttention)]
    return 0 if own and not any(attention.batch_first for attention in own) else 1


def is_solid(module: nn.Module) -> bool:
    """Whether a module could be a block: it has parameters, and is more than one of PyTorch's layers."""
    if any(next(child.parameters(), None) is not None for child in module.children()):
        return True
    own = any(parameter.ndim > 1 for parameter in walking.parameters(module))  # a norm has none
    return own and not type(module).__module__.startswith("torch.nn.")


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


def _blocks_in(name: str, module: nn.Module) -> list[Named]:
    """The blocks of a list of modules; of a list of stages, those of all its stages."""
    if not _is_list(module):
        return []
    modules = _repeated(name, module)
    inner = [list(_inner_blocks(*stage)) for stage in modules]
    if modules and all(inner) and any(len(blocks) > 1 for blocks in inner):
        return [block for blocks in inner for block in blocks]
    return modules


def _inner_blocks(name: str, stage: nn.Module) -> Iterator[Named]:
    """The blocks of a stage: of a list of modules that it has, and that is most of it."""
    for key, child in stage.named_children():
        blocks = _children(f"{name}.{key}", child) if _is_list(child) else []
        if all(has_parts(module) for _, module in blocks) and size_of(
            [module for _, module in blocks]
        ) >= MOST * size_of([stage]):
            yield from blocks


def _repeated(name: str, modules: nn.Module) -> list[Named]:
    """The children of a list of which at least two are of one class: all of them, of whatever class. In a Sequential,
    which may begin with an embedding and end with a head, those from the first to the last that has its like."""
    children = _children(name, modules)
    kinds = Counter(type(module) for _, module in children)
    alike = [index for index, (_, module) in enumerate(children) if kinds[type(module)] > 1]
    if not alike:
        return []
    return children[alike[0] : alike[-1] + 1] if isinstance(modules, nn.Sequential) else children


def _children(name: str, modules: nn.Module) -> list[Named]:
    prefix = f"{name}." if name else ""
    children = modules._modules.items()  # named_children() would drop a block that stands there twice
    return [(prefix + key, child) for key, child in children if child is not None and is_solid(child)]


def _looked_at(model: nn.Module) -> str:
    names = [f"{name} ({type(module).__name__})" for name, module in walking.named_modules(model) if name]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "no submodules"


def left_out(modules: Sequence[Named], blocks: Sequence[BlockAnatomy]) -> tuple[str, ...]:
    """A note on lists of modules that look like blocks and stand beside those of known families, among all modules."""
    known = {block.name for block in blocks}
    around = {outer for name in known for outer in ("", *walking.paths_around(name))}
    found: list[str] = []
    for name, module in modules:
        if not _is_list(module) or name in around or not known.isdisjoint(("", *walking.paths_around(name), name)):
            continue
        if any(nested(path, name) or nested(name, path) for path in found):
            continue
        alike = _repeated(name, module)
        if len(alike) > 1 and all(_is_deep(child) for _, child in alike):
            found.append(name)
    return (f"of no known family, and not measured (blocks= names them): {', '.join(found)}",) if found else ()


def _is_deep(module: nn.Module) -> bool:
    """Whether it has two matrices or more, as a block has."""
    return sum(parameter.ndim == 2 for parameter in walking.parameters(module)) > 1
