"""`depth_use`: a model and inputs in; how much of its depth it uses, block by block, out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from depthscope.anatomy.trained import training_state
from depthscope.discovery import Hints
from depthscope.hooks import Machine, refuse_ablated
from depthscope.inputs import Batch, Tokenizer, call
from depthscope.interruption import attempt
from depthscope.offloading import device_of
from depthscope.probing.finite import note
from depthscope.probing.gradients import Loss
from depthscope.probing.losses import NoLoss
from depthscope.probing.skipping import LossOf, calls_with_loss, one_number
from depthscope.progress import Tick
from depthscope.scope import Scope, scope_of
from depthscope.usage.forward import ENERGY, ForwardPass
from depthscope.usage.lens import Lens
from depthscope.usage.result import DepthUse
from depthscope.usage.skips import Skipped, without_each

SAMPLE = 32  # tokens of each sequence: medians over them move by a few per cent, and L × 32 tokens are small
SHORT = 20  # tokens: in shorter sequences even uniform causal attention gives the first token half of what makes a sink


def depth_use(
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    lens: bool = True,
    skips: bool = True,
    loss: Loss | None = None,
    sample: int | None = SAMPLE,
    tokenizer: Tokenizer | None = None,
    progress: Tick | None = None,
    **hints: Unpack[Hints],
) -> DepthUse:
    """How much of its depth a Transformer uses, block by block; it leaves no trace in it.

    One pass always: the size of each branch over the trunk's and the cosine between them (medians over tokens), the
    share of heads that look at the first token, the largest attention logit.

    Args:
        model: any model that holds Transformer blocks, or a `Scope` of it; `part` says which of several parts.
        inputs: as for `probe`.
        lens: what the model would predict after each block (models with a head).
        skips: what becomes of the later blocks, of the output and of the loss without each block; one pass per block
            and batch.
        loss: as for `skip_loss`; without one, and without a default, the loss is left out.
        sample: how many tokens of each sequence lens and skips compare, evenly spaced; None: all.
        tokenizer: makes ids of strings.
        progress: is called after every pass.
        hints: what you say of the model: `blocks`, `part`, `token_axis`, `mask`, `causal`, as for `Scope`.

    Returns:
        A `DepthUse`: a row per block, and what it means in words.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> use = depthscope.depth_use(model, torch.randn(2, 5, 16), lens=False)
        >>> bool(use.frame["skip_output"].notna().all())
        True
    """
    if sample is not None and sample < 1:
        raise ValueError(f"expected sample= with at least 1 token of each sequence, or None, got {sample}")
    tick = progress or (lambda: None)
    scope = scope_of(model, inputs, tokenizer, **hints)
    refuse_ablated(scope.model)
    anatomy, calls = scope.anatomy, list(scope.calls())
    if len(anatomy.parts) > 1:
        named, last = ", ".join(anatomy.parts), anatomy.parts[-1]
        raise ValueError(f"this model has several parts ({named}): say which one, as in part={last!r} or --part {last}")
    with scope.undisturbed():
        calls, loss_of = calls_with_loss(scope, [scope.one_to_a_row(batch) for batch in calls], loss)
        seen = ForwardPass(anatomy, sample, keeps=lens)
        through_lens = Lens(scope.model, anatomy) if lens and not anatomy.streams else None
        notes: list[str] = []
        whole = _forward(scope, calls, loss_of, seen, through_lens, tick, notes, skips=skips)
        skipped = None
        if skips:
            taken = loss_of if whole is not None else None
            skipped = attempt(
                "what skipping each block changes",
                lambda: without_each(
                    scope.model, anatomy, calls, taken, sample=sample, depth=seen.depth, progress=tick
                ),
            )
        metadata = _metadata(scope, seen, notes)
        metadata |= {"loss": whole, "asked": {"lens": lens, "skips": skips, "sample": sample}}
    names = pd.RangeIndex(1, seen.depth + 1)
    matrix = pd.DataFrame()
    if skipped is not None:
        matrix = pd.DataFrame(skipped.later, index=names.rename("skipped"), columns=names.rename("block"))
    return DepthUse(_frame(seen, through_lens, skipped), matrix, metadata)


def _forward(
    scope: Scope,
    calls: list[Batch],
    loss_of: LossOf | None,
    seen: ForwardPass,
    lens: Lens | None,
    tick: Tick,
    notes: list[str],
    *,
    skips: bool,
) -> float | None:
    """One pass of every batch, seen by `seen` and through the lens; the mean loss, None if there is none."""
    losses: list[Tensor] = []
    forget = None if lens is None else lens.watch.forget  # what is called before the last block ends is no tail
    machine = Machine(scope.model, scope.anatomy, *seen.acts, on_block_end=forget and (lambda _visit: forget()))
    for batch in calls:
        seen.begin()
        with machine, nullcontext() if lens is None else lens.watch:
            returned = call(scope.model, batch)
        tick()
        seen.end()
        if seen.last is None:
            named = [block.name for block in scope.anatomy.blocks][:4]
            raise ValueError(f"none of the blocks {named} ran; name them with blocks=")
        if lens is not None:
            lens.see(batch, returned, seen)
            lens.watch.forget()
        try:
            if loss_of is not None:
                losses.append(one_number(loss_of(batch, returned, seen.last[0])))
        except NoLoss as error:
            loss_of = None
            if skips:
                notes.append(f"{error}: what skipping costs is said of the output alone")
        seen.begin()  # nothing of a pass is kept until the next
    if lens is not None and lens.why_not:
        notes.append(lens.why_not)
    return torch.stack(losses).mean().item() if loss_of is not None else None


def _frame(seen: ForwardPass, lens: Lens | None, skipped: Skipped | None) -> pd.DataFrame:
    blocks = range(1, seen.depth + 1)
    crosses = ["cross_attention"] if "cross_attention_ratio" in seen.means.names else []
    branches = [f"{branch}_{what}" for branch in ("attention", *crosses, "ffn") for what in ("ratio", "cosine")]
    columns: dict[str, Any] = {"block": np.array(blocks, dtype=np.int64)}
    columns |= {name: [seen.means.get(block, name) for block in blocks] for name in branches}
    columns["sink_rate"] = [seen.sink_rate(block) for block in blocks]
    columns["largest_logit"] = [seen.logits.get(block, np.nan) for block in blocks]
    for name in ("lens_kl", "lens_top1", "lens_top5"):
        columns[name] = [np.nan if lens is None else lens.means.get(block, name) for block in blocks]
    later = pd.DataFrame(np.full((seen.depth, 1), np.nan) if skipped is None else skipped.later)
    columns["skip_later"] = later.mean(axis=1).to_numpy()  # nan for the last, which has none after it
    columns["skip_output"] = np.nan if skipped is None else skipped.output
    columns["skip_loss"] = np.nan if skipped is None or skipped.loss is None else skipped.loss
    return pd.DataFrame(columns)


def _metadata(scope: Scope, seen: ForwardPass, notes: list[str]) -> dict[str, Any]:
    model, anatomy, blocks = scope.model, scope.anatomy, scope.anatomy.blocks
    placements = {block.placement for block in blocks}
    notes = [*scope.notes, *anatomy.notes, *anatomy.left_out, *notes, *note(seen.not_finite, seen.samples)]
    if anatomy.streams:
        notes.append(
            "several streams (hyper-connections): no logit lens, no size of branches; each counts as a sequence"
        )
    if blind := [block for block in range(1, seen.depth + 1) if block not in seen.with_attention]:
        named = "any block" if len(blind) == seen.depth else f"blocks {', '.join(map(str, blind))}"
        notes.append(f"attention was not seen in {named}: no sink rate and no logits there")
    if unseen := [name for name in ("attention", "ffn") if f"{name}_ratio" not in seen.means.names]:
        notes.append(f"not seen in this model, or not known where it is added: the branch of {', '.join(unseen)}")
    if seen.lengths[0] < SHORT:
        notes.append(
            f"sequences of {seen.lengths[0]} tokens: below {SHORT} the sink rate says little, since even uniform "
            "attention gives much of its mass to the first token"
        )
    energy = {name: seen.means.get(0, f"energy_{name}") for name in ENERGY}
    return {
        "model": getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__,
        "class": type(model).__name__,
        "family": anatomy.family,
        "part": blocks[0].part,
        "blocks": seen.depth,
        "width": int(seen.shape[-1]),
        "samples": seen.samples,
        "tokens": int(seen.lengths[1]),
        "shortest": int(seen.lengths[0]),
        "placement": placements.pop() if len(placements) == 1 else None,
        "causal": anatomy.causal,
        "weights": dict(training_state(anatomy)),
        "device": str(device_of(model)),
        "dtype": seen.dtype,
        "energy": None if np.isnan(list(energy.values())).any() else energy,
        "notes": notes,
    }
