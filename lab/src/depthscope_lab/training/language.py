"""The task of predicting the next word with a Transformer-XL, which remembers from step to step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.remedies import DeEscalate, Remedy, apply
from depthscope.remedies.deescalation import token_mean
from depthscope_lab.models.carried_mean import CarriedMean
from depthscope_lab.models.transformer_xl import Context, Memory, TransformerXL, TransformerXLConfig
from depthscope_lab.training.config import LanguageConfig
from depthscope_lab.training.data.token_stream import TokenRows
from depthscope_lab.training.data.wikitext import Corpus
from depthscope_lab.training.perplexity import Reading, evaluate, evaluate_without_future, perplexity_of
from depthscope_lab.training.randomness import derived_generator
from depthscope_lab.training.task import Carry, Share, mixings_in, remedies_of


@dataclass(frozen=True)
class Segment:
    """The same stretch of every row: ids and the words after them, (rows, n); `begins`: nothing is before it."""

    ids: Tensor
    targets: Tensor
    begins: bool


def parts_of(config: LanguageConfig) -> tuple[CarriedMean | None, list[Remedy]]:
    """The mean that the model carries from segment to segment, and the remedies that are put in by `apply`.

    A remedy with a causal mean of tokens that was put in from outside would begin anew with every segment. So the mean
    of `DeEscalate`, which the model can carry, is a part of it, at the FFN's input; elsewhere it is refused.
    """
    carried, others = None, []
    for named, remedy in zip(config.remedies, remedies_of(config), strict=True):
        if not isinstance(remedy, DeEscalate):
            others.append(remedy)
            continue
        beyond = dict(named.options).keys() - {"tau", "at", "mixing", "allow_leak"}
        if carried is not None or remedy.at != "ffn_input" or beyond or not isinstance(remedy.tau, float):
            raise ValueError(
                "expected at most one mean of tokens in a Transformer-XL, which carries it at the ffn_input, with tau "
                f"(a number), mixing and allow_leak as its options, got {named}"
            )
        mean = token_mean("prefix" if remedy.mixing == "auto" else remedy.mixing)
        if mean.kind == "full" and not remedy.allow_leak:
            raise ValueError(f"the full mean sees later tokens: give allow_leak=true if that is meant, got {named}")
        carried = CarriedMean(remedy.tau, mean)
    return carried, others


def build_transformer_xl(config: LanguageConfig, vocabulary: int) -> TransformerXL:
    """The model of a configuration, in its variant, drawn from its seed. Works on the meta device.

    A remedy that mixes tokens up to a token's own would begin anew with every segment, and is refused.
    """
    if config.initialiser is not None:
        raise ValueError(
            f"a Transformer-XL draws its weights by init_std, not by the initialiser {config.initialiser!r}: "
            "leave it out of the variant"
        )
    carried, remedies = parts_of(config)
    shape = TransformerXLConfig(
        vocabulary,
        config.depth,
        config.width,
        config.heads,
        config.ffn_width,
        placement=config.wiring,
        final_norm=config.final_norm,
        dropout=config.dropout,
        carried_mean=carried,
        context=Context(config.memory),
        init_std=config.init_std,
    )
    model = TransformerXL(shape, derived_generator(config.seed, "weights"))
    if remedies:
        apply(model, *remedies)
        for remedy, mixings in mixings_in(model, remedies):
            if not mixings <= {"none", "full"}:
                raise ValueError(
                    f"expected remedies that a Transformer-XL can have: {remedy.name} mixes tokens with earlier ones, "
                    f"of which the model carries none from segment to segment; {DeEscalate.name} it does carry"
                )
    return model.double() if config.precision == "float64" else model


def reading_of(config: LanguageConfig) -> Reading:
    """How the validation text is read: every token sees equally many before it."""
    context = Context(config.eval_memory, config.eval_clamp, same_length=True)
    return Reading(config.eval_rows, config.eval_segment, context, config.eval_segments)


class LanguageModelling:
    """The mean loss of the next word; on the validation or test text also the perplexity. Follows the protocol `Task`.

    An epoch reads every row once from its beginning, where the memory is empty. A share is some of the rows, so
    its memory stays its own.
    """

    unit = "tokens"

    def __init__(self, config: LanguageConfig, corpus: Corpus):
        self.config = config
        self.data = corpus
        self.rows = TokenRows(corpus.train, config.batch_size)
        self.units_per_step = config.batch_size * config.segment
        self.steps_per_epoch = self.rows.segments(config.segment)

    def build(self) -> nn.Module:
        return build_transformer_xl(self.config, len(self.data.vocabulary))

    def batch(self, step: int, share: Share, device: torch.device) -> Segment:
        number = step % self.steps_per_epoch
        rows = share.of(self.config.batch_size)
        ids, targets = self.rows.segment(number, self.config.segment, rows)
        return Segment(ids.to(device), targets.to(device), begins=number == 0)

    def loss(self, model: nn.Module, batch: Segment, carry: Carry) -> tuple[Tensor, Carry]:
        memory = None if carry is None or batch.begins else Memory.from_tensors(carry)
        prediction = model(batch.ids, batch.targets, memory)
        return prediction.losses.mean(), prediction.memory.tensors()

    def evaluate(self, model: nn.Module, share: Share, device: torch.device) -> dict[str, float]:
        """A model that sees the future is also read with it hidden, for a few segments: that takes long."""
        assert isinstance(model, TransformerXL)
        few, carried = self.config.hidden_segments, model.config.carried_mean
        mixings = mixings_in(model, parts_of(self.config)[1])
        leaks = (carried is not None and carried.leaks) or any("full" in found for _, found in mixings)
        reading = replace(reading_of(self.config), part=slice(share.index, None, share.count))
        stream = self.data.test if self.config.evaluate_on == "test" else self.data.valid
        sums: dict[str, float] = {}
        for prefix, read, segments in (("", evaluate, reading.segments), ("hidden_", evaluate_without_future, few)):
            if prefix and not (few and leaks):
                continue
            sums |= {f"{prefix}loss": 0.0, f"{prefix}count": 0.0}
            if share.index < reading.rows:  # else there are more processes than rows
                found = read(model, stream, replace(reading, segments=segments))
                sums |= {f"{prefix}loss": found.loss * found.tokens, f"{prefix}count": float(found.tokens)}
        return sums

    def report(self, means: dict[str, float]) -> dict[str, float]:
        """Perplexities beside the losses. `…_loss_future_hidden` is over the first segments only."""
        which = "test" if self.config.evaluate_on == "test" else "valid"
        shown = {f"{which}_loss": means["loss"], f"{which}_perplexity": perplexity_of(means["loss"])}
        if "hidden_loss" in means:
            loss = means["hidden_loss"] / means["hidden_count"]  # both were divided by the same count
            shown |= {f"{which}_loss_future_hidden": loss, f"{which}_perplexity_future_hidden": perplexity_of(loss)}
        return shown

    def describe(self) -> dict[str, Any]:
        return self.data.describe()
