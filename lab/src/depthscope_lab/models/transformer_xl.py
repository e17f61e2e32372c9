"""Transformer-XL (Dai et al. 2019): segments that remember, relative positions, a tied adaptive softmax.

The defaults are the authors' base model for WikiText-103; Yu & Zhang 2024 (Fig. 7) take 60 blocks with an
FFN of 820 instead. As in their code: u and v are shared by all blocks, embeddings are multiplied by √d, a
memory holds the inputs of each block, and pre-norm norms memory and segment alike. Their code has no final
norm in pre-norm: that is `final_norm=False`. Attention has no dropout of its own (theirs is 0 there).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthscope import stations
from depthscope.models.block import Station
from depthscope.models.wiring import Norm, Wiring, post_norm, wiring_of
from depthscope.stations import Placement
from depthscope_lab.models.adaptive_softmax import TiedAdaptiveSoftmax, cutoffs_below
from depthscope_lab.models.carried_mean import CarriedMean, total_dtype
from depthscope_lab.models.relative_attention import Place, RelativeAttention, sinusoids


@dataclass(frozen=True)
class Context:
    """How far a token looks. `memory`: tokens kept from before the segment. `clamp`: distances above it count as it.

    `same_length`: every token sees the last `memory` tokens, itself included, wherever it stands in its
    segment; without it, the later ones see more. Only then is the result independent of the segments' length.
    """

    memory: int = 150
    clamp: int | None = None
    same_length: bool = False

    def __post_init__(self) -> None:
        if self.memory < int(self.same_length):
            raise ValueError(f"expected a memory of at least {int(self.same_length)} tokens, got {self.memory}")
        if self.clamp is not None and self.clamp < 0:
            raise ValueError(f"expected distances clamped at 0 or more, or None, got {self.clamp}")


EVALUATION = Context(memory=640, clamp=400, same_length=True)  # the authors', with segments of 64


@dataclass(frozen=True)
class TransformerXLConfig:
    """What a Transformer-XL is made of."""

    vocabulary: int = 267_735
    depth: int = 16
    width: int = 410
    heads: int = 10
    ffn_width: int = 2100
    cutoffs: tuple[int, ...] | None = None  # None: 20000, 40000, 200000, as far as they are below the vocabulary
    placement: Wiring | str = post_norm  # a wiring, or the name of one
    final_norm: bool | None = None  # None: as the wiring asks for
    dropout: float = 0.1
    carried_mean: CarriedMean | None = None  # subtracted at the FFN's input, on the trunk
    context: Context = Context()
    init_std: float = 0.02  # of all weights but the norms' gains; the authors'

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"expected a depth of at least 1 block, got {self.depth}")
        if self.width % 2:
            raise ValueError(f"expected an even width (half sines, half cosines), got {self.width}")
        wiring = self.wiring  # refuses an unknown name
        if wiring.second_stream:
            raise ValueError(
                f"expected a wiring with one stream, got {wiring.name!r}: Transformer-XL has no place for a second "
                "one; take a recipe for images, or another wiring"
            )
        if self.final_norm and not wiring.final_norm:
            raise ValueError(f"expected no final norm with the wiring {wiring.name!r}, whose output is normed already")
        if self.carried_mean is not None and not wiring.ffn_reads_trunk:
            raise ValueError(
                f"expected post-norm with a carried mean: in wiring {wiring.name!r} the FFN's input is not the trunk"
            )

    @property
    def wiring(self) -> Wiring:
        return wiring_of(self.placement)


class Memory(NamedTuple):
    """What one segment leaves for the next, without gradients."""

    hidden: Tensor  # (depth, batch, m, d): the inputs of each block for the last m tokens
    total: Tensor | None = None  # (depth, batch, d): with a causal carried mean, what `Running` calls so, of the stream
    weight: Tensor | None = None  # (): and its weight, the same for all blocks and rows

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: a flat dict."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Memory:
        if "hidden" not in tensors or not tensors.keys() <= set(cls._fields):
            raise ValueError(f"expected the tensors of a memory ({', '.join(cls._fields)}), got {sorted(tensors)}")
        return cls(**tensors)


class Prediction(NamedTuple):
    """What a pass over a segment gives."""

    hidden: Tensor  # (batch, n, d): what the softmax reads
    losses: Tensor | None  # (batch, n): −log p(target) in nats; None without targets
    memory: Memory


class Given(NamedTuple):
    """What a block is given beside the tokens of a segment."""

    past: Tensor  # (batch, m, d): the block's inputs for the tokens before
    place: Place
    carried: list[Tensor]  # with a causal carried mean: the stream's total (batch, d), before and, once past, after
    weight: Tensor | None = None  # (), of that total before


class TransformerXLBlock(nn.Module):
    """One block; its stations and wirings are those of `Block`."""

    def __init__(self, config: TransformerXLConfig, number: int = 1):
        super().__init__()
        width = config.width
        self.wiring = config.wiring
        self.number, self.depth = number, config.depth
        self.alpha = 1.0
        self.carried_mean = config.carried_mean
        self.attention = RelativeAttention(width, config.heads)
        self.dropout = nn.Dropout(config.dropout)
        self.ffn = nn.Sequential(
            nn.Linear(width, config.ffn_width),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.ffn_width, width),
            nn.Dropout(config.dropout),
        )
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.stations = nn.ModuleDict({name: Station() for name in stations.BLOCK})

    @property
    def placement(self) -> Placement | None:
        """Where the norms stand."""
        return self.wiring.placement

    def forward(
        self,
        x: Tensor,
        past: Tensor,
        place: Place,
        total: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (batch, n, d), past (batch, m, d) → (batch, n, d). With total (batch, d), the new total as well."""
        given = Given(past, place, [] if total is None else [total], weight)
        output = self.wiring.forward(self, x, given)
        return output if total is None else (output, given.carried[-1])

    def attend(self, x: Tensor, given: Given, norm: Norm | None = None) -> Tensor:
        """What attention gives (batch, n, d); `norm`, if there is one, norms segment and memory alike."""
        past = given.past
        if norm is not None:
            x, past = norm(x), norm(past)
        return self.dropout(self.attention(self.stations["attention_input"](x), past, given.place))

    def enter_ffn(self, x: Tensor, given: Given) -> Tensor:
        """x (batch, n, d) on its way into the FFN, without the mean that the model carries."""
        if given.weight is not None:
            assert self.carried_mean is not None
            x, after = self.carried_mean.subtract(x, given.carried[0], given.weight)
            given.carried.append(after)
        elif self.carried_mean is not None:
            x = self.carried_mean.subtract_of_segment(x)
        return self.stations["ffn_input"](x)


class TransformerXL(nn.Module):
    """ids (batch, n), each row the continuation of the same row in the segment before → `Prediction`."""

    def __init__(
        self, config: TransformerXLConfig = TransformerXLConfig(), generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.config = config
        cutoffs = cutoffs_below(config.vocabulary) if config.cutoffs is None else config.cutoffs
        self.softmax = TiedAdaptiveSoftmax(config.vocabulary, config.width, cutoffs)
        self.blocks = nn.ModuleList(TransformerXLBlock(config, number) for number in range(1, config.depth + 1))
        final_norm = config.wiring.final_norm if config.final_norm is None else config.final_norm
        self.final_norm = nn.LayerNorm(config.width) if final_norm else nn.Identity()
        self.u = nn.Parameter(torch.empty(config.heads, config.width // config.heads))
        self.v = nn.Parameter(torch.empty(config.heads, config.width // config.heads))
        self.dropout = nn.Dropout(config.dropout)
        initialise(self, generator)
        for block in self.blocks:
            config.wiring.prepare(block)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        memory: Memory | None = None,
        context: Context | None = None,
    ) -> Prediction:
        """`context` replaces the configuration's, as for evaluation; what a memory has beyond it is not seen."""
        context = context or self.config.context
        x = self.dropout(self.softmax.embed(ids) * math.sqrt(self.config.width))  # (batch, n, d)
        memory = self.empty_memory(len(ids)) if memory is None else self._checked(memory, len(ids))
        pasts = memory.hidden[:, :, max(0, memory.hidden.shape[2] - context.memory) :]
        n, m = ids.shape[1], pasts.shape[2]
        place = self._place(n, m, context)
        inputs, totals = [], []
        for number, block in enumerate(self.blocks):
            inputs.append(x.detach())
            if memory.total is None:
                x = block(x, pasts[number], place)
            else:
                x, after = block(x, pasts[number], place, memory.total[number], memory.weight)
                totals.append(after)
        hidden = self.dropout(self.final_norm(x))
        kept = min(m + n, context.memory)
        new = Memory(
            torch.stack([torch.cat([p, x], dim=1)[:, m + n - kept :] for p, x in zip(pasts, inputs, strict=True)]),
            torch.stack(totals) if totals else None,
            self._weight_after(n, memory),
        )
        return Prediction(hidden, None if targets is None else self.softmax(hidden, targets), new)

    def empty_memory(self, batch: int) -> Memory:
        """The memory of a stream that begins."""
        depth, width, weight = self.config.depth, self.config.width, self.softmax.weight
        hidden = weight.new_empty(depth, batch, 0, width)
        if self.config.carried_mean is None or self.config.carried_mean.leaks:
            return Memory(hidden)
        wide = total_dtype(weight.dtype)
        return Memory(
            hidden, weight.new_zeros(depth, batch, width, dtype=wide), torch.zeros((), dtype=wide, device=weight.device)
        )

    def _checked(self, memory: Memory, batch: int) -> Memory:
        empty = self.empty_memory(batch)
        have, want = memory.hidden.shape, empty.hidden.shape
        if (*have[:2], *have[3:]) != (*want[:2], *want[3:]) or memory.tensors().keys() != empty.tensors().keys():
            raise ValueError(
                f"expected a memory with {', '.join(empty.tensors())} for {want[0]} blocks, {want[1]} rows and width "
                f"{want[3]}, got {', '.join(memory.tensors())} of shape {tuple(have)}; begin a stream with memory=None"
            )
        return memory

    def _weight_after(self, n: int, memory: Memory) -> Tensor | None:
        if memory.weight is None:
            return None
        assert self.config.carried_mean is not None
        return self.config.carried_mean.weight_after(n, memory.weight)

    def _place(self, n: int, m: int, context: Context) -> Place:
        """The positions of n tokens behind a memory of m."""
        device, dtype = self.u.device, self.u.dtype
        distances = torch.arange(m + n - 1, -1, -1, device=device)  # of the last token to each
        distance = distances - torch.arange(n - 1, -1, -1, device=device)[:, None]  # (n, m + n), of each token
        hidden = distance < 0
        if context.same_length:
            hidden = hidden | (distance >= context.memory)
        clamped = distances if context.clamp is None else distances.clamp(max=context.clamp)
        wide = torch.promote_types(dtype, torch.float32)
        encodings = self.dropout(sinusoids(clamped.to(wide), self.config.width).to(dtype))
        return Place(
            torch.cat([encodings.new_zeros(1, self.config.width), encodings]),
            torch.zeros(n, m + n, device=device, dtype=dtype).masked_fill(hidden, -torch.inf),
            self.u,
            self.v,
        )


def initialise(model: TransformerXL, generator: torch.Generator | None = None) -> None:
    """The authors': weights, embeddings, clusters, u, v from N(0, 0.02²), norms' gains from N(1, 0.02²), biases 0.

    The configuration's `init_std` replaces the first of the two.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            gain = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.LayerNorm)
            std = 0.02 if gain else model.config.init_std
            nn.init.normal_(parameter, mean=float(gain), std=std, generator=generator)
