"""A model without its skips, FFNs, norms or blocks: values on the pass machine, its weights untouched.

    with depthscope.ablate(model, "skips", "ffn"):
        model(inputs)

At a residual sum the machine knows the trunk, the branch and what the model made of them, and puts there what the block
would have without the part. A branch that a module shows is taken as it is, so that nothing is lost to cancellation
however small it is beside the trunk; it is compared with what the model has added. Where no module shows it (XLNet's
attention, Granite's weighted branches, dropout in training) it is the difference of the two, which has the rounding of
the trunk. What is left out is still computed, and thrown away.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from depthscope import walking
from depthscope.anatomy import Addition, Anatomy
from depthscope.hooks.left_out import (
    in_words,
    linears_of,
    norms_of,
    refuse_what_cannot_be,
    removed_skips,
    width_read,
)
from depthscope.hooks.machine import AnySite, Change, Listen, Machine, Visit
from depthscope.hooks.staying import hooks_in
from depthscope.hooks.tokens import exchange, first_tokens
from depthscope.stations import BRANCHES
from depthscope.undoing import TemporaryHook, unhook

ROUNDING = 16  # machine epsilons of the largest term: the trunk of a pre-norm block is mended by two more sums
_SKIP_OF = {
    "attention_branch": "attention_skip",
    "cross_attention_branch": "cross_attention_skip",
    "ffn_branch": "ffn_skip",
}


def pass_on(visit: Visit) -> Tensor:
    """What leaves a block that is left out: what entered it."""
    return visit.entered


def leave_out(blocks: Container[int]) -> Change:
    """A change by which these blocks pass their input on."""
    return Change("output", lambda visit, _tokens: pass_on(visit) if visit.number in blocks else None)


def open_surgery(model: nn.Module) -> Surgery | None:
    """What leaves parts out of this model now; None: the model is whole."""
    for module in walking.modules(model):
        if module._forward_pre_hooks or module._forward_hooks:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                if isinstance(owner := getattr(hook, "owner", None), Surgery):
                    return owner
    return None


class Surgery(Machine):
    """A machine that leaves parts out of every block that runs while it is open, and some blocks as a whole."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, parts: Sequence[str], blocks: frozenset[int] = frozenset()):
        self.parts, self.blocks = tuple(parts), blocks
        self.skips = removed_skips(parts)
        self.by_difference: set[str] = set()  # branches that no module shows as they are added
        self._heard: dict[str, Tensor] = {}  # in the block that runs
        self._of: Visit | None = None
        self._trunk: Tensor | None = None  # what the last sum of that block has become
        refuse_what_cannot_be(anatomy, parts)
        _refuse_a_changed(model)
        super().__init__(model, anatomy, *self._sites(anatomy))

    @property
    def named(self) -> str:
        """What is left out, in words."""
        numbers = ", ".join(map(str, sorted(self.blocks)))
        blocks = [f"block{'s' if len(self.blocks) > 1 else ''} {numbers}"] if numbers else []
        return " and ".join([*([in_words(self.parts)] if self.parts else []), *blocks])

    @property
    def notes(self) -> list[str]:
        """What a reader must know of numbers that were taken meanwhile."""
        found = [f"measured without its {self.named}: this is not the model as it is"]
        if self.by_difference:
            named = ", ".join(sorted(self.by_difference))
            found.append(f"no module shows {named} as it is added: taken as a difference, with the trunk's rounding")
        return found

    def _sites(self, anatomy: Anatomy) -> list[AnySite]:
        """Listening where trunk and branches are seen, a change at every sum; none where no sum is touched."""
        whole: list[AnySite] = [leave_out(self.blocks)] if self.blocks else []
        if not {*self.parts} - {"norms", "ffn_linears"}:
            return whole
        sums = [addition for block in anatomy.blocks for addition in block.all_additions]
        heard = {*BRANCHES, *(addition.trunk for addition in sums)}
        results = dict.fromkeys(addition.result for addition in sums)
        sites: list[AnySite] = [Listen(heard - {"input"}, self._hear)]
        sites += [Change(result, partial(self._sum, result)) for result in results]
        if "ffn_step" in self.parts and "after_ffn" in results:
            sites.append(Change("output", self._leave))
        return sites + whole

    def _attach_all(self) -> None:
        """Norms and layers that pass their input on come first, so that all other hooks see what they pass."""
        norms = [norm for block in self.anatomy.blocks for norm in norms_of(block)] if "norms" in self.parts else []
        layers = [layer for block in self.anatomy.blocks for layer in linears_of(block)]
        layers = layers if "ffn_linears" in self.parts else []
        for module in {id(module): module for module in norms + layers}.values():
            passing = _PassOn(self)
            module.register_forward_hook(passing, with_kwargs=True)
            if module in layers:
                module.register_forward_pre_hook(_Take(passing), with_kwargs=True)
        super()._attach_all()

    def _close(self) -> None:
        super()._close()
        unhook(self.model, lambda hook: isinstance(hook, _PassOn | _Take) and hook.owner is self)
        self._of = self._trunk = None
        self._heard.clear()

    # --- while a block runs --------------------------------------------------------------------------

    def _begin(self, visit: Visit) -> None:
        if visit is not self._of:
            self._of, self._trunk = visit, None
            self._heard.clear()

    def _hear(self, visit: Visit, station: str, _tokens: Tensor, source: Tensor) -> None:
        self._begin(visit)
        adds_in_place = visit.block.placement == "parallel"  # Falcon adds one branch into the other
        self._heard[station] = source.clone() if adds_in_place else source

    def _sum(self, station: str, visit: Visit, total: Tensor) -> Tensor | None:
        """What stands at a residual sum without what is left out; None: what the model has there."""
        self._begin(visit)
        addition = next((each for each in visit.block.all_additions if each.result == station), None)
        if addition is None:  # of another block's placement
            return None
        trunk = self._trunk_of(visit, addition).reshape(total.shape)
        branches = [addition.branch] if addition.beside is None else [addition.branch, addition.beside]
        without_ffn = bool({"ffn", "ffn_step"}.intersection(self.parts))
        is_whole = self._trunk is None  # no earlier sum of this block's trunk has been changed
        is_cut = "skips" in self.parts if addition.beside is not None else _SKIP_OF[addition.branch] in self.skips
        drops = without_ffn and "ffn_branch" in branches
        if not is_cut and not drops and is_whole:
            return self._remember(visit, None)
        if drops and addition.beside is None:
            return self._remember(visit, trunk)
        added = self._added(visit, branches, trunk, total, leave="ffn_branch" if drops else None)
        return self._remember(visit, added if is_cut else trunk + added)

    def _remember(self, visit: Visit, new: Tensor | None) -> Tensor | None:
        """Where the trunk is a plain sum, the next sum starts from what this one has become."""
        if visit.block.placement != "post" and new is not None:
            self._trunk = new
        return new

    def _trunk_of(self, visit: Visit, addition: Addition) -> Tensor:
        if addition.trunk == "input":
            return visit.entered
        return self._trunk if self._trunk is not None else self._heard[addition.trunk]

    def _added(self, visit: Visit, branches: list[str], trunk: Tensor, total: Tensor, leave: str | None) -> Tensor:
        """What the model adds to the trunk, but for the branch to leave out: as modules show it, else a difference."""
        shown = {name: self._heard[name].reshape(total.shape) for name in branches if name in self._heard}
        if len(shown) == len(branches):
            terms = [trunk, visit.entered.reshape(total.shape), *shown.values(), total]
            if _is_sum([trunk, *shown.values()], total, terms):
                kept = [branch for name, branch in shown.items() if name != leave]
                return kept[0] if len(kept) == 1 else kept[0] + kept[1]
        if leave is not None:
            raise ValueError(f"{visit.block.name!r} does not show its branches as it adds them: without ffn cannot be")
        self.by_difference.update(branches)
        return total - trunk

    def _leave(self, visit: Visit, tokens: Tensor) -> Tensor | None:
        """The end of a post-norm block whose FFN step is left out with its norm."""
        if visit.block.placement != "post":
            return None
        return self._heard["ffn_input"].reshape(tokens.shape)


def refuse_open_surgery(model: nn.Module) -> None:
    """What is measured or put in while parts are left out would be of another model."""
    if (before := open_surgery(model)) is not None:
        raise ValueError(f"the model is without its {before.named} now: close depthscope.ablate first")


def _refuse_a_changed(model: nn.Module) -> None:
    if any(hook.remedy is not None for _, hook in hooks_in(model)):
        raise ValueError("the model has remedies, whose effect could not be told apart: depthscope.remove(model)")
    if (before := open_surgery(model)) is not None:
        raise ValueError(f"the model is without its {before.named} already: name all that is left out at once")


def _is_sum(summands: list[Tensor], total: Tensor, terms: list[Tensor]) -> bool:
    """Whether the total is the sum, to the rounding of the largest term; what is not finite cannot be told, and is."""
    with torch.no_grad():
        largest = max(float(term.abs().max()) for term in terms)
        apart = float((sum(summands[1:], summands[0]) - total).abs().max())
    return not apart > ROUNDING * torch.finfo(total.dtype).eps * largest


class _PassOn(TemporaryHook):
    """A module returns what it was given, as other hooks have changed it."""

    def __init__(self, owner: Surgery):
        super().__init__(lambda: None)
        self.owner = owner
        self.given: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Any:
        if self.owner.thread != get_ident():
            return None
        given = first_tokens((args, kwargs)) if self.given is None else self.given
        self.given = None
        if given is None:
            raise ValueError(f"expected tokens to pass by {type(module).__name__}, got none")
        return given


class _Take(TemporaryHook):
    """What a linear layer is given is kept for its return, and the layer computes on zeros of the width it reads."""

    def __init__(self, passing: _PassOn):
        super().__init__(lambda: None)
        self.owner, self.passing = passing.owner, passing

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = first_tokens((args, kwargs))
        width = width_read(module)
        if self.owner.thread != get_ident() or given is None or width is None:
            return None
        self.passing.given = given
        return exchange((args, kwargs), given, given.new_zeros(1).expand(*given.shape[:-1], width))
