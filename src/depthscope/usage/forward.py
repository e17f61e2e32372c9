"""What one pass tells of each block, while it runs: the size and direction of its branches, its sinks, its logits.

Nothing of the tokens' size is kept, but for the trunk that a branch is about to be added to, which the model keeps too,
and the few tokens that are followed for the logit lens.
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
from depthscope.usage.followed import Followed, Means, taken

ENERGY = ("shared", "sequence", "position", "token")
_SIZES = {"attention_branch": "attention", "cross_attention_branch": "cross_attention", "ffn_branch": "ffn"}


class ForwardPass:
    """Collects the numbers of all passes; `begin` starts that of a batch. `keeps`: the followed tokens of every block's
    output are kept until the next pass."""

    def __init__(self, anatomy: Anatomy, most: int | None, *, keeps: bool):
        self.followed, self.keeps = Followed(most), keeps
        self.means = Means()
        self.logits: dict[int, float] = {}  # the largest of each block
        self.masses: dict[tuple[int, int], tuple[float, float]] = {}  # by block and head: sum over sequences, count
        self.depth = 0
        self.lengths = (0, 0)  # of the sequences: the shortest and the longest, in real tokens
        self.seen: set[int] = set()  # blocks whose attention was seen
        self.not_finite: dict[int, Place] = {}  # by sequence, the first block that a token left with nan or infinity
        self._samples = 0  # of the passes before
        self.shape = torch.Size()  # of what entered block 1, (batch, n, d)
        self.dtype = ""  # of the same
        self.kept: dict[int, Tensor] = {}  # by block, of this pass: the followed tokens of its output
        self.last: tuple[Visit, Tensor, Tensor] | None = None  # the block that ended last: its output as it was passed
        self.pairs = {id(block.module): _pairs(block) for block in anatomy.blocks}
        self.hidden = {id(block.module): _hidden(block) for block in anatomy.blocks}
        shown = [pair for pairs in self.pairs.values() for pair in pairs.items()]
        hidden = [(result, trunk) for of_block in self.hidden.values() for result, (trunk, _) in of_block.items()]
        stations = {station for pair in (*shown, *hidden) for station in pair} | {"input", "output"}
        self.acts = (Listen(stations, self._see_tokens), ListenToAttention(self._see_attention))
        self._trunk: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}  # copies, for branches that are seen by what they change alone
        self._weight = 0.0
        # Of this pass, where it was computed: by block, the sequence of each followed token that is not finite, −1 for
        # others; by block and head, the masses and the largest logits.
        self._finite: list[tuple[int, Tensor]] = []
        self._heads: list[tuple[int, int, Tensor, Tensor]] = []

    def begin(self) -> None:
        self.kept.clear()
        self.last = None
        self._trunk.clear()
        self._before.clear()
        self._finite, self._heads = [], []

    def end(self) -> None:
        """The end of a pass: how the tokens that leave the last block are alike."""
        self._trunk.clear()
        if self.last is None:
            return
        visit, tokens, _ = self.last
        self._read()
        self._samples += len(tokens)
        with torch.no_grad(), full_precision(tokens):
            split = energy_split(TokenMatrix(tokens, visit.real).ordinary)
        for name in ENERGY:
            self.means.add(0, f"energy_{name}", getattr(split, name), self._weight)

    def _read(self) -> None:
        """What waited for the end of the pass: one transfer."""
        heads = self._heads
        of_heads = [number for *_, mass, logit in heads for number in (mass, logit)]
        answers = fetched([*of_heads, *(rows for _, rows in self._finite)])
        for (block, head, *_), mass, logit in zip(heads, answers[::2], answers[1::2], strict=False):
            total, count = self.masses.get((block, head), (0.0, 0.0))
            known = mass[mass.isfinite()]
            self.masses[block, head] = total + known.sum().item(), count + len(known)
            largest = logit[logit.isfinite()]
            if len(largest):
                self.logits[block] = max(self.logits.get(block, -torch.inf), largest.max().item())
        for (block, _), rows in zip(self._finite, answers[2 * len(heads) :], strict=True):
            for row in rows[rows >= 0].unique().int().tolist():
                self.not_finite.setdefault(self._samples + row, (block, "output"))

    def sink_rate(self, block: int) -> float:
        """The share of heads that give more than `SINK_MASS` of their attention to the first token, mean over queries
        and sequences."""
        masses = [total / count for (b, _), (total, count) in self.masses.items() if b == block and count]
        return sum(mass > SINK_MASS for mass in masses) / len(masses) if masses else float("nan")

    def _see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad(), full_precision(tokens):
            if station == "input":
                self._begin_block(visit, tokens)
            pairs = self.pairs[id(visit.block.module)]
            if station in pairs:
                self._compare(visit, station, tokens, self._trunk.get(pairs[station]))
            if station in pairs.values():
                self._trunk[station] = tokens
            self._see_change(visit, station, tokens)
            if station == "output":
                self.last = visit, tokens, source
                places = self.followed(tokens, visit.real)
                followed = taken(tokens, places)
                rows = places.div(tokens.shape[1], rounding_mode="floor")  # (k)
                self._finite.append((visit.number, torch.where(followed.isfinite().all(dim=-1), -1, rows)))
                if self.keeps:
                    self.kept[visit.number] = followed
                self._trunk.clear()
                self._before.clear()

    def _see_change(self, visit: Visit, station: str, tokens: Tensor) -> None:
        """A branch that no module shows is what it changes: the trunk after it less the trunk before it."""
        hidden = self.hidden[id(visit.block.module)]
        if station in hidden:
            trunk, branch = hidden[station]
            before = self._before.pop(trunk, None)
            if before is not None and before.shape == tokens.shape:
                self._compare(visit, branch, tokens.to(before.dtype) - before, before)
        if station in {trunk for trunk, _ in hidden.values()}:
            wide = torch.promote_types(tokens.dtype, torch.float32)  # in which the difference of halves is exact
            self._before[station] = tokens.to(wide, copy=True)  # a model may add to it in place

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

    def _compare(self, visit: Visit, station: str, branch: Tensor, trunk: Tensor | None) -> None:
        if trunk is None or trunk.shape != branch.shape:
            return
        found = against_trunk(branch, trunk)
        name = _SIZES[station]
        self.means.add(visit.number, f"{name}_ratio", median(found.ratio, visit.real), self._weight)
        self.means.add(visit.number, f"{name}_cosine", median(found.cosine, visit.real), self._weight)

    def _see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], _values: Tensor | None) -> None:
        if kind != "attention":
            return
        block = visit.number
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for head in heads:
                if head.attention.shape[-1] != head.attention.shape[-2]:
                    return  # keys of a cache, which are no tokens of this pass
                with full_precision(head.scores if head.scores is not None else _tensor_of(head)):
                    found = first_token(head.attention, visit.real_of_sequences, head.scores)
                self.seen.add(block)
                self._heads.append((block, head.number, found.mass, found.largest_logit))


def _tensor_of(head: Head) -> Tensor:
    found: Tensor = getattr(head.attention, "query", None)  # type: ignore[assignment]
    return head.attention.dense() if found is None else found


def _hidden(block: BlockAnatomy) -> dict[str, tuple[str, str]]:
    """By station of a sum, that of the trunk in it and the branch in it, where no module shows that branch: Granite
    multiplies it before it is added, XLNet makes it inside a method. Of two branches that are added at once nothing is
    known.
    """
    return {
        addition.result: (addition.trunk, addition.branch)
        for addition in block.all_additions
        if addition.beside is None
        and addition.branch not in block.spots
        and {addition.trunk, addition.result} <= block.spots.keys()
    }


def _pairs(block: BlockAnatomy) -> dict[str, str]:
    """By station of a branch, that of the trunk that it is added to; of those that the block shows."""
    pairs = {}
    for addition in block.all_additions:
        for branch in (addition.branch, addition.beside):
            if branch is not None and {branch, addition.trunk} <= block.spots.keys():
                pairs[branch] = addition.trunk
    return pairs
