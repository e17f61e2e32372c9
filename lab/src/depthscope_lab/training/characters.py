"""The task of predicting the next letter of Python's manual, which every Python has, with a plain causal Transformer.

It has no memory, so that every causal remedy fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import CausalLM
from depthscope.remedies import apply
from depthscope.text import read_text
from depthscope_lab.training.config import CharacterConfig
from depthscope_lab.training.randomness import derived_generator
from depthscope_lab.training.task import Carry, Share, block_of, mixings_in, remedies_of

_AT_ONCE = 32  # windows of an evaluation


@dataclass(frozen=True)
class Characters:
    """Three streams of numbers (int64), and the letters that they stand for; number 0 is any other letter."""

    name: str
    letters: str
    train: Tensor
    valid: Tensor
    test: Tensor
    fingerprint: str

    @property
    def symbols(self) -> int:
        """How many different numbers there are."""
        return len(self.letters) + 1

    def describe(self) -> dict[str, Any]:
        """As JSON: a run is continued only on the same."""
        counts = {f"{split} characters": len(getattr(self, split)) for split in ("train", "valid", "test")}
        return {"name": self.name, "symbols": self.symbols, **counts, "fingerprint": self.fingerprint}


def load_characters() -> Characters:
    """The manual from its beginning to its end: 8/10 to train, then 1/10 each to validate and to test."""
    text = read_text(None)
    tenth = len(text.content) // 10
    parts = text.content[: -2 * tenth], text.content[-2 * tenth : -tenth], text.content[-tenth:]
    letters = "".join(sorted(set(parts[0])))
    numbers = {letter: number for number, letter in enumerate(letters, start=1)}
    train, valid, test = (
        torch.tensor([numbers.get(letter, 0) for letter in part], dtype=torch.int64) for part in parts
    )
    return Characters("Python's manual, in letters", letters, train, valid, test, fingerprint=text.sha256[:16])


class CharacterModelling:
    """The mean loss of the next letter, in windows of the text. Follows the protocol `Task`.

    Every step reads other windows: where they begin is drawn from (seed, step). An epoch is as many letters as the
    training text has. An evaluation reads windows side by side; each letter sees those before it in its window.
    """

    unit = "letters"

    def __init__(self, config: CharacterConfig, data: Characters):
        if config.context >= (shortest := min(len(data.valid), len(data.test))):
            raise ValueError(f"expected a context of less than {shortest} letters, got {config.context}")
        self.config = config
        self.data = data
        self.units_per_step = config.batch_size * config.context
        self.steps_per_epoch = max(1, len(data.train) // self.units_per_step)

    def build(self) -> nn.Module:
        """A remedy that sees later tokens is refused, also where `allow_leak` permits it: its loss would say nothing,
        and only Transformer-XL's recipes can read such a model with the future hidden.
        """
        config, generator = self.config, derived_generator(self.config.seed, "weights")
        block, symbols = block_of(config), self.data.symbols
        model = CausalLM(config.depth, block, vocabulary=symbols, context=config.context, generator=generator)
        if remedies := remedies_of(config):
            apply(model, *remedies)
            for remedy, mixings in mixings_in(model, remedies):
                if "full" in mixings:
                    raise ValueError(
                        f"{remedy.name} sees later letters here, and {config.recipe} cannot hide them: take a causal "
                        "mean, or txl-manual"
                    )
        return model.double() if config.precision == "float64" else model

    def batch(self, step: int, share: Share, device: torch.device) -> tuple[Tensor, Tensor]:
        config, stream = self.config, self.data.train
        generator = derived_generator(config.seed, "windows", step)
        starts = torch.randint(len(stream) - config.context, (config.batch_size,), generator=generator)
        return _windows(stream, starts[share.of(config.batch_size)], config.context, device)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], carry: Carry) -> tuple[Tensor, Carry]:
        ids, targets = batch
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()), None

    def evaluate(self, model: nn.Module, share: Share, device: torch.device) -> dict[str, float]:
        config = self.config
        which, stream = ("test", self.data.test) if config.evaluate_on == "test" else ("valid", self.data.valid)
        starts = torch.arange(0, len(stream) - config.context, config.context)
        starts = starts[: config.eval_windows][share.index :: share.count]
        total = 0.0
        for some in starts.split(_AT_ONCE):
            ids, targets = _windows(stream, some, config.context, device)
            total += F.cross_entropy(model(ids).double().flatten(0, 1), targets.flatten(), reduction="sum").item()
        return {f"{which}_loss": total, "count": float(len(starts) * config.context)}

    def report(self, means: dict[str, float]) -> dict[str, float]:
        return means

    def describe(self) -> dict[str, Any]:
        return self.data.describe()


def _windows(stream: Tensor, starts: Tensor, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and the letters after them, (windows, length) each."""
    places = starts[:, None] + torch.arange(length)
    return stream[places].to(device), stream[places + 1].to(device)
