"""`apply` puts remedies into a model, `remove` takes them out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from depthscope.anatomy import Anatomy, BlockAnatomy, anatomy_of
from depthscope.passes import Tokenizer, batches, find_token_axis, is_causal, undisturbed
from depthscope.passes.hooks import Hook, LastBlockExit, hang, hooks_in, install, take_down
from depthscope.passes.undoing import undone
from depthscope.remedies.record import keep_record, records_of, set_records
from depthscope.remedies.remedy import Remedy, Site, refuse_leak
from depthscope.remedies.selection import chosen_blocks

if TYPE_CHECKING:
    from depthscope.remedies.recommendation import Recommendation


def apply(
    model: nn.Module,
    *remedies: Remedy,
    inputs: Any = None,
    tokenizer: Tokenizer | None = None,
    blocks: str | None = None,
    causal: bool | None = None,
    token_axis: int | None = None,
) -> nn.Module:
    """Puts remedies into a model, in place, and returns it. Either all of them are in, or none.

    `inputs` (a batch as for `probe`) is needed for `tau="recommended"`, and settles whether a model of no known
    family is causal; `causal` says so. `blocks` names the blocks of such a model ("encoder.layer.*"), and
    `token_axis=0` says that its activations are (n, batch, d) and not (batch, n, d); with `inputs` that is found out.
    The state_dict keeps its keys (a learnable τ adds its own, so make the optimiser after this), and copies,
    pickles, `save_pretrained` and `torch.compile` work as before. `remove` undoes it.
    """
    for remedy in remedies or (None,):
        if not isinstance(remedy, Remedy):
            raise ValueError(f"expected remedies, such as DeEscalate(), got {remedy!r}")
    if isinstance(inputs, Iterator):
        inputs = list(inputs)  # they are read more than once
    _refuse_wrapped(model, remedies)
    anatomy = anatomy_of(model, blocks)
    family_is_unknown = anatomy.family == "unknown"
    if token_axis is not None:
        anatomy = replace(anatomy, token_axis=token_axis)
    elif inputs is not None and family_is_unknown:
        with undisturbed(model):
            found = find_token_axis(model, anatomy, next(batches(model, inputs, tokenizer)))
        anatomy = replace(anatomy, token_axis=found)
    if inputs is not None and causal is None and anatomy.causal is None and family_is_unknown:
        causal = _find_out(model, anatomy, inputs, tokenizer)

    def measure(**options: Any) -> Recommendation:
        if inputs is None:
            raise ValueError("tau='recommended' is measured on the model: pass apply(…, inputs=a batch)")
        from depthscope.remedies.recommendation import recommend

        return recommend(model, inputs, tokenizer=tokenizer, blocks=blocks, **options)

    chosen = [found for remedy in remedies for found in remedy.settled(measure, remedies)]
    with undone(_as_it_was(model), only_after_failure=True):
        _unnest(model)
        running = install(model, anatomy)
        hang(model, RefusePairs(), "in")
        for remedy in chosen:
            for number, block in chosen_blocks(anatomy, _depth(model, anatomy), remedy.blocks, remedy.every):
                site = Site(model, anatomy, block, number, _causal(anatomy, block, causal), running)
                _refuse_twice(model, remedy, block)
                refuse_leak(remedy, site)
                remedy.install(site)
        hang(anatomy.blocks[-1].module, LastBlockExit(running), "out")  # behind the remedies
        axis = anatomy.token_axis if family_is_unknown else token_axis
        told = {"blocks": blocks, "causal": causal, "token_axis": axis}
        keep_record(model, chosen, {name: value for name, value in told.items() if value is not None})
        return model


def _as_it_was(model: nn.Module) -> Callable[[], None]:
    """What brings the remedies of a model, and its record of them, back to what they are now."""
    before, records = frozenset(id(hook) for _, hook in hooks_in(model)), records_of(model)

    def undo() -> None:
        take_down(model, keep=before)
        set_records(model, records)

    return undo


def remove(model: nn.Module) -> nn.Module:
    """Takes all remedies out of a model, in place: it is then bitwise what it was, and returned."""

    def undo() -> None:
        take_down(model)
        set_records(model, [])

    with undone(undo):
        return model


@contextmanager
def temporarily(model: nn.Module, *remedies: Remedy, **options: Any) -> Iterator[nn.Module]:
    """`apply`, and the model as it was afterwards, also after an exception."""
    with undone(_as_it_was(model)):
        yield apply(model, *remedies, **options)


@dataclass(frozen=True)
class Applied:
    """One remedy at one station of one block."""

    block: str
    station: str
    remedy: Remedy
    values: Mapping[str, float | list[float]]  # the numbers in force now, by the name of the option: {"tau": 0.4}

    @property
    def tau(self) -> float | list[float] | None:
        """The τ in force now; None for remedies without one."""
        return self.values.get("tau")


def applied(model: nn.Module) -> list[Applied]:
    """The remedies that are in a model, with the numbers that learnable ones have reached."""
    return [
        Applied(hook.block, hook.station, hook.remedy, hook.values_in_force())
        for _, hook in hooks_in(model)
        if hook.remedy is not None
    ]


class RefusePairs(Hook):
    """The model is called: masks of pairs of tokens, which no remedy can follow, are refused."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = kwargs.get("attention_mask")
        if isinstance(own, Tensor) and own.ndim > 2:
            raise ValueError(
                f"attention_mask is {tuple(own.shape)}: from a mask of pairs of tokens (packed sequences, "
                "generate with a static cache) a remedy cannot tell which tokens belong together; pass (batch, n)"
            )
        if kwargs.get("perm_mask") is not None:
            raise ValueError("perm_mask hides tokens from each other, and the mean of a remedy would show them")


class Unnested(Hook):
    """Keeps `nn.TransformerEncoder` from handing its layers nested tensors: their fast path would pass by the hooks."""

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None: ...

    def taken_down(self, module: nn.Module) -> None:
        module.use_nested_tensor = True  # type: ignore[assignment]


def _unnest(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            hang(module, Unnested(), "out")
            module.use_nested_tensor = False


def _refuse_wrapped(model: nn.Module, remedies: tuple[Remedy, ...]) -> None:
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                "the model is compiled, and its graph would pass by the remedy in silence: apply first, compile after"
            )
    if isinstance(model, DistributedDataParallel) and any(remedy.learns for remedy in remedies):
        raise ValueError("DistributedDataParallel would not synchronise what a remedy learns: apply first, wrap after")


def _refuse_twice(model: nn.Module, remedy: Remedy, block: BlockAnatomy) -> None:
    for _, hook in hooks_in(model):
        if type(hook.remedy) is type(remedy) and hook.block == block.name and hook.station in remedy.stations_in(block):
            raise ValueError(
                f"{remedy.name} is already at the {hook.station} of {block.name!r}; "
                "take it out first with depthscope.remove(model)"
            )


def _find_out(model: nn.Module, anatomy: Anatomy, inputs: Any, tokenizer: Tokenizer | None) -> bool | None:
    with undisturbed(model):
        return is_causal(model, anatomy, next(batches(model, inputs, tokenizer)))


def _causal(anatomy: Anatomy, block: BlockAnatomy, told: bool | None) -> bool | None:
    if told is not None:
        return told
    return anatomy.causal if block.causal is None else block.causal


def _depth(model: nn.Module, anatomy: Anatomy) -> int:
    """More than there are block modules if these share their weights."""
    return max(len(anatomy.blocks), getattr(getattr(model, "config", None), "num_hidden_layers", 0) or 0)
