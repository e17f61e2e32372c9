"""Finds the mask of real tokens, wherever a model takes it.

The modules around the blocks, from the model itself to each block, are asked for the arguments of their call. Of those
that a block stands in, the innermost that is given a mask counts: a wrapper may give it another name. What an argument
is, is said by its name (`mask_names.py`), by its shape, (batch, n) or (batch, 1, 1, n), and by its values: numbers may
be 0 and 1, or 0 and large negative ones that are added to the scores. A mask that is not understood is named in
`unused`, and the user can say what marks the real tokens (`Anatomy.mask_hint`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthscope import walking
from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.inputs.mask_names import Names, is_cross, is_padding, looks_like_a_mask, meant_for, side_of
from depthscope.safety import ByThread

LARGE = 100.0  # of what is added to scores: Swin takes −100, BERT −10 000, others the largest number there is


class Candidate(NamedTuple):
    """What may be a mask, in the call of a module around the blocks."""

    path: str
    name: str
    value: Tensor


class Level(NamedTuple):
    """A module around a block, and which of its arguments would be masks of this block's tokens, or of others."""

    path: str
    names: Names


class MasksSeen(ByThread):
    """The masks of the pass that runs in this thread."""

    def __init__(self) -> None:
        self.masks: dict[str, dict[str, Tensor | None]] = {}  # by the path of the module that was given them
        self.readable: dict[int, bool] = {}  # by the id of a tensor
        self.some = False  # whether any module was given any
        self.real: dict[tuple[int, bool], tuple[Tensor, int, Tensor]] = {}  # by the same: itself, its version, `_real`


class MaskFinder:
    """Remembers the masks of the running pass.

    It holds names and numbers only, so that it can be copied, pickled and traced by `torch.compile` together
    with the model that it listens to.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.hint = anatomy.mask_hint
        self.argument = self.hint.removeprefix("~") if isinstance(self.hint, str) else anatomy.mask_argument or ""
        self.unused: set[str] = set()  # arguments that look like masks and were not understood
        blocks = {id(block.module) for block in anatomy.blocks}  # also those that are made from a list of modules
        found: dict[str, nn.Module] = {}
        for block in anatomy.blocks:
            found.update(zip(_paths_around(block), walking.way_to(model, block.name), strict=True))
        modules = {
            path: found[path] for path in sorted(found) if id(found[path]) in blocks or not _is_list(found[path])
        }
        self.around = list(dict.fromkeys(modules.values()))
        self._positions = {
            module: {name: i for i, name in enumerate(_parameters(module)[0]) if self._is_asked_for(name)}
            for module in self.around
        }
        self._path_of = {module: path for path, module in reversed(modules.items())}  # the first, if it has several
        self._blocks = {path for path, module in modules.items() if id(module) in blocks}
        # Elsewhere a mask of two axes is (batch, n) by the word of the library that the class comes from.
        own = ("transformers", "depthscope")
        self._strangers = {path for path, m in modules.items() if type(m).__module__.split(".")[0] not in own}
        self._levels = {  # from the block outwards
            block.name: [
                Level(self._path_of[modules[path]], self._names(modules[path], block, path))
                for path in reversed(_paths_around(block))
                if path in modules
            ]
            for block in anatomy.blocks
        }
        beside = [m for around in self.around for m in around.children() if not _is_list(m) and m not in self.around]
        self._taken_elsewhere = {name for module in beside for name in _parameters(module)[0]}
        self._is_one_trunk = len(anatomy.parts) <= 1  # of several, a mask that one is not handed is another's
        self._seen = MasksSeen()

    def anew(self) -> MaskFinder:
        """As it is before any pass; what is known of the modules is shared."""
        other = copy.copy(self)
        other.unused, other._seen = set(), MasksSeen()
        return other

    def _is_asked_for(self, name: str) -> bool:
        return name == self.argument or looks_like_a_mask(name)

    def _names(self, module: nn.Module, block: BlockAnatomy, path: str) -> Names:
        below = "" if block.name == path else block.name.removeprefix(f"{path}." if path else "")
        names = set(self._positions[module])
        if _parameters(module)[1] or not names:  # it may be among **kwargs, or in a dictionary of inputs
            names |= {"attention_mask", self.argument}
        before, inside_decoder, _ = f".{below}.".partition(".decoder.")
        has_encoder = bool(inside_decoder) and isinstance(
            getattr(module.get_submodule(before.strip(".")), "encoder", None), nn.Module
        )
        found = meant_for(names, self.argument, below, has_encoder)
        child, _, rest = below.partition(".")
        if not rest or _is_list(module.get_submodule(child)):
            return found
        # Of several towers, those that take the argument are given it.
        siblings = [m for name, m in module.named_children() if name != child and not _is_list(m)]
        elsewhere = {name for sibling in siblings for name in _parameters(sibling)[0]}
        not_mine = (found.own & elsewhere) - set(_parameters(module.get_submodule(child))[0])
        return Names(found.own - not_mine, found.others | not_mine)

    # --- during a pass --------------------------------------------------------------------------------

    def begin(self) -> None:
        seen = self._seen
        for known in (seen.masks, seen.readable, seen.real):
            known.clear()
        seen.some = False

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One of the modules around the blocks is called."""
        path, positions = self._path_of[module], self._positions[module]
        named = {name: v for value in args if isinstance(value, Mapping) for name, v in value.items()} | kwargs
        given: dict[str, Any] = {}
        for name, position in positions.items():
            if name in named:
                given[name] = named[name]
            elif position < len(args):
                given[name] = args[position]
            elif path not in self._blocks:
                given[name] = None
        for name, value in named.items():  # what a forward with **kwargs passes on, or a dictionary of inputs holds
            if name not in positions and isinstance(name, str) and self._is_asked_for(name):
                given[name] = value
        masks = {name: v for name, v in given.items() if v is None or isinstance(v, Tensor)}
        self._seen.masks[path] = masks
        self._seen.some = self._seen.some or any(value is not None for value in masks.values())

    def real(self, block: str, batch: int, n: int, *, past: int = 0) -> Tensor | None:
        """True for real tokens, (batch, n), or (batch, past + n) if it covers cached tokens too; None if all are."""
        if self.hint is not None:
            return self._as_said(block, batch, n, past)
        if not self._seen.some:
            return None
        masks = self._masks_of(block)
        flat = [mask for mask in masks if mask.value.ndim == 2 and not self._is_of_pairs(mask, batch, n)]
        fitting = [mask for mask in flat if _fits(mask.value, batch, n, past)]
        rows = [mask._replace(value=mask.value[:, 0, 0]) for mask in masks if _is_row(mask.value)]
        fitting += [mask for mask in rows if n > 1 and _fits(mask.value, batch, n, 0)]
        if flat and not fitting:  # the model has added tokens, or put several inputs together
            fitting = [mask._replace(value=row) for mask in masks if (row := _row_of(mask.value, batch, n)) is not None]
        if fitting:
            return self._same_real(fitting[0].value, padding=is_padding(fitting[0].name))
        if flat:
            raise _misfit(flat[0], batch, n)
        return None

    def _same_real(self, value: Tensor, *, padding: bool) -> Tensor:
        """The very same tensor for all blocks that are given the same mask: what is made of it is then made once."""
        if torch.compiler.is_compiling() or value.is_inference():
            return _real(value, padding=padding)
        known = self._seen.real.get((id(value), padding))
        if known is None or known[0] is not value or known[1] != value._version:
            known = self._seen.real[id(value), padding] = value, value._version, _real(value, padding=padding)
        return known[2]

    def _masks_of(self, block: str) -> list[Candidate]:
        """What may be the mask of a block's tokens, from the block outwards."""
        found: list[Candidate] = []
        settled: set[str] = set()  # names of which a module around the block was told that there is none: it is not
        # handed on (RWKV), which is said, since the user may have meant these tokens
        for path, names in self._levels[block]:
            given = self._seen.masks.get(path, {})
            nothing_else = all(value is None or is_cross(name) for name, value in given.items())
            for name, value in given.items():
                if value is None:
                    if name in names.own and nothing_else and path not in self._blocks:
                        settled.add(name)
                elif name not in settled and self._may_be_real(Candidate(path, name, value), names):
                    found.append(Candidate(path, name, value))
                elif name in settled and not path and value.ndim == 2 and self._is_one_trunk:
                    self.unused |= {name} - self._taken_elsewhere
        return found

    def _may_be_real(self, mask: Candidate, names: Names) -> bool:
        """Whether to read it as a mask of real tokens, if its shape fits; else it is named, if it looks like one."""
        path, name, value = mask
        if name in names.others or is_cross(name):
            return False
        if name not in names.own:
            is_length = value.ndim == 1 and not value.is_floating_point()
            if value.ndim == 2 or is_length or (not path and value.ndim > 2):  # in the model's own call also of pairs
                self.unused.add(name)
            # One row of numbers per sequence is multiplied with what is seen, or added to it: 0 or −∞ is hidden.
            return _is_row(value) and value.dtype != torch.bool and not side_of(name) and "pad" not in name
        if value.ndim == 2 and value.is_floating_point() and not torch.compiler.is_compiling():
            if id(value) not in self._seen.readable:
                self._seen.readable[id(value)] = _is_readable(mask)
            if not self._seen.readable[id(value)]:
                self.unused.add(name)
                return False
        if not path and value.ndim > 2 and not _is_row(value):
            self.unused.add(name)
        return value.ndim in (2, 4)

    def _is_of_pairs(self, mask: Candidate, batch: int, n: int) -> bool:
        """Whether a mask (n, n) says which token sees which; where it could be either, it is refused."""
        path, name, value = mask
        if tuple(value.shape) != (n, n) or n == 1 or path not in self._strangers or is_padding(name):
            return False
        if batch == n:
            raise ValueError(
                f"{name} is {(n, n)}, and the tokens are {n} sequences of {n}: it may be a mask of pairs of tokens. "
                f"If it marks real tokens, say mask={name!r}; if not, give another number of sequences"
            )
        self.unused.add(name)
        return True

    def _as_said(self, block: str, batch: int, n: int, past: int) -> Tensor:
        """What the user says: true for real tokens, or the argument that has it, from the model's call inwards."""
        name, is_padding = self.argument, False
        if isinstance(self.hint, Tensor):
            name, value = "mask=", self.hint
        else:
            is_padding = str(self.hint).startswith("~")
            given = [self._seen.masks.get(path, {}).get(name) for path, _ in reversed(self._levels[block])]
            masks = [value for value in given if value is not None]
            if not masks:
                raise ValueError(f"mask={self.hint!r}: no module around {block!r} was given an argument {name!r}")
            value = masks[0][:, 0, 0] if _is_row(masks[0]) else masks[0]
            if value.ndim == 1 and value.shape[0] == batch and not value.is_floating_point():  # lengths
                return torch.arange(n, device=value.device) < value.unsqueeze(-1)
        if not _fits(value, batch, n, past):
            raise _misfit(Candidate("", name, value), batch, n)
        return _real(value, padding=is_padding)


def _real(value: Tensor, *, padding: bool) -> Tensor:
    """True for real tokens, by what the numbers are; without a question that a compiled graph could not answer."""
    if padding:
        return value == 0  # PyTorch turns a mask of padding into 0 and −inf before its layers see it
    if not value.is_floating_point():
        return value != 0
    added = (value.abs() >= LARGE).any() | ~(value > 0).any()
    return torch.where(added, value >= 0, value != 0)


def _is_readable(mask: Candidate) -> bool:
    """Whether the numbers are 0 and 1, or 0 and large ones that are added: negative for what is hidden, in Longformer
    also positive for global tokens."""
    path, name, value = mask
    if not path and not value.any() and not is_padding(name):
        raise ValueError(
            f"{name} is 0 everywhere, which is ambiguous: a mask of padding, or one that is added to scores? "
            "Pass 1 for real tokens, or say mask="
        )
    large = value.abs() >= LARGE
    return bool(((value == 0) | (value == 1)).all() | ((value == 0) | large).all())


def _is_row(value: Tensor) -> bool:
    """(batch, 1, 1, n): the same for every head and every query."""
    return value.ndim == 4 and value.shape[1] == value.shape[2] == 1


def _row_of(value: Tensor, batch: int, n: int) -> Tensor | None:
    """(batch, n) of a mask of pairs (batch, 1, n, n) that hides the same tokens from every query; else None."""
    if torch.compiler.is_compiling() or tuple(value.shape) != (batch, 1, n, n):
        return None
    return value[:, 0, 0] if bool((value == value[:, :, :1]).all()) else None


def _fits(value: Tensor, batch: int, n: int, past: int) -> bool:
    return value.ndim == 2 and value.shape[0] == batch and value.shape[1] in (n, past + n)


def _misfit(mask: Candidate, batch: int, n: int) -> ValueError:
    had, want = tuple(mask.value.shape), (batch, n)
    return ValueError(f"{mask.name} is {had}, but the tokens of the blocks are {want}; mask= says which are real")


def _parameters(module: nn.Module) -> tuple[tuple[str, ...], bool]:
    """The names of what a module's forward takes, and whether it takes **kwargs."""
    method = getattr(module.forward, "__func__", None)
    if method is None:  # somebody has put a function in its place
        return _parameters_of.__wrapped__(module.forward)
    names, passes_on = _parameters_of(method)
    return names[1:], passes_on


@cache
def _parameters_of(function: Any) -> tuple[tuple[str, ...], bool]:
    found = inspect.signature(function).parameters
    return tuple(found), any(p.kind is p.VAR_KEYWORD for p in found.values())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _paths_around(block: BlockAnatomy) -> list[str]:
    """From the model's own, the empty one, to the block's."""
    return ["", *walking.paths_around(block.name), block.name] if block.name else [""]
