"""`apply` puts remedies into a model, `remove` takes them out again."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.discovery import Hints, depth_of, entrance_of, pieces_of, refuse_tensor
from depthscope.hooks import Pass, refuse_ablated
from depthscope.hooks.staying import (
    GuessedExit,
    Hook,
    LastBlockExit,
    PartOfBlock,
    hang,
    hooks_in,
    install,
    take_down,
)
from depthscope.inputs import Tokenizer
from depthscope.remedies.record import ADAPTERS_ALONE, has_adapters, keep_record, records_of, set_records
from depthscope.remedies.remedy import Remedy, Site, refuse_leak
from depthscope.safety import undone
from depthscope.scope import Scope, scope_of

UNKNOWN = (
    "cannot tell whether this model is causal: the prefix mean is used, in which no token sees a later one; "
    "pass causal=False to apply for the full mean, or inputs= to find out"
)


def apply(
    model: nn.Module | Scope,
    *remedies: Remedy,
    inputs: Any = None,
    tokenizer: Tokenizer | None = None,
    **hints: Unpack[Hints],
) -> nn.Module:
    """Puts remedies into a model, in place, and returns it. Either all of them are in, or none.

    The state_dict keeps its keys (a learnable τ adds its own, so make the optimiser after this), and copies, pickles,
    `save_pretrained` and `torch.compile` work as before. `remove` undoes it. Without `part` all parts of a model have
    them, each with the mean that its own causality allows; `blocks` and the remedy's own `blocks` choose too.

    Args:
        model: any model that holds Transformer blocks, or a `Scope` of it.
        remedies: such as `DeEscalate(0.3)`.
        inputs: a batch as for `probe`: settles what the blocks of a model of no known family are, where its tokens
            stand, and whether it is causal.
        tokenizer: makes ids of strings.
        hints: what you say of the model, as for `Scope`. `causal` wins over all that is known or tried; `mask` names
            the argument that is true for real tokens ("~name": for padding).

    Returns:
        The model.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> _ = depthscope.apply(model, depthscope.DeEscalate(0.3), causal=False)
        >>> len(depthscope.remedies.applied(model))
        3
    """
    scope = scope_of(model, inputs, tokenizer, **hints).keep_inputs()
    model = scope.original
    with undone(_as_it_was(model), only_after_failure=True):
        anatomy = _put_in(scope, remedies)
        for left_out in anatomy.left_out:
            warnings.warn(f"what the remedy covers: {left_out}", stacklevel=2)
        if has_adapters(model):
            said = f"{ADAPTERS_ALONE}: apply these again after loading, or merge the adapters before saving"
            warnings.warn(said, stacklevel=2)
        return model


def _put_in(scope: Scope, remedies: tuple[Remedy, ...]) -> Anatomy:
    """As `apply`, without saying what is covered, and without undoing what was begun if it fails."""
    for remedy in remedies or (None,):
        if not isinstance(remedy, Remedy):
            raise ValueError(f"expected remedies, such as DeEscalate(), got {remedy!r}")
    model = scope.original
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                "the model is compiled, and its graph would pass by the remedy in silence: apply first, compile after"
            )
    if isinstance(model, DistributedDataParallel) and any(remedy.learns for remedy in remedies):
        raise ValueError("DistributedDataParallel would not synchronise what a remedy learns: apply first, wrap after")
    refuse_ablated(model)
    refuse_tensor(scope.hints)
    anatomy = scope.anatomy if scope.inputs is None else scope.seen_anatomy(again=True)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            hang(module, Unnested(), "out")
            module.use_nested_tensor = False
    running = install(model, anatomy)
    _hang_refusals(running, model, anatomy)
    taken = {(type(hook.remedy), hook.block, hook.station) for _, hook in hooks_in(model)}
    mixed: dict[str, BlockAnatomy] = {}
    for remedy in remedies:
        for number, block in remedy.blocks_of(anatomy, depth_of(model, anatomy)):
            causal = anatomy.causal if block.causal is None else block.causal
            site = Site(model, anatomy, block, number, causal, running)
            for place in [(type(remedy), block.name, station) for station in remedy.stations_in(block)]:
                if place in taken:
                    raise ValueError(
                        f"{remedy.name} is already at the {place[2]} of {block.name!r}; "
                        "take it out first with depthscope.remove(model)"
                    )
                taken.add(place)
            refuse_leak(remedy, site)
            mixing = remedy.mixing_in(site)
            is_first = block is anatomy.of_part(block.part)[0]
            if causal is None and mixing == "causal" and is_first and getattr(remedy, "mixing", "") == "auto":
                warnings.warn(UNKNOWN, stacklevel=3)  # doubt counts as causal
            remedy.install(site)
            if anatomy.family == "unknown" and mixing != "none":
                mixed[block.name] = block
    for block in mixed.values():
        hang(_part_of(block), PartOfBlock(running, block.name), "in")
    for part in anatomy.parts:
        hang(anatomy.of_part(part)[-1].module, LastBlockExit(running), "out")  # after the remedies
    for block in anatomy.blocks if anatomy.guessed else ():
        hang(block.module, GuessedExit(running), "out")
    axis = {"token_axis": anatomy.token_axis} if anatomy.family == "unknown" else {}
    keep_record(model, remedies, scope.apply_hints | axis)
    return anatomy


def _part_of(block: BlockAnatomy) -> nn.Module:
    """A module that a block cannot do without, however it is called: its first norm, or its first layer."""
    layers = [module for module in block.module.modules() if not module._modules and module._parameters]
    norms = [layer for layer in layers if "norm" in type(layer).__name__.lower()]
    return next(iter((*block.norms, *norms, *layers)), block.module)


def _as_it_was(model: nn.Module) -> Callable[[], None]:
    """What brings the remedies of a model, and its record of them, back to what they are now."""
    before, records = frozenset(id(hook) for _, hook in hooks_in(model)), records_of(model)

    def undo() -> None:
        take_down(model, keep=before)
        set_records(model, records)

    return undo


def remove(model: nn.Module | Scope) -> nn.Module:
    """Takes all remedies out of a model, in place: it is then bitwise what it was.

    Args:
        model: a model with remedies, or a `Scope` of it.

    Returns:
        The model.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> _ = depthscope.apply(model, depthscope.DeEscalate(0.3), causal=False)
        >>> depthscope.remedies.applied(depthscope.remove(model))
        []
    """
    treated = model.original if isinstance(model, Scope) else model

    def undo() -> None:
        take_down(treated)
        set_records(treated, [])

    with undone(undo):
        return treated


@contextmanager
def temporarily(scope: Scope, *remedies: Remedy) -> Iterator[None]:
    """`apply`, and the model as it was afterwards, also after an exception. What is not understood as a mask is said by
    the profiles that are taken meanwhile, and not once more by the remedies."""
    with undone(_as_it_was(scope.original)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*: not understood as a mask of real tokens")
        _put_in(scope, remedies)
        yield


@dataclass(frozen=True)
class Applied:
    """One remedy at one station of one block."""

    block: str
    station: str
    remedy: Remedy
    values: Mapping[str, float | list[float]]  # the numbers in force now, by the name of the option: {"tau": 0.4}
    part: str = ""  # of the model that the block is in, where it has several


def applied(model: nn.Module) -> list[Applied]:
    """The remedies that are in a model, with the numbers that learnable ones have reached."""
    return [
        Applied(hook.block, hook.station, hook.remedy, hook.values_in_force(), hook.part)
        for _, hook in hooks_in(model)
        if hook.remedy is not None
    ]


class RefusePairs(Hook):
    """A module around the blocks is called: sequences that share a row, and in the model's own call masks of pairs of
    tokens, which no remedy can follow, are refused."""

    def __init__(self, running: Pass, module: nn.Module, is_outermost: bool):
        self.running = running
        self.names = tuple(inspect.signature(module.forward).parameters)
        self.is_outermost = is_outermost

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        mask, why = arguments.get("attention_mask"), ""
        if arguments.get("cu_seq_lens_q") is not None or pieces_of(arguments) is not None:
            why = (
                "several sequences in one row (position_ids that begin again, cu_seq_lens): the mean of a remedy would "
                "mix them; pass one sequence to a row, with an attention_mask"
            )
        elif self.is_outermost and isinstance(mask, Tensor) and mask.ndim > 2:  # inside, the model has made its own
            why = (
                f"attention_mask is {tuple(mask.shape)}: from a mask of pairs of tokens (packed sequences, "
                "generate with a static cache) a remedy cannot tell which tokens belong together; pass (batch, n)"
            )
        elif self.is_outermost and arguments.get("perm_mask") is not None:
            why = "perm_mask hides tokens from each other, and the mean of a remedy would show them"
        if why:
            self.running.now.calls = 0  # a pass that is refused says nothing about the blocks
            raise ValueError(why)


def _hang_refusals(running: Pass, model: nn.Module, anatomy: Anatomy) -> None:
    """On the model, and on all that stands around the blocks. The models of a library that stand in somebody's own
    module are asked as the outermost: they are given the masks that it makes."""
    around, blocks = running.masks.around, {id(block.module) for block in anatomy.blocks}
    whole: list[nn.Module] = []
    for module in around:
        inside = any(module is part for outer in whole for part in outer.modules())
        if hasattr(module, "save_pretrained") and not inside:
            whole.append(module)
    outermost = {model, *whole, *(entrance_of(model, anatomy, block) for block in anatomy.blocks)}
    for module in (model, *(m for m in around if m is not model and id(m) not in blocks)):
        hang(module, RefusePairs(running, module, is_outermost=module in outermost), "in")


class Unnested(Hook):
    """Keeps `nn.TransformerEncoder` from handing its layers nested tensors: their fast path would pass by the hooks."""

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None: ...

    def taken_down(self, module: nn.Module) -> None:
        module.use_nested_tensor = True  # type: ignore[assignment]
