"""The task facts: random keys with random labels. What is learned is stored, and storage is what depth gives here.

Each of `facts` keys is three symbols of 32, and has one of 64 labels. The model reads the key and an asking token, and
says the label at the last token; noise symbols, drawn anew each time, may stand between. `Table` is what a
model without depth can know: of 8192 facts it stores 9 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import BlockConfig, Encoder
from depthscope_lab.fair.together import Batch
from depthscope_lab.training.randomness import derived_generator

SYMBOLS, LABELS, KEY = 32, 64, 3
ASK = SYMBOLS  # the symbol of the last token


@dataclass(frozen=True)
class Facts:
    """The table is drawn from the seed of a run: variants of one seed learn the same facts in the same order."""

    facts: int = 8192
    noise: int = 0  # tokens drawn anew each time, between the key and the asking token
    filler: int = 0  # tokens that are always the same, in the same place
    samples: int = 256  # a step

    def __post_init__(self) -> None:
        if not 0 < self.facts <= SYMBOLS**KEY:
            raise ValueError(f"expected 1 to {SYMBOLS**KEY} facts, as many as there are keys, got {self.facts}")
        if min(self.noise, self.filler) < 0 or self.samples < 1:
            given = f"{self.noise}, {self.filler}, {self.samples}"
            raise ValueError(f"expected noise and filler from 0 and samples from 1 on, got {given}")

    @property
    def tokens(self) -> int:
        """How many tokens the model reads."""
        return KEY + self.noise + self.filler + 1

    @property
    def capacity(self) -> float:
        """Bits that a model which knows all facts has stored."""
        return self.facts * math.log2(LABELS)

    def batch(self, seed: int, step: int) -> Batch:
        """Facts in an order that is drawn anew for each pass over them."""
        keys, labels = table(seed, self.facts)
        places = torch.arange(step * self.samples, (step + 1) * self.samples)
        passes, within = places // self.facts, places % self.facts
        chosen = torch.cat([_order(seed, int(one), self.facts)[within[passes == one]] for one in passes.unique()])
        return self._read(keys[chosen], seed, step), labels[chosen]

    def held_out(self, seed: int) -> Batch:
        """All facts, in noise that training has not seen."""
        keys, labels = table(seed, self.facts)
        return self._read(keys, seed, -1), labels

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, in nats."""
        return F.cross_entropy(outputs, targets, reduction="none")

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """The mean loss, the share of facts that are known, and the bits stored."""
        loss = self.losses(outputs.double(), targets).mean().item()
        right = (outputs.argmax(-1) == targets).double().mean().item()
        return {"loss": loss, "accuracy": right, "bits": bits_stored(loss, self.facts)}

    def _read(self, keys: Tensor, seed: int, step: int) -> Tensor:
        """keys (samples, 3) → what the model reads (samples, tokens)."""
        generator = derived_generator(seed, "noise", step)
        noise = torch.randint(SYMBOLS, (len(keys), self.noise), generator=generator)
        filler = torch.full((len(keys), self.filler + 1), ASK)  # told apart from the asking token by its place alone
        return torch.cat([keys, noise, filler], dim=1)


@lru_cache(maxsize=32)
def table(seed: int, facts: int) -> Batch:
    """Keys (facts, 3), no two the same, and their labels (facts,)."""
    generator = derived_generator(seed, "facts")
    numbers = torch.randperm(SYMBOLS**KEY, generator=generator)[:facts]
    keys = torch.stack([numbers // SYMBOLS**place % SYMBOLS for place in range(KEY)], dim=1)
    return keys, torch.randint(LABELS, (facts,), generator=generator)


@lru_cache(maxsize=64)
def _order(seed: int, number: int, facts: int) -> Tensor:
    return torch.randperm(facts, generator=derived_generator(seed, "order", number))


def bits_stored(loss: float, facts: int) -> float:
    """facts · (log₂ 64 − loss/ln 2) of a mean loss in nats; 0 for a model that is worse than a guess, nan stays nan."""
    bits = facts * (math.log2(LABELS) - loss / math.log(2))
    return bits if math.isnan(bits) else max(0.0, bits)


class Reader(nn.Module):
    """Symbols (batch, n) → scores of labels (batch, 64), read at the last token."""

    def __init__(self, depth: int, block: BlockConfig, tokens: int, seed: int):
        super().__init__()
        generator = derived_generator(seed, "weights")
        self.embedding = nn.Embedding(SYMBOLS + 1, block.width, device="meta").to_empty(device="cpu")
        self.positions = nn.Parameter(torch.empty(tokens, block.width))
        self.encoder = Encoder(depth, block, generator=generator)
        self.head = nn.Linear(block.width, LABELS)
        bound = block.width**-0.5
        with torch.no_grad():  # PyTorch's own, from a generator
            self.embedding.weight.normal_(generator=generator)
            self.positions.normal_(std=0.1, generator=generator)
            self.head.weight.uniform_(-bound, bound, generator=generator)
            self.head.bias.uniform_(-bound, bound, generator=generator)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(symbols) + self.positions)[:, -1])


class Table(nn.Module):
    """The baseline without depth: a score for each (place, symbol), added up; all that a linear model can know."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens
        self.scores = nn.Linear(tokens * (SYMBOLS + 1), LABELS)
        nn.init.zeros_(self.scores.weight)
        nn.init.zeros_(self.scores.bias)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.scores(F.one_hot(symbols, SYMBOLS + 1).flatten(1).to(self.scores.weight.dtype))


def equal_width(depth: int, width: int, shallow: int = 2) -> int:
    """The width at which `shallow` blocks have about the parameters of `depth` blocks of a width; a multiple of 4.

    A block of width d with an FFN of 2d has 8d² weights, and all else grows slower.
    """
    return max(4, 4 * round(width * math.sqrt(depth / shallow) / 4))
