"""Who masks the tokens of a block: whether what is known of its causality can be believed without trying.

A library's layer does not know what it is given. `BertLayer` is bidirectional because `BertModel`, which calls it,
makes such a mask; in somebody else's module the same layer may be given a causal one. So "not causal" is believed only
of a block that is reached from a whole model of its library through the library's own modules, all of them as the
library wrote them: no forward of its own on an instance, no hook of somebody else's. "Causal" is always believed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from inspect import isroutine
from typing import Any

from torch import nn

from depthscope import walking
from depthscope.anatomy import FAMILIES, Anatomy, BlockAnatomy
from depthscope.hooks.staying import Hook

# Their hooks move weights and gradients, or listen, and make no masks.
MACHINERY = ("torch", "transformers", "accelerate", "deepspeed", "depthscope")
WHOLE = "save_pretrained"  # what a whole model of transformers has, and its encoders and layers have not


def believed(model: nn.Module, anatomy: Anatomy) -> Anatomy:
    """The anatomy with "not causal" taken back to "not known" in the parts where somebody else may mask the tokens.

    The same holds for PyTorch's layers, whose calls say whether they are causal: not if something stands between the
    call and the attention.
    """
    if anatomy.family == "unknown":
        return anatomy
    doubted = {block.part for block in anatomy.blocks if _is_doubted(model, anatomy, block)}
    unsettled = anatomy.causal is False and bool(doubted)  # what is true of the whole is said of the other parts
    blocks = []
    for block in anatomy.blocks:
        if block.part in doubted:
            block = replace(block, causal_arguments={}, causal=True if block.causal else None)
        elif unsettled and block.causal is None:
            block = replace(block, causal=False)
        blocks.append(block)
    return replace(anatomy, blocks=tuple(blocks), causal=None if unsettled else anatomy.causal)


def _is_doubted(model: nn.Module, anatomy: Anatomy, block: BlockAnatomy) -> bool:
    inside = _down_to_attention(block)
    if block.causal_arguments:
        return _has_own_forward(block.module) or not all(map(_is_as_written, inside[1:]))
    if (anatomy.causal if block.causal is None else block.causal) is not False:
        return False
    library = _library_of(anatomy, block)
    return entrance_of(model, anatomy, block) is None or not all(_is_theirs(module, library) for module in inside)


def entrance_of(model: nn.Module, anatomy: Anatomy, block: BlockAnatomy) -> nn.Module | None:
    """The outermost whole model of its library that a block is reached from through nothing but the library's own
    modules; None if there is none. What it is given, it is given by somebody else."""
    if anatomy.family == "unknown":
        return None
    found, library = None, _library_of(anatomy, block)
    for module in reversed(walking.way_to(model, block.name)):
        if not _is_theirs(module, library):
            break
        kind: Any = type(module)  # it has no hash, for mypy
        if hasattr(module, WHOLE) or (library != "transformers" and not _wrote(kind, "torch")):
            found = module
    return found


def is_wrapped(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether somebody else's module stands around a whole model of a library, and may give it masks."""
    return any(entrance_of(model, anatomy, block) is not model for block in anatomy.blocks)


def _down_to_attention(block: BlockAnatomy) -> list[nn.Module]:
    """The block, and what stands around its attention in it, down to the attention; the whole of a block that does not
    show it."""
    inside = walking.modules(block.module)
    if block.attention is None:
        return inside
    return [module for module in inside if module is block.module or block.attention in walking.modules(module)]


def _library_of(anatomy: Anatomy, block: BlockAnatomy) -> str:
    return FAMILIES[block.family or anatomy.family].library


def _is_theirs(module: nn.Module, library: str) -> bool:
    """Whether a module is as the library wrote it."""
    kind: Any = type(module)
    return _wrote(kind, library) and _is_as_written(module)


@cache
def _wrote(kind: Any, library: str) -> bool:
    """Whether a library wrote a class, or PyTorch, whose containers hand on what they are given. A subclass that puts
    no function in the place of one of theirs, but to build itself, is theirs too."""
    own: dict[str, Any] = {}
    for parent in kind.__mro__:
        if _package(parent) in (library, "torch"):
            return not any(
                hasattr(parent, name) and (isroutine(value) or isinstance(value, property | classmethod | staticmethod))
                for name, value in own.items()
            )
        own |= {name: value for name, value in vars(parent).items() if name != "__init__"}
    return False


def _is_as_written(module: nn.Module) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return not _has_own_forward(module) and all(map(_is_harmless, hooks))


def _has_own_forward(module: nn.Module) -> bool:
    """Whether somebody has put a function in the place of its forward; accelerate, which moves weights so, keeps it."""
    own = module.__dict__.get("_old_forward" if "_hf_hook" in module.__dict__ else "forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _is_harmless(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return isinstance(hook, Hook) or _package(hook if hasattr(hook, "__qualname__") else type(hook)) in MACHINERY


def _package(item: Any) -> str:
    return str(getattr(item, "__module__", "")).split(".")[0]
