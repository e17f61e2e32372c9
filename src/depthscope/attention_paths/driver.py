"""`paths`: a model and inputs in, what paths of each length make of its output out."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import pandas as pd
import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.attention_paths.attention_rules import heads_passed
from depthscope.attention_paths.path_tensor import (
    TOLERANCE,
    Log,
    NotFollowed,
    PathTensor,
    carrying,
    plain,
    relative_error,
    terms_of,
    unwrap,
)
from depthscope.attention_paths.shares import PathShares, measured, residuals, rows_of
from depthscope.attention_paths.terms import Terms
from depthscope.attention_paths.unfollowed_reads import UnfollowedReads, ours
from depthscope.discovery import Hints
from depthscope.hooks import Change, Listen, Machine, Visit, refuse_ablated
from depthscope.hooks.staying import hooks_in
from depthscope.inputs import Batch, Tokenizer
from depthscope.inputs.batches import call_alike
from depthscope.interruption import attempt, was_stopped
from depthscope.progress import Tick
from depthscope.safety import undone
from depthscope.scope import Scope, scope_of


def paths(
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    keep_terms: bool = False,
    tokenizer: Tokenizer | None = None,
    progress: Tick | None = None,
    **hints: Unpack[Hints],
) -> PathShares:
    """Splits the last block's output by the length of the attention paths that led there (Dong et al. 2021, Thm 2.1).

    With attention, the scales of norms, the gates of activations and the routing of experts frozen as they are in this
    pass, every block is an affine map, and the output is the sum, over all paths, of what each makes of the tokens that
    enter block 1, and a constant part (biases; what a decoder reads of its encoder). At each block a path takes one of
    the heads or the skip; its length is the number of heads. FFNs and norms belong to every path. All paths of each
    length are summed exactly, by dynamic programming, in one pass of the model's own code. That the terms add up to the
    output is checked after every block.

    Args:
        model: any model that holds Transformer blocks, or a `Scope` of it; `part` says which of several parts.
        inputs: as for `probe`.
        keep_terms: keeps the terms themselves.
        tokenizer: makes ids of strings.
        progress: is called after every block.
        hints: what you say of the model: `blocks`, `part`, `token_axis`, `mask`, `causal`, as for `Scope`.

    Returns:
        `PathShares`: how much of the output came on paths of each length.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> shares = depthscope.paths(model, torch.randn(2, 5, 16))
        >>> shares.metadata["blocks"]
        3
    """
    scope = scope_of(model, inputs, tokenizer, **hints)
    model, notes = scope.model, scope.notes
    refuse_ablated(model)
    if remedies := {type(hook.remedy).__name__ for _, hook in hooks_in(model) if hook.remedy is not None}:
        named = ", ".join(sorted(remedies))
        notes.append(f"the model has remedies ({named}): the paths are those of the changed model")
    calls, anatomy = list(scope.calls()), scope.anatomy
    _refuse(anatomy)
    following = Following(model, anatomy, progress)
    frame: list[pd.DataFrame] = []
    blocks: list[pd.DataFrame] = []
    terms: list[Tensor] = []
    samples = 0
    with scope.undisturbed():
        for number, batch in enumerate(calls, start=1):
            if number == 1:
                following.run(batch)
            else:
                attempt(f"batches from {number} on", partial(following.run, batch))
                if was_stopped():
                    break
            split = following.split()
            of_output = measured(split.double(), following.whole.double(), following.real)
            frame.append(rows_of(of_output | residuals(split.double(), following.real), samples))
            blocks += [rows_of(found, samples, block=block) for block, found in following.by_block]
            if keep_terms:
                terms.append(torch.cat([split[1:], split[:1]]))
            samples += split.shape[1]
            metadata = _describe(model, anatomy, following, samples)
            no_attention = following.without_attention
    if no_attention:
        named = ", ".join(map(str, no_attention))
        notes.append(f"blocks {named} have no self-attention: paths become no longer there")
    metadata["notes"] = [*notes, *anatomy.notes, *anatomy.left_out]
    if len(shapes := {tuple(term.shape[2:]) for term in terms}) > 1:
        raise ValueError(
            f"expected batches of one shape for keep_terms=True, got tokens {sorted(shapes)}: pad them alike, or pass "
            "them one by one"
        )
    return PathShares(
        pd.concat(frame).sort_values(["sample", "length"], ignore_index=True),
        pd.concat(blocks).sort_values(["block", "sample", "length"], ignore_index=True),
        metadata,
        torch.cat(terms, dim=1) if keep_terms else None,
    )


class Following:
    """One pass in which the tokens carry their paths from the first block to the last."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, progress: Tick | None = None):
        self.model, self.family, self.progress = model, anatomy.family, progress
        self.machine = Machine(model, anatomy, Change("input", self._enter), Change("output", self._leave))
        self.ordinary = Machine(model, anatomy, Listen({"output"}, self._see))
        self.names = [block.name for block in anatomy.blocks]
        self.longest = 0  # tokens of a batch
        self.error = 0.0

    def run(self, batch: Batch) -> None:
        """Follows one batch."""
        self.terms: Terms | None = None
        self.left: Tensor | None = None  # what the last block gave, in the layout of the model
        self.real: Tensor | None = None
        self.heads: list[int] = []  # of every block that has attention
        self.without_attention: list[int] = []  # blocks
        self.by_block: list[tuple[int, dict[str, Tensor]]] = []  # what was measured of each block
        self._expected: list[Tensor] = []  # what each block gives when nobody follows
        self._log, self._reads, self._running = Log(), UnfollowedReads(), ""
        with self.ordinary:
            call_alike(self.model, batch)
        try:
            with undone(lambda: unwrap(self.model)), self.machine, self._reads:
                call_alike(self.model, batch)
        except NotFollowed as error:
            raise ValueError(f"block {self._running}: {error}") from None
        if self.left is None:
            raise ValueError(f"none of the blocks {self.names[:4]} ran; name them with blocks=")
        self.longest = max(self.longest, self.whole.shape[1])
        if not self.heads:
            raise ValueError("none of the blocks has self-attention: all paths have length 0")

    @property
    def whole(self) -> Tensor:
        """The last block's output, (batch, n, d)."""
        assert self.left is not None
        return self._batch_first(self.left)

    def split(self) -> Tensor:
        """The constant part, and the terms by length 0, …, L: (L + 2, batch, n, d)."""
        assert self.terms is not None
        return torch.stack([self._batch_first(term) for term in self.terms.spanning(0, self.terms.end).values])

    def _batch_first(self, tokens: Tensor) -> Tensor:
        return self.machine.running.batch_first(tokens)

    def _see(self, visit: Visit, _station: str, tokens: Tensor, _source: Tensor) -> None:
        finite = torch.isfinite(tokens).all(dim=-1)  # (batch, n)
        if not bool(finite.all()):
            padding = visit.real is not None and bool(finite[visit.real].all())
            where = "in rows of padding, which later blocks read" if padding else "so that their paths mean nothing"
            raise ValueError(
                f"block {visit.number} ({visit.block.name}): the model itself gives numbers that are not finite (NaN "
                f"or infinity) there, {where}"
            )
        self._expected.append(tokens.clone())

    @ours()
    def _enter(self, visit: Visit, tokens: Tensor) -> Tensor:
        self._running = f"{visit.number} ({visit.block.name})"
        if visit.number == 1:
            if tokens.dtype not in TOLERANCE:
                found = str(tokens.dtype).removeprefix("torch.")
                raise ValueError(
                    f"expected a model in float32 or float64, whose terms add up to its output, got {found}"
                )
            self.terms = Terms.entering(tokens)
        elif self.left is None or tokens.shape != self.left.shape or not torch.equal(tokens, self.left):
            raise ValueError(
                f"something else changes the tokens between blocks {visit.number - 1} and {visit.number}, where their "
                "paths are not followed; name blocks that follow each other with blocks=, or one part with part="
            )
        assert self.terms is not None
        self._reads.block = visit.number
        self._log = Log(self._batch_first(tokens).shape[0], reads=self._reads)
        if visit.block.attention is not None:
            self._log.attends = lambda: self.machine.inside is not None
        return carrying(tokens, self.terms, self._log)

    @ours()
    def _leave(self, visit: Visit, tokens: Tensor) -> Tensor:
        self._reads.block, self._log.ended = 0, True
        if self._reads.refusal:
            raise NotFollowed(self._reads.refusal)
        if not isinstance(tokens, PathTensor):
            raise NotFollowed("what leaves it is not made of what entered it by functions of PyTorch")
        assert self.terms is not None
        found = plain(tokens)
        whole, allowed = self._batch_first(found), TOLERANCE[visit.entered.dtype]
        # What writes into the memory of another tensor does not do so where both are followed.
        error = relative_error(whole, self._expected[visit.number - 1], visit.real)
        if not error <= allowed:
            raise NotFollowed(
                f"it gives other numbers when its paths are followed, {error:.1e} from the usual ones: something in it "
                "writes in place into tokens that another tensor shares"
            )
        terms = terms_of(tokens)
        error = relative_error(self._batch_first(terms.whole()), whole, visit.real)
        self.error = max(self.error, error)
        if not error <= allowed:
            raise NotFollowed(f"its terms differ from its output by {error:.1e} of it, more than {allowed:.0e}")
        may_have_none = self.family != "unknown" and visit.block.attention is None
        grown = terms.end - self.terms.end
        if heads := heads_passed(self._log.seen, whole.shape[1], grown, may_have_none=may_have_none):
            self.heads.append(heads)
        else:
            self.without_attention.append(visit.number)
        self.terms, self.left, self.real = terms, found, visit.real
        self.by_block.append((visit.number, measured(self.split(), whole, visit.real)))
        if self.progress is not None:
            self.progress()
        return found


def _refuse(anatomy: Anatomy) -> None:
    if len(anatomy.parts) > 1:
        named = ", ".join(anatomy.parts)
        raise ValueError(
            f"this model has several parts ({named}): say which one with part=, as in part={anatomy.parts[-1]!r}"
        )
    if anatomy.streams:
        raise ValueError(
            "this model has several streams (hyper-connections), which its blocks mix by weights of each token: paths "
            "are followed along one trunk"
        )
    for block in anatomy.blocks:
        leaves = block.spots.get("output")
        if leaves is None or "input" not in block.spots or leaves.added_to is not None:
            raise ValueError(
                f"{block.name!r} does not show what enters and leaves it, so that paths cannot be followed through it; "
                "name modules that return the tokens of the trunk with blocks="
            )


def _describe(model: nn.Module, anatomy: Anatomy, following: Following, samples: int) -> dict[str, Any]:
    whole = following.whole
    return {
        "model": getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__,
        "class": type(model).__name__,
        "family": anatomy.family,
        "part": anatomy.parts[0],
        "blocks": len(following.by_block),
        "heads": following.heads,
        "samples": samples,
        "tokens": following.longest,
        "width": whole.shape[2],
        "dtype": str(whole.dtype).removeprefix("torch."),
        "device": str(whole.device),
        "largest_error": following.error,
    }
