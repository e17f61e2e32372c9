"""What can be done about a collapse, in the order of what was trained.

The evidence: `comparisons/remedies.json` (the study `remedies`: models that see all tokens), `put_in.json` (the same
training, with a remedy put in by `apply`) and `letters.json` (causal models). It is small
(width 32, three seeds), and every sentence says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from depthscope.remedies import ContraNorm, DeEscalate, MVSplit, PairNorm, Remedy, ResidualWeight
from depthscope.remedies.record import call

Blocks = tuple[int, ...] | None
DEESCALATION = "de-escalation"
REBUILT = "rebuild: pre-norm + LayerScale"
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Choice:
    """Something that can be done, what is known of it, and what was measured of it on the model at hand."""

    name: str
    remedies: tuple[Remedy, ...]  # none: the model as it is
    evidence: str = ""  # from trainings of other models
    similarity: float | None = None  # of the tokens after the last block, with it
    loss: float | None = None  # on the inputs, with it
    apply_options: Mapping[str, Any] = field(default_factory=dict)  # what `apply` must be told of an unknown model

    @property
    def line(self) -> str | None:
        """The line of Python that does it; None where nothing is put in."""
        if not self.remedies:
            return None
        line = call(self.remedies, self.apply_options)
        return f"{line}  # in pre-norm blocks" if self.name == REBUILT else line

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        numbers = {"similarity": self.similarity, "loss": self.loss}
        return {"name": self.name, "line": self.line, "evidence": self.evidence, **numbers}


@dataclass(frozen=True)
class Kind:
    """Which trainings a model is compared with."""

    depth: int
    causal: bool
    pre_norm: bool

    def loss(self, name: str) -> float | None:
        """The test loss of a choice at the nearest depth (in logarithms); None if it was not compared."""
        variant = _VARIANTS.get(name, name)
        if variant == AS_IT_IS:
            variant = "pre" if self.pre_norm else "post"
        near = str(self.trained_depth)
        loss = None
        if not self.causal:
            loss = _study("put_in")["pre" if self.pre_norm else "post"].get(near, {}).get(variant)
        if (
            loss is None
            and (self.pre_norm or variant not in _PRE_NORM)
            and not (self.pre_norm and variant in _POST_NORM)
        ):
            loss = self._compared["depths"][near].get(variant, {}).get("loss")
        return None if loss is None else float(loss)

    @property
    def rebuilt_loss(self) -> float:
        """Of the same model in pre-norm blocks with LayerScale."""
        loss = replace(self, pre_norm=True).loss("LayerScale")
        return math.inf if loss is None else loss

    @property
    def trained_depth(self) -> int:
        return min(map(int, self._compared["depths"]), key=lambda one: abs(math.log(one / self.depth)))

    @property
    def trained(self) -> str:
        """Of what training the losses are."""
        found = self._compared
        return f"{self.trained_depth} blocks, {found['task']}, {found['seeds']} seeds"

    @property
    def _compared(self) -> dict[str, Any]:
        return _study("letters" if self.causal else "remedies")


# By name: the variant of the studies, and the remedy for a depth and blocks.
_MADE: Mapping[str, tuple[str, Callable[[int, Blocks], Remedy]]] = {
    "LayerScale": ("layer-scale", lambda d, b: ResidualWeight(layer_scale_start(d), learn="feature", blocks=b)),
    "ReZero": ("rezero", lambda _, b: ResidualWeight(0.0, learn="block", blocks=b)),
    "MV-Split": ("mv-split", lambda _, b: MVSplit(blocks=b)),
    "ContraNorm": ("contra-norm", lambda _, b: ContraNorm(blocks=b)),
    "PairNorm": ("pair-norm", lambda _, b: PairNorm(blocks=b)),
    "branches × 1/√L": ("sqrt-depth", lambda d, b: ResidualWeight(over_root_depth(d), blocks=b)),
}
_VARIANTS = {name: variant for name, (variant, _) in _MADE.items()} | {DEESCALATION: "deescalated", REBUILT: REBUILT}
_PRE_NORM = {"layer-scale", "rezero"}  # in the studies these are wirings: pre-norm, and without norms
_POST_NORM = {"rezero", "mv-split", "contra-norm", "pair-norm", "sqrt-depth", "deescalated"}  # put into post-norm there
_MIX = {"MV-Split", "ContraNorm", "PairNorm"}  # compared only where tokens see each other


def layer_scale_start(depth: int) -> float:
    """Where LayerScale starts, by its authors: 0.1 up to 18 blocks, 10⁻⁵ up to 24, 10⁻⁶ beyond."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


def over_root_depth(depth: int) -> float:
    """1/√L in three digits."""
    return float(f"{depth**-0.5:.3g}")


def for_new_model(kind: Kind, blocks: Blocks = None) -> list[Choice]:
    """What can be done for a model that is to be trained: the least test loss first, what was not compared last."""
    made = [
        Choice(name, (make(kind.depth, blocks),))
        for name, (_, make) in _MADE.items()
        if not (kind.causal and name in _MIX)
    ]
    return in_order(made, kind)


def in_order(choices: list[Choice], kind: Kind) -> list[Choice]:
    """The choices with what is known of each, the least test loss first."""
    losses = {choice.name: kind.loss(choice.name) for choice in choices}
    said = {name: "not compared" if loss is None else f"test loss {loss:.2f}" for name, loss in losses.items()}
    known = [replace(choice, evidence=said[choice.name]) for choice in choices]
    return sorted(known, key=lambda choice: math.inf if (loss := losses[choice.name]) is None else loss)


def rebuilt(kind: Kind) -> Choice | None:
    """A post-norm model in pre-norm with LayerScale, where that trained better than all that can be put in."""
    if kind.pre_norm or math.isinf(kind.rebuilt_loss):
        return None
    remedy = ResidualWeight(layer_scale_start(kind.depth), learn="feature")
    return Choice(REBUILT, (remedy,), f"test loss {kind.rebuilt_loss:.2f}")


def for_trained_model(depth: int, sinks: tuple[int, ...], blocks: Blocks = None) -> list[Choice]:
    """What can be put into trained weights; each is a start for further training."""
    gentle = DeEscalate(0.1, skip_in_mean=sinks, leave_alone=sinks, blocks=blocks)
    weighed = ResidualWeight(over_root_depth(depth), blocks=blocks)
    return [
        Choice("LayerScale from 1", (ResidualWeight(1.0, learn="feature", blocks=blocks),), "no change at first"),
        Choice("de-escalation, τ = 0.1", (gentle,), "needs training"),
        Choice("branches × 1/√L", (weighed,), "needs training"),
    ]


def reason_for(first: Choice, kind: Kind) -> str:
    """Why this one comes first, in one sentence."""
    loss, plain = kind.loss(first.name), kind.loss(AS_IT_IS)
    norms = "pre-norm" if kind.pre_norm else "post-norm"
    if loss is None:
        return f"{first.name}: nothing was compared for this kind of model, so measure it with `depthscope compare`"
    words = f"{first.name}, before training: it had the least test loss of what can be put in, {loss:.2f}"
    words += "" if plain is None else f" ({norms} as it is: {plain:.2f})"
    if not kind.pre_norm and kind.rebuilt_loss < loss:
        words += f". If you can rebuild it, pre-norm with LayerScale had {kind.rebuilt_loss:.2f}"
    return f"{words}. Trained with {kind.trained}: `depthscope compare` measures it on your task"


@cache
def _study(name: str) -> dict[str, Any]:
    path = files("depthscope.diagnosis") / "comparisons" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
