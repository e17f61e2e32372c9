"""`depth_use`: a model and inputs in; how much of its depth it uses, block by block, out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from depthscope.anatomy.trained import training_state
from depthscope.discovery import Hints
from depthscope.hooks import Machine, Visit, refuse_ablated
from depthscope.inputs import Batch, Tokenizer, call
from depthscope.interruption import attempt
from depthscope.naming import counted
from depthscope.offloading import device_of
from depthscope.probing.finite import note
from depthscope.probing.gradients import Loss
from depthscope.probing.losses import NoLoss
from depthscope.probing.skipping import LossOf, calls_with_loss, one_number
from depthscope.progress import Tick
from depthscope.scope import Scope, scope_of
from depthscope.usage.forward import ENERGY, ForwardPass
from depthscope.usage.lens import Lens
from depthscope.usage.linear_map import ENOUGH, LinearMap, errors, fit_each, halves, passes_to_fit
from depthscope.usage.result import DepthUse
from depthscope.usage.skips import Exchanged, exchange_each, without_each
from depthscope.usage.verdict import SHORT

# Told what is done next and in how many passes; gives what to call after each of them.
Doing = Callable[[str, int | None], Tick]
FOLLOWED = 32  # tokens of each sequence: medians over them move by a few per cent, and L × 32 tokens are small


def depth_use(
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    lens: bool = True,
    skips: bool = True,
    linear: bool | None = None,
    loss: Loss | None = None,
    followed: int | None = FOLLOWED,
    ridge: float = 0.0,
    tokenizer: Tokenizer | None = None,
    progress: Doing | None = None,
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
        linear: each block as a linear map that is fitted on one half of the sequences and judged on the other; a pass
            per block and batch of the second half; None: if the text has enough tokens for it.
        loss: as for `skip_loss`; without one, and without a default, the loss is left out.
        followed: tokens of each sequence that lens and skips look at, evenly spaced; None: all.
        ridge: regularises the linear maps.
        tokenizer: makes ids of strings.
        progress: `progress(what, passes)` is called before each of these, and what it returns after each pass.
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
    if followed is not None and followed < 1:
        raise ValueError(f"expected followed= with at least 1 token of each sequence, or None, got {followed}")
    if not 0 <= ridge < float("inf"):
        raise ValueError(f"expected a ridge of at least 0, got {ridge}")
    scope = scope_of(model, inputs, tokenizer, **hints)
    refuse_ablated(scope.model)
    anatomy, given = scope.anatomy, list(scope.calls())
    if len(anatomy.parts) > 1:
        named = ", ".join(anatomy.parts)
        raise ValueError(f"this model has several parts ({named}): say which one, as in part={anatomy.parts[-1]!r}")
    doing = progress or (lambda _what, _passes: lambda: None)
    with scope.undisturbed():
        given = [scope.one_to_a_row(batch) for batch in given]
        calls, loss_of = calls_with_loss(scope, given, loss)
        run = _Run(scope, calls, loss_of, doing, followed, lens=lens)
        run.forward()
        if skips:
            attempt("what skipping each block changes", run.skip)
        if linear is not False:
            attempt("linear maps", lambda: run.linearise(given, loss, ridge, asked=linear is True))
        return run.result(scope.notes, {"lens": lens, "skips": skips, "followed": followed, "ridge": ridge})


class _Run:
    """All that is found of one model."""

    def __init__(
        self,
        scope: Scope,
        calls: list[Batch],
        loss_of: LossOf,
        doing: Doing,
        followed: int | None,
        *,
        lens: bool,
    ):
        self.scope, self.calls, self.doing, self.most = scope, calls, doing, followed
        self.model, self.anatomy = model, anatomy = scope.model, scope.anatomy
        self.loss_of: LossOf | None = loss_of
        self.seen = ForwardPass(anatomy, followed, keeps=lens)
        self.lens = Lens(model, anatomy) if lens and not anatomy.streams else None
        self.loss: float | None = None
        self.skipped: Exchanged | None = None
        self.linear: Exchanged | None = None
        self.linear_error: dict[int, float] = {}
        self.samples = 0
        self.tokens: list[int] = []  # real ones of each batch
        self.fitted_on = 0
        self.notes: list[str] = []
        if anatomy.streams:
            self.notes.append(
                "several streams (hyper-connections): no logit lens, no size of branches; each counts as a sequence"
            )

    def forward(self) -> None:
        """One pass of every batch, and everything that it tells."""
        tick = self.doing("one pass", len(self.calls))
        found = self.lens
        losses: list[Tensor] = []
        machine = Machine(self.model, self.anatomy, *self.seen.acts, on_block_end=_Forget(found))
        for batch in self.calls:
            self.seen.begin()
            with machine, found.watch if found is not None else nullcontext():
                returned = call(self.model, batch)
            tick()
            self.seen.end()
            if self.seen.last is None:
                named = [block.name for block in self.anatomy.blocks][:4]
                raise ValueError(f"none of the blocks {named} ran; name them with blocks=")
            last, real = self.seen.last[0], self.seen.last[0].real
            self.samples += self.seen.shape[0] // last.streams
            self.tokens.append((self.seen.shape[:2].numel() if real is None else int(real.sum())) // last.streams)
            if found is not None:
                found.see(batch, returned, self.seen)
                found.watch.forget()
            self._take_loss(batch, returned, self.seen.last[0], losses)
            self.seen.begin()  # nothing of a pass is kept until the next
        if losses and self.loss_of is not None:
            self.loss = torch.stack(losses).mean().item()
        if found is not None and found.why_not:
            self.notes.append(found.why_not)

    def _take_loss(self, batch: Batch, returned: Any, last: Visit, losses: list[Tensor]) -> None:
        if self.loss_of is None:
            return
        try:
            losses.append(one_number(self.loss_of(batch, returned, last)))
        except NoLoss as error:
            self.loss_of = None
            self.notes.append(f"{error}: what skipping costs is told by the output alone")

    @property
    def depth(self) -> int:
        return self.seen.depth

    def skip(self) -> None:
        tick = self.doing(f"skipping each of {counted(self.depth, 'block')}", self.depth * len(self.calls))
        self.skipped = without_each(
            self.model, self.anatomy, self.calls, self.loss_of, most=self.most, depth=self.depth, progress=tick
        )

    def linearise(self, given: list[Batch], loss: Loss | None, ridge: float, *, asked: bool) -> None:
        width = self.seen.shape[-1]
        needed = int(ENOUGH * (width + 1))
        try:
            if self.anatomy.streams:
                raise ValueError("a block of several streams mixes them, and is no map of one")
            if isinstance(self.scope.hints.get("mask"), Tensor) and len(given) == 1:
                raise ValueError("a linear map needs two batches where mask= is a tensor of one")
            fitting, judging = halves(given, self.samples, self.anatomy.axis_of(self.anatomy.blocks[0]))
            tokens = self.tokens[0] // 2 if len(given) == 1 else sum(self.tokens[: len(fitting)])
            if not ridge and tokens < needed:
                more = -(-needed * self.samples // max(1, tokens))
                raise ValueError(
                    f"about {tokens} tokens to fit a linear map of width {width} on, and {needed} are needed: give "
                    f"at least {more} sequences of this length, or a ridge"
                )
        except ValueError as error:
            if asked:
                raise
            self.notes.append(f"no linear maps: {error}")
            return
        self.fitted_on = tokens
        passes = passes_to_fit(self.depth, width) * len(fitting)
        tick = self.doing(f"fitting {self.depth} linear maps", passes)
        maps = fit_each(self.model, self.anatomy, fitting, depth=self.depth, width=width, ridge=ridge, progress=tick)
        self.linear_error = errors(self.model, self.anatomy, judging, maps, None)
        if self.loss_of is None:
            return
        judged, loss_of = calls_with_loss(self.scope, judging, loss)
        tick = self.doing(f"replacing each of {len(maps)} blocks", len(maps) * len(judged))
        instead = {block: partial(_replaced, found) for block, found in maps.items()}
        self.linear = exchange_each(
            self.model, self.anatomy, judged, instead, loss_of, most=self.most, depth=self.depth, progress=tick
        )

    def result(self, notes: list[str], asked: dict[str, Any]) -> DepthUse:
        frame = pd.DataFrame({"block": np.arange(1, self.depth + 1, dtype=np.int64)} | self._columns())
        matrix = pd.DataFrame() if self.skipped is None else _matrix(self.skipped.later)
        return DepthUse(frame, matrix, self._metadata(notes, asked))

    def _columns(self) -> dict[str, Any]:
        blocks = range(1, self.depth + 1)
        seen = self.seen
        crosses = "cross_attention_ratio" in seen.means.names
        branches = ["attention", *(["cross_attention"] if crosses else []), "ffn"]
        columns: dict[str, Any] = {
            f"{branch}_{what}": [seen.means.get(b, f"{branch}_{what}") for b in blocks]
            for branch in branches
            for what in ("ratio", "cosine")
        }
        columns["sink_rate"] = [seen.sink_rate(b) for b in blocks]
        columns["largest_logit"] = [seen.logits.get(b, np.nan) for b in blocks]
        for name in ("lens_kl", "lens_top1", "lens_top5"):
            columns[name] = [np.nan if self.lens is None else self.lens.means.get(b, name) for b in blocks]
        empty = np.full(self.depth, np.nan)
        skipped = self.skipped
        columns["skip_later"] = empty if skipped is None else _row_means(skipped.later)
        columns["skip_output"] = empty if skipped is None else skipped.output
        columns["skip_loss"] = empty if skipped is None or skipped.loss is None else skipped.loss
        columns["linear_error"] = [self.linear_error.get(b, np.nan) for b in blocks]
        columns["linear_loss"] = empty if self.linear is None or self.linear.loss is None else self.linear.loss
        return columns

    def _metadata(self, notes: list[str], asked: dict[str, Any]) -> dict[str, Any]:
        config = getattr(self.model, "config", None)
        anatomy, blocks = self.anatomy, self.anatomy.blocks
        placements = {block.placement for block in blocks}
        blind = [b for b in range(1, self.depth + 1) if b not in self.seen.seen]
        notes = [*notes, *anatomy.notes, *anatomy.left_out, *self.notes]
        notes += note(self.seen.not_finite, self.samples)
        if blind:
            named = "any block" if len(blind) == self.depth else f"blocks {', '.join(map(str, blind))}"
            notes.append(f"attention was not seen in {named}: no sink rate and no logits there")
        unseen = [name for name in ("attention", "ffn") if f"{name}_ratio" not in self.seen.means.names]
        if unseen:
            notes.append(f"not seen in this model, or not known where it is added: the branch of {', '.join(unseen)}")
        if self.seen.lengths[0] < SHORT:
            notes.append(
                f"sequences of {self.seen.lengths[0]} tokens: below {SHORT} the sink rate says little, since even "
                "uniform attention gives much of its mass to the first token"
            )
        energy = {name: self.seen.means.get(0, f"energy_{name}") for name in ENERGY}
        known = all(value == value for value in energy.values())
        return {
            "model": getattr(config, "name_or_path", "") or type(self.model).__name__,
            "class": type(self.model).__name__,
            "family": anatomy.family,
            "part": blocks[0].part,
            "blocks": self.depth,
            "width": int(self.seen.shape[-1]),
            "samples": self.samples,
            "tokens": int(self.seen.lengths[1]),
            "shortest": int(self.seen.lengths[0]),
            "placement": placements.pop() if len(placements) == 1 else None,
            "causal": anatomy.causal,
            "weights": dict(training_state(anatomy)),
            "device": str(device_of(self.model)),
            "dtype": self.seen.dtype,
            "loss": self.loss,
            "linear_loss": None if self.linear is None else self.linear.whole,
            "linear_tokens": self.fitted_on if self.linear_error else None,
            "energy": energy if known else None,
            "asked": asked,
            "notes": notes,
        }


def _replaced(found: LinearMap, visit: Visit) -> Tensor:
    """What leaves a block whose linear map is in its place, in the layout and dtype of the model."""
    x = visit.entered
    return (x + found(x)).to(x.dtype)


class _Forget:
    """At the end of every block: what was called before it is no part of the model's tail."""

    def __init__(self, lens: Lens | None):
        self.lens = lens

    def __call__(self, _visit: Visit) -> None:
        if self.lens is not None:
            self.lens.watch.forget()


def _matrix(later: np.ndarray) -> pd.DataFrame:
    names = range(1, len(later) + 1)
    return pd.DataFrame(later, index=pd.Index(names, name="skipped"), columns=pd.Index(names, name="block"))


def _row_means(later: np.ndarray) -> list[float]:
    """Means over the later blocks; nan for the last, which has none."""
    return [float(np.nanmean(row)) if np.isfinite(row).any() else float("nan") for row in later]
