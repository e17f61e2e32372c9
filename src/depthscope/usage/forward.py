"""What one pass tells of each block, while it runs: the size and direction of its branches, its sinks, its logits.

Nothing of the tokens' size is kept, but for the trunk that a branch is about to be added to, which the model keeps too,
and the sampled tokens for the logit lens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.hooks import Head, Listen, ListenToAttention, Visit, full_precision
from depthscope.measures import SINK_MASS, TokenMatrix, against_trunk, energy_split, first_token, median
from depthscope.probing.finite import Place
from depthscope.transfers import fetched
from depthscope.usage.sampling import Means, SampledTokens

ENERGY = ("shared", "sequence", "position", "token")


class ForwardPass:
    """Collects the numbers of all passes; `begin` starts that of a batch. `keeps`: the sampled tokens of every block's
    output are kept until the next pass."""

    def __init__(self, anatomy: Anatomy, sample: int | None, *, keeps: bool):
        self.sampled, self.keeps = SampledTokens(sample), keeps
        self.means = Means()
        self.logits: dict[int, float] = {}  # the largest of each block
        self.masses: dict[tuple[int, int], tuple[float, float]] = {}  # by block and head: sum over sequences, count
        self.depth = 0
        self.samples = 0  # of the passes so far
        self.lengths = (0, 0)  # of the sequences: the shortest and the longest, in real tokens
        self.with_attention: set[int] = set()  # blocks whose attention was seen
        self.not_finite: dict[int, Place] = {}  # by sequence, the first block that a token left with nan or infinity
        self.shape = torch.Size()  # of what entered block 1, (batch, n, d)
        self.dtype = ""  # of the same
        self.sums = {id(block.module): _sums(block) for block in anatomy.blocks}
        wanted = {name for sums in self.sums.values() for seen, (trunk, *_) in sums.items() for name in (seen, trunk)}
        self.acts = Listen(wanted | {"input", "output"}, self._see_tokens), ListenToAttention(self._see_attention)
        self._weight = 0.0
        self.begin()

    def begin(self) -> None:
        self.kept: dict[int, Tensor] = {}  # by block, of this pass: the sampled tokens of its output
        self.last: tuple[Visit, Tensor, Tensor] | None = None  # the block that ended last: its output as it was passed
        self._trunk: dict[str, Tensor] = {}  # of the block that runs, by station
        # Of this pass, where it was computed: by block, the sequence of each sampled token that is not finite, −1 for
        # others; by block and head, the masses and the largest logits.
        self._finite: list[tuple[int, Tensor]] = []
        self._heads: list[tuple[int, int, Tensor, Tensor]] = []

    def end(self) -> None:
        """The end of a pass: how the tokens that leave the last block are alike, and what waited, in one transfer."""
        self._trunk.clear()
        if self.last is None:
            return
        heads = self._heads
        of_heads = [number for *_, mass, logit in heads for number in (mass, logit)]
        answers = fetched([*of_heads, *(rows for _, rows in self._finite)])
        for (block, head, *_), mass, logit in zip(heads, answers[::2], answers[1::2], strict=False):
            total, count = self.masses.get((block, head), (0.0, 0.0))
            known, finite = mass[mass.isfinite()], logit[logit.isfinite()]
            self.masses[block, head] = total + known.sum().item(), count + len(known)
            if len(finite):
                self.logits[block] = max(self.logits.get(block, -torch.inf), finite.max().item())
        visit, tokens, _ = self.last
        earlier = self.samples * visit.streams
        for (block, _), rows in zip(self._finite, answers[2 * len(heads) :], strict=True):
            for row in rows[rows >= 0].unique().int().tolist():
                self.not_finite.setdefault(earlier + row, (block, "output"))
        self.samples += len(tokens) // visit.streams
        with torch.no_grad(), full_precision(tokens):
            split = energy_split(TokenMatrix(tokens, visit.real).ordinary)
        for name in ENERGY:
            self.means.add(0, f"energy_{name}", getattr(split, name), self._weight)

    def sink_rate(self, block: int) -> float:
        """The share of heads that give more than `SINK_MASS` of their attention to the first token, mean over queries
        and sequences."""
        masses = [total / count for (b, _), (total, count) in self.masses.items() if b == block and count]
        return sum(mass > SINK_MASS for mass in masses) / len(masses) if masses else float("nan")

    def _see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        sums = self.sums[id(visit.block.module)]
        with torch._C.DisableTorchFunction(), torch.no_grad(), full_precision(tokens):
            if station == "input":
                self._begin_block(visit, tokens)
            if station in sums:
                trunk, name, is_sum = sums[station]
                before = self._trunk.get(trunk)
                if before is not None and before.shape == tokens.shape:
                    found = against_trunk(tokens.to(before.dtype) - before if is_sum else tokens, before)
                    self.means.add(visit.number, f"{name}_ratio", median(found.ratio, visit.real), self._weight)
                    self.means.add(visit.number, f"{name}_cosine", median(found.cosine, visit.real), self._weight)
            uses = [is_sum for trunk, _, is_sum in sums.values() if trunk == station]
            if any(uses):  # a copy, since a model may add in place, in which the difference of halves is exact
                self._trunk[station] = tokens.to(torch.promote_types(tokens.dtype, torch.float32), copy=True)
            elif uses:
                self._trunk[station] = tokens
            if station == "output":
                self.last = visit, tokens, source
                places, sampled = self.sampled.places(tokens, visit.real), self.sampled.of(tokens, visit.real)
                rows = places.div(tokens.shape[1], rounding_mode="floor")  # (k)
                self._finite.append((visit.number, torch.where(sampled.isfinite().all(dim=-1), -1, rows)))
                if self.keeps:
                    self.kept[visit.number] = sampled
                self._trunk.clear()

    def _begin_block(self, visit: Visit, tokens: Tensor) -> None:
        self.depth = max(self.depth, visit.number)
        if visit.number > 1:
            return
        if visit.real is not None and not bool(visit.real.any()):
            raise ValueError(
                f"the mask hides all {tuple(visit.real.shape)} tokens: expected true, or 1, for real ones; mask= "
                'says which argument marks them ("~name": true for padding)'
            )
        counts = [tokens.shape[1]] if visit.real is None else visit.real.sum(dim=-1).tolist()
        self._weight = float(tokens.shape[0] * tokens.shape[1] if visit.real is None else sum(counts))
        shortest, longest = self.lengths
        self.lengths = int(min(counts) if not longest else min(shortest, *counts)), int(max(longest, *counts))
        self.shape, self.dtype = tokens.shape, str(tokens.dtype).removeprefix("torch.")

    def _see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], _values: Tensor | None) -> None:
        if kind != "attention":
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for head in heads:
                if head.attention.shape[-1] != head.attention.shape[-2]:
                    return  # keys of a cache, which are no tokens of this pass
                with full_precision(head.scores if head.scores is not None else _tensor_of(head)):
                    found = first_token(head.attention, visit.real_of_sequences, head.scores)
                self.with_attention.add(visit.number)
                self._heads.append((visit.number, head.number, found.mass, found.largest_logit))


def _tensor_of(head: Head) -> Tensor:
    found: Tensor = getattr(head.attention, "query", None)  # type: ignore[assignment]
    return head.attention.dense() if found is None else found


def _sums(block: BlockAnatomy) -> dict[str, tuple[str, str, bool]]:
    """By station, the trunk that a branch is added to, the branch's name, and whether the station is that of the sum.

    That is so where no module shows the branch, which is then what the sum changes: Granite multiplies it before it is
    added, XLNet makes it inside a method. Of two branches that are added at once nothing is known there.
    """
    found: dict[str, tuple[str, str, bool]] = {}
    for addition in block.all_additions:
        if addition.trunk not in block.spots:
            continue
        for branch in filter(None, (addition.branch, addition.beside)):
            if branch in block.spots:
                found[branch] = addition.trunk, branch.removesuffix("_branch"), False
            elif addition.beside is None and addition.result in block.spots:
                found[addition.result] = addition.trunk, branch.removesuffix("_branch"), True
    return found
