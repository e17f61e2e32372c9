"""A model without its skips, FFNs, norms or blocks: `depthscope.ablate`, `probe --without` and the studies rest on it.

    with Ablation(model, anatomy, ("skips", "ffn")):
        model(inputs)

Dong, Cordonnier & Loukas 2021 (arXiv 2103.03404) compare a network of attention alone with ones that also have skips
or MLPs. What "without an MLP" means has several readings; each has a name here:

| name                   | what is left out                                                                           |
| ---------------------- | ------------------------------------------------------------------------------------------ |
| `skips`                | every skip below: a branch takes the place of trunk + branch                               |
| `attention_skip`       | that of attention; what leaves the sum is attention's branch alone                         |
| `cross_attention_skip` | that of attention to an encoder                                                            |
| `ffn_skip`             | that of the FFN                                                                            |
| `ffn`                  | the FFN's branch: the trunk passes on as it is; in post-norm the norm after it stays       |
| `ffn_step`             | the FFN's branch, skip and norm: what enters the FFN leaves the block (the authors' BERT   |
|                        | and XLNet). Where no norm stands on the trunk it is the same as `ffn`                      |
| `ffn_linears`          | the FFN's linear layers alone: its activation, skip and norm stay (the authors' ALBERT)    |
| `norms`                | the norms of trunk and branches, gain and bias included: each passes its input on.         |
|                        | Norms inside attention (of queries and keys) and after the last block stay                 |

A step without its FFN has nothing but its skip: `skips` leaves that one in, and `ffn` with `ffn_skip` is refused.

At a residual sum the machine knows the trunk, the branch and what the model made of them, and puts there what the block
would have without the part. A branch that a module shows is taken as it is, so that nothing is lost to cancellation
however small it is beside the trunk; it is compared with what the model has added. Where no module shows it (XLNet's
attention, Granite's weighted branches, dropout in training) it is the difference of the two, which has the rounding of
the trunk. What is left out is still computed, and thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.hooks.machine import Act, Change, Listen, Machine, Visit
from depthscope.hooks.staying import hooks_in
from depthscope.hooks.tokens import exchange, first_tokens
from depthscope.naming import unknown_name
from depthscope.safety import TemporaryHook, hooks_on, unhook
from depthscope.stations import BRANCHES

ROUNDING = 16  # machine epsilons of the largest term: the trunk of a pre-norm block is mended by two more sums
_SKIP_OF = {
    "attention_branch": "attention_skip",
    "cross_attention_branch": "cross_attention_skip",
    "ffn_branch": "ffn_skip",
}
SKIPS = tuple(_SKIP_OF.values())
WITHOUT_FFN = ("ffn", "ffn_step")  # readings that leave nothing of the FFN
READINGS = (*WITHOUT_FFN, "ffn_linears")
IN_WORDS = {
    "skips": "skips",
    "attention_skip": "attention's skip",
    "cross_attention_skip": "cross-attention's skip",
    "ffn_skip": "the FFN's skip",
    "ffn": "FFNs",
    "ffn_step": "FFNs and the norms after them",
    "ffn_linears": "the FFNs' linear layers",
    "norms": "norms",
}


def choose_parts(without: str | Iterable[str]) -> tuple[str, ...]:
    """The names of what is left out, each once, in the order of the table; refuses what does not go together."""
    names = without.split(",") if isinstance(without, str) else list(without)
    asked = {name.strip() for name in names if name.strip()}
    for name in sorted(asked - IN_WORDS.keys()):
        raise unknown_name("part of a block", name, IN_WORDS)
    if names and not asked:
        raise ValueError(f"expected at least one of {', '.join(IN_WORDS)} to leave out, got none")
    if len(both := [name for name in READINGS if name in asked]) > 1:
        raise ValueError(f"{' and '.join(both)} are two readings of a model without its FFNs: name one")
    if "ffn_skip" in asked and (gone := asked.intersection(WITHOUT_FFN)):
        raise ValueError(f"without {gone.pop()} and ffn_skip nothing is left of the FFN's step: leave ffn_skip out")
    return tuple(name for name in IN_WORDS if name in asked)


def in_words(parts: Sequence[str]) -> str:
    """What is left out, for a sentence: "skips and FFNs"."""
    named = [IN_WORDS.get(name, name) for name in parts if not (name in SKIPS and "skips" in parts)]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def removed_skips(parts: Sequence[str]) -> frozenset[str]:
    """The skips that are left out, one by one: that of an FFN which is gone stays."""
    chosen = {*SKIPS} if "skips" in parts else {name for name in SKIPS if name in parts}
    return frozenset(chosen - ({"ffn_skip"} if {*parts}.intersection(WITHOUT_FFN) else set()))


def refuse_what_cannot_be(anatomy: Anatomy, parts: Sequence[str]) -> None:
    """Refuses, in one line, what the anatomy of a model does not allow to be left out."""
    for block in anatomy.blocks if parts else ():  # a block as a whole can always be left out
        why = _why_not(block, parts)
        if why is not None:
            raise ValueError(f"without {', '.join(parts)}: {why}")
    if "cross_attention_skip" in parts and not any(block.cross_attention is not None for block in anatomy.blocks):
        raise ValueError("without cross_attention_skip: no block of this model attends to an encoder")


def _why_not(block: BlockAnatomy, parts: Sequence[str]) -> str | None:
    if not block.all_additions:
        return f"where {block.name!r} adds its branches to the trunk is not known (no known family or structure)"
    asked = {*parts}
    if block.placement == "parallel" and (one := asked.intersection(SKIPS)):
        return f"the branches of {block.name!r} are parallel and share one skip: say skips instead of {one.pop()}"
    if block.placement == "mixer" and (ffn := asked.intersection((*READINGS, "ffn_skip", "attention_skip"))):
        return f"{block.name!r} is a mixer with one skip and no FFN, so that there is no {ffn.pop()}"
    if any(spot.added_to is not None for spot in block.spots.values()):
        return f"the additions of {block.name!r} stand outside its module, where nothing can be left out"
    if asked - {"norms", "ffn_linears"}:
        needed = dict.fromkeys(name for sum_ in block.all_additions for name in (sum_.trunk, sum_.result))
        if missing := [station for station in needed if station not in block.spots]:
            return f"{block.name!r} does not show its {', '.join(missing)}"
    if "norms" in asked and not block.norms:
        return f"{block.name!r} does not show its norms"
    if "ffn_linears" in asked and not linears_of(block):
        return f"the FFN of {block.name!r} is not made of linear layers and activations alone"
    return None


def norms_of(block: BlockAnatomy) -> list[nn.Module]:
    """The norms of a block's trunk and branches, that before or after attention to an encoder included."""
    found = {id(norm): norm for norm in block.norms}
    if block.cross_attention is not None:
        post = block.placement == "post"
        spot = block.spots.get("after_cross_attention" if post else "cross_attention_input")
        if spot is not None and spot.side == ("in" if post else "out"):
            found.setdefault(id(spot.module), spot.module)
    return list(found.values())


def linears_of(block: BlockAnatomy) -> list[nn.Module]:
    """The linear layers of a block's FFN; none if it has weights that are no linear layer's."""
    leaves = [part for module in block.ffn for part in module.modules() if not any(True for _ in part.children())]
    linears = [leaf for leaf in leaves if width_read(leaf) is not None]
    others = {id(weight) for module in block.ffn for weight in module.parameters()}
    others -= {id(weight) for layer in linears for weight in layer.parameters()}
    return [] if others else linears


def width_read(module: nn.Module) -> int | None:
    """How wide the tokens are that a linear layer reads; None: it is no linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features
    if type(module).__name__ == "Conv1D":  # GPT-2's, of transformers: stored as (in, out)
        return int(module.get_parameter("weight").shape[0])
    return None


def pass_on(visit: Visit) -> Tensor:
    """What leaves a block that is left out: what entered it."""
    return visit.entered


def leave_out(blocks: Container[int], instead: Callable[[Visit], Tensor] = pass_on) -> Change:
    """A change by which these blocks pass their input on, or return something else."""
    return Change("output", lambda visit, _tokens: instead(visit) if visit.number in blocks else None)


def open_ablation(where: nn.Module | list[nn.Module]) -> Ablation | None:
    """What leaves parts out of this model now, or of one whose modules are listed; None: the model is whole."""
    owners = (getattr(hook, "owner", None) for _, _, hook in hooks_on(where))
    return next((owner for owner in owners if isinstance(owner, Ablation)), None)


def refuse_ablated(model: nn.Module) -> None:
    """What is measured or put in while parts are left out would be of another model."""
    if (before := open_ablation(model)) is not None:
        raise ValueError(f"the model is without its {before.named} now: close depthscope.ablate first")


class Ablation(Machine):
    """A machine that leaves parts out of every block that runs while it is open, and some blocks as a whole."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, parts: Sequence[str], blocks: frozenset[int] = frozenset()):
        self.parts, self.blocks = tuple(parts), blocks
        self.skips = removed_skips(parts)
        self.by_difference: set[str] = set()  # branches that no module shows as they are added
        self._heard: dict[str, Tensor] = {}  # in the block that runs
        self._of: Visit | None = None
        self._trunk: Tensor | None = None  # what the last sum of that block has become
        refuse_what_cannot_be(anatomy, parts)
        if any(hook.remedy is not None for _, hook in hooks_in(model)):
            raise ValueError("the model has remedies, whose effect could not be told apart: depthscope.remove(model)")
        if (before := open_ablation(model)) is not None:
            raise ValueError(f"the model is without its {before.named} already: name all that is left out at once")
        super().__init__(model, anatomy, *self._acts(anatomy))

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

    def _acts(self, anatomy: Anatomy) -> list[Act]:
        """Listening where trunk and branches are seen, a change at every sum; none where no sum is touched."""
        whole: list[Act] = [leave_out(self.blocks)] if self.blocks else []
        if not {*self.parts} - {"norms", "ffn_linears"}:
            return whole
        sums = [addition for block in anatomy.blocks for addition in block.all_additions]
        heard = {*BRANCHES, *(addition.trunk for addition in sums)}
        results = dict.fromkeys(addition.result for addition in sums)
        acts: list[Act] = [Listen(heard - {"input"}, self._hear)]
        acts += [Change(result, partial(self._sum, result)) for result in results]
        if "ffn_step" in self.parts and "after_ffn" in results:
            acts.append(Change("output", self._leave))
        return acts + whole

    def _attach_all(self) -> None:
        """Norms and layers that pass their input on come first, so that all other hooks see what they pass."""
        blocks = self.anatomy.blocks
        norms = [norm for block in blocks if "norms" in self.parts for norm in norms_of(block)]
        layers = [layer for block in blocks if "ffn_linears" in self.parts for layer in linears_of(block)]
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
        heard = visit.entered if addition.trunk == "input" else self._trunk
        trunk = (self._heard[addition.trunk] if heard is None else heard).reshape(total.shape)
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


def _is_sum(summands: list[Tensor], total: Tensor, terms: list[Tensor]) -> bool:
    """Whether the total is the sum, to the rounding of the largest term; what is not finite cannot be told, and is."""
    with torch.no_grad():
        largest = max(float(term.abs().max()) for term in terms)
        apart = float((sum(summands[1:], summands[0]) - total).abs().max())
    return not apart > ROUNDING * torch.finfo(total.dtype).eps * largest


class _PassOn(TemporaryHook):
    """A module returns what it was given, as other hooks have changed it."""

    def __init__(self, owner: Ablation):
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
