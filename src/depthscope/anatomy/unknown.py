"""Models of no known family: their repeated blocks are found, or the user names them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from depthscope.anatomy.structure import Anatomy, BlockAnatomy, Spot

NOTE = "unknown family: the blocks' inputs and outputs are seen, and attention where its shape shows it"


def named_blocks(model: nn.Module, pattern: str) -> Anatomy:
    """The blocks that a glob such as "encoder.layer.*" names; a "*" does not cross a dot."""
    parts = pattern.split(".")
    found = [
        (name, module)
        for name, module in model.named_modules()
        if len(name.split(".")) == len(parts)
        and all(fnmatchcase(have, want) for have, want in zip(name.split("."), parts, strict=True))
    ]
    if not found:
        some = ", ".join(repr(name) for name, module in model.named_modules() if name and _is_list(module)) or "none"
        raise ValueError(f"no module is named {pattern!r}; lists of modules in this model: {some}")
    return _anatomy(found, f"blocks named by the user: {pattern}")


def repeated_blocks(model: nn.Module) -> Anatomy:
    """The largest list of at least two modules of one class."""
    candidates = [
        (name, module) for name, module in model.named_modules() if _is_list(module) and len(_main_class(module)) > 1
    ]
    if not candidates:
        raise ValueError(
            f"no repeated blocks in {type(model).__name__}: looked for a ModuleList or Sequential with two or more "
            f"modules of one class among {_looked_at(model)}; name them with blocks='path.to.layers.*'"
        )
    name, chosen = max(candidates, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    prefix = f"{name}." if name else ""
    others = [other or "the model" for other, module in candidates if module is not chosen and other not in prefix]
    note = NOTE + (f"; other lists of modules were not measured: {', '.join(others)}" if others else "")
    return _anatomy([(prefix + key, block) for key, block in _main_class(chosen)], note)


def _anatomy(found: list[tuple[str, nn.Module]], note: str) -> Anatomy:
    once = {id(module): (name, module) for name, module in reversed(found)}  # a shared block is hooked once
    blocks = tuple(
        BlockAnatomy(name, module, {"input": Spot(module, "in"), "output": Spot(module, "out")})
        for name, module in reversed(once.values())
    )
    return Anatomy("unknown", blocks, token_axis=_token_axis(blocks), notes=(note,))


def _token_axis(blocks: tuple[BlockAnatomy, ...]) -> int:
    """0 where PyTorch's own attention in the blocks says that the batch comes second."""
    own = [m for block in blocks for m in block.module.modules() if isinstance(m, nn.MultiheadAttention)]
    return 0 if own and not any(attention.batch_first for attention in own) else 1


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _main_class(modules: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of the class that occurs most often and has parameters or children of its own."""
    groups: dict[type, list[tuple[str, nn.Module]]] = {}
    for key, child in modules._modules.items():  # named_children() would drop a block that stands there twice
        if child is None:
            continue
        if any(True for _ in child.children()) or any(True for _ in child.parameters()):
            groups.setdefault(type(child), []).append((key, child))
    return max(groups.values(), key=len, default=[])


def _looked_at(model: nn.Module) -> str:
    names = [f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "no submodules"
