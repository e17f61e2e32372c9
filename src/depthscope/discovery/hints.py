"""What a user says of a model that is not known, in the same words everywhere, and the anatomy that follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict

from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.discovery.blocks import find_anatomy
from depthscope.discovery.by_structure import seen_by_structure
from depthscope.discovery.masking import believed
from depthscope.discovery.token_axis import find_token_axis
from depthscope.inputs.batches import Batch
from depthscope.naming import did_you_mean, unknown_name
from depthscope.offloading import device_of
from depthscope.safety import undisturbed


class Hints(TypedDict, total=False):
    """The options of `probe`, `apply`, `recommend`, `fix`, `skip_loss` and `watch` that say what a model is."""

    blocks: str | None  # a glob of module names, such as "encoder.layer.*"
    part: str | None  # of a model with several, the only one that is looked at: "encoder", "decoder", …
    token_axis: int | None  # 1 for activations (batch, n, d), 0 for (n, batch, d)
    causal: bool | None  # whether no token sees a later one
    mask: Tensor | str | None  # (batch, n) true for real tokens, or the argument that has it ("~pad": true for padding)


def check_hints(hints: Mapping[str, Any]) -> None:
    """Refuses an option that there is not, as Python does."""
    for name in hints:
        if name not in Hints.__annotations__:
            meant, known = did_you_mean(name, Hints.__annotations__), ", ".join(Hints.__annotations__)
            raise TypeError(f"unexpected option {name!r}: {meant}beside the options of this function there are {known}")


def anatomy_with_hints(model: nn.Module, hints: Mapping[str, Any], batch: Batch | None = None) -> Anatomy:
    """The anatomy of a model with what the user says of it. A batch finds out the blocks and the token axis of an
    unknown model, and not whether it is causal: `with_sight` does."""
    check_hints(hints)
    if (blocks := hints.get("blocks")) is not None and not (isinstance(blocks, str) and blocks):
        raise ValueError(f"expected blocks= with the names of modules, such as 'encoder.layer.*', got {blocks!r}")
    anatomy = believed(model, find_anatomy(model, batch, hints.get("blocks")))
    if (part := hints.get("part")) is not None:
        anatomy = only_part(anatomy, part)
    if (causal := hints.get("causal")) is not None:
        if not isinstance(causal, bool):
            raise ValueError(f"expected causal=True or False, got {causal!r}")
        known = [part for part in anatomy.parts if any(block.causal for block in anatomy.of_part(part))]
        if not causal and known and len(anatomy.parts) > 1:  # those that are known to be causal would leak
            raise ValueError(
                f"causal=False, but {known[0]} is causal: choose the other blocks with blocks='path.to.layers.*'"
            )
        anatomy = replace(anatomy.with_causality(causal), causal_by="user")
    if (mask := hints.get("mask")) is not None:
        is_name = isinstance(mask, str) and mask.removeprefix("~").isidentifier()
        if not is_name and not (isinstance(mask, Tensor) and mask.ndim == 2):
            got = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(f"expected mask= (batch, n), true for real tokens, or the name of an argument, got {got}")
        anatomy = replace(anatomy, mask_hint=mask if is_name else mask.to(device_of(model)))
    if (axis := hints.get("token_axis")) is not None:
        if type(axis) is not int or axis not in (0, 1):
            raise ValueError(f"expected token_axis 1 for (batch, n, d) or 0 for (n, batch, d), got {axis!r}")
        if anatomy.family != "unknown" and {anatomy.axis_of(block) for block in anatomy.blocks} != {axis}:
            there = "(batch, n, d)" if axis == 0 else "(n, batch, d)"
            raise ValueError(f"token_axis={axis}, but the activations of {anatomy.family} are {there}: leave it out")
        anatomy = anatomy.with_token_axis(axis)
    if anatomy.family != "unknown" or batch is None:
        return anatomy
    with undisturbed(model):
        if axis is None or anatomy.folded > 1:  # whose streams must stand side by side
            anatomy = anatomy.with_token_axis(find_token_axis(model, anatomy, batch))
        return seen_by_structure(model, anatomy, batch)


def only_part(anatomy: Anatomy, part: str) -> Anatomy:
    """One part of a model that has several."""
    sizes = Counter(block.part for block in anatomy.blocks)
    if set(sizes) == {""}:
        raise ValueError(f"part={part!r}: this model has no parts; leave it out, or name blocks='path.to.layers.*'")
    if part not in sizes:
        raise unknown_name("part", part, [name for name in sizes if name])
    causal = {block.causal for block in anatomy.of_part(part)}
    others = ", ".join(f"{name or 'without a part'} ({count} blocks)" for name, count in sizes.items() if name != part)
    return replace(
        anatomy,
        blocks=anatomy.of_part(part),
        causal=causal.pop() if len(causal) == 1 and None not in causal else anatomy.causal,
        notes=(*anatomy.notes, f"only the part {part} is looked at, not {others}"),
    )


def refuse_tensor(hints: Mapping[str, Any]) -> None:
    """A remedy stays in a model, and a mask is of one batch: it must be known by its name."""
    if isinstance(hints.get("mask"), Tensor):
        raise ValueError("a remedy reads the mask of every batch: say mask= with the name of the argument that has it")
