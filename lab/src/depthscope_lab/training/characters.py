"""The task of predicting the next letter with a plain causal Transformer: no memory, so that any causal remedy fits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import CausalLM
from depthscope.remedies import apply
from depthscope_lab.training.building import block_of, mixings_in, remedies_of
from depthscope_lab.training.config import CharacterConfig
from depthscope_lab.training.data.characters import Characters
from depthscope_lab.training.randomness import derived_generator
from depthscope_lab.training.task import Carry, Share

_AT_ONCE = 32  # windows of an evaluation


def build_character_model(config: CharacterConfig, symbols: int) -> CausalLM:
    """The model of a configuration, in its variant, drawn from its seed. Works on the meta device.

    A remedy that sees later tokens is refused, also where `allow_leak` permits it: its loss would say nothing, and only
    Transformer-XL's recipes can read such a model with the future hidden.
    """
    block = block_of(config)
    generator = derived_generator(config.seed, "weights")
    model = CausalLM(config.depth, block, vocabulary=symbols, context=config.context, generator=generator)
    if remedies := remedies_of(config):
        apply(model, *remedies)
        for remedy, mixings in mixings_in(model, remedies):
            if "full" in mixings:
                raise ValueError(
                    f"{remedy.name} sees later letters here, and {config.recipe} cannot hide them: take a causal mean, "
                    "or txl-manual"
                )
    return model.double() if config.precision == "float64" else model


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
        return build_character_model(self.config, self.data.symbols)

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
        if config.eval_windows is not None:
            starts = starts[: config.eval_windows]
        starts = starts[share.index :: share.count]
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
