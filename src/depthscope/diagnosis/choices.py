"""What can be done about a collapse, in the order of what was trained, and what is advised.

The evidence is of models in which every token sees all others: `comparisons/remedies.json` (the study `remedies`) and
`put_in.json` (the same training, with a remedy put in by `apply`). It is small (width 32, three seeds), and every
sentence says so. Causal models were not compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.verdict import COLLAPSES, Verdict
from depthscope.remedies import ContraNorm, DeEscalate, MVSplit, PairNorm, Recommendation, Remedy, ResidualWeight
from depthscope.remedies.record import call
from depthscope.remedies.remedy import RIGHT_TO_LEFT

Blocks = tuple[int, ...] | None
DEESCALATION = "de-escalation"
REBUILT = "rebuild: pre-norm + LayerScale"
AS_IT_IS = "as it is"

_NO_REMEDY = {
    "anisotropic": "no remedy: the shared component is not a loss of context.",
    "converges by training": "no remedy: training made the tokens come together.",
    "broken": "mend the numbers first.",
    "cannot tell": "measure again as the sentence above says: trained weights on inputs of their own, at least two "
    "blocks, at least two tokens that differ, the default measures.",
    "rank collapse": "no de-escalation: it takes out the mean, and the mean is not what these tokens share.",
}
_OF_NEW_WEIGHTS = "leave it as it is at this depth, and probe it again after training."
_OF_OTHERS = "leave it as it is. `depthscope depth` shows which blocks matter."


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
    pre_norm: bool

    @property
    def norms(self) -> str:
        return "pre" if self.pre_norm else "post"

    @property
    def trained_depth(self) -> int:
        """The nearest, in logarithms."""
        return min(map(int, _study("remedies")["depths"]), key=lambda one: abs(math.log(one / self.depth)))

    def loss(self, name: str) -> float | None:
        """The test loss of a choice at the nearest depth; None if it was not compared in blocks of this kind."""
        near = str(self.trained_depth)
        variant, trained_in = (self.norms, self.norms) if name == AS_IT_IS else _TRAINED[name]
        loss = _study("put_in")[self.norms].get(near, {}).get(variant)
        if loss is None and trained_in == self.norms:
            loss = _study("remedies")["depths"][near].get(variant, {}).get("loss")
        return None if loss is None else float(loss)

    @property
    def rebuilt_loss(self) -> float:
        """Of the same model in pre-norm with LayerScale; infinite where it is pre-norm already, or was not compared."""
        loss = None if self.pre_norm else Kind(self.depth, pre_norm=True).loss("LayerScale")
        return math.inf if loss is None else loss


def layer_scale_start(depth: int) -> float:
    """Where LayerScale starts, by its authors: 0.1 up to 18 blocks, 10⁻⁵ up to 24, 10⁻⁶ beyond."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


def over_root_depth(depth: int) -> float:
    """1/√L in three digits."""
    return float(f"{depth**-0.5:.3g}")


Make = Callable[[int, Blocks], Remedy]  # of a depth and blocks
# By name: the variant of the study, the blocks into which it was put there ("": into blocks without norms), the remedy.
_MADE: Mapping[str, tuple[str, str, Make]] = {
    "LayerScale": ("layer-scale", "pre", lambda d, b: ResidualWeight(layer_scale_start(d), learn="feature", blocks=b)),
    "ReZero": ("rezero", "", lambda _, b: ResidualWeight(0.0, learn="block", blocks=b)),
    "MV-Split": ("mv-split", "post", lambda _, b: MVSplit(blocks=b)),
    "ContraNorm": ("contra-norm", "post", lambda _, b: ContraNorm(blocks=b)),
    "PairNorm": ("pair-norm", "post", lambda _, b: PairNorm(blocks=b)),
    "branches × 1/√L": ("sqrt-depth", "post", lambda d, b: ResidualWeight(over_root_depth(d), blocks=b)),
}
_TRAINED = {name: made[:2] for name, made in _MADE.items()} | {DEESCALATION: ("deescalated", "post")}


def for_new_model(kind: Kind, blocks: Blocks = None) -> list[Choice]:
    """What can be done for a model that is to be trained: the least test loss first, what was not compared last."""
    return in_order([Choice(name, (make(kind.depth, blocks),)) for name, (*_, make) in _MADE.items()], kind)


def in_order(choices: list[Choice], kind: Kind) -> list[Choice]:
    """The choices with what is known of each, the least test loss first."""
    losses = {choice.name: kind.loss(choice.name) for choice in choices}
    said = {name: "not compared" if loss is None else f"test loss {loss:.2f}" for name, loss in losses.items()}
    known = [replace(choice, evidence=said[choice.name]) for choice in choices]
    return sorted(known, key=lambda choice: math.inf if (loss := losses[choice.name]) is None else loss)


def rebuilt(kind: Kind) -> Choice | None:
    """A post-norm model in pre-norm with LayerScale, where that was compared."""
    if math.isinf(kind.rebuilt_loss):
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
    loss, plain, study = kind.loss(first.name), kind.loss(AS_IT_IS), _study("remedies")
    if loss is None:
        return f"{first.name}: nothing was compared for this kind of model, so measure it with `depthscope compare`"
    words = f"{first.name}, before training: it had the least test loss of what can be put in, {loss:.2f}"
    words += "" if plain is None else f" ({kind.norms}-norm as it is: {plain:.2f})"
    if kind.rebuilt_loss < loss:
        words += f". If you can rebuild it, pre-norm with LayerScale had {kind.rebuilt_loss:.2f}"
    trained = f"{kind.trained_depth} blocks, {study['task']}, {study['seeds']} seeds"
    return f"{words}. Trained with {trained}: `depthscope compare` measures it on your task"


def advise(f: Facts, verdict: Verdict, measure: Callable[[], Recommendation] | None = None) -> Recommendation:
    """A remedy for collapses onto the mean; never one that mixes later tokens into earlier ones of a causal model.

    With `measure` the remedy is what was measured on the model, else what trained best in models like it.
    """
    if f.without:
        return Recommendation(
            f"nothing follows for the model as it is: it has its {f.without}. Probe it whole before you change it."
        )
    if verdict not in COLLAPSES:
        return Recommendation(_NO_REMEDY.get(verdict, _OF_NEW_WEIGHTS if f.look == "initialised" else _OF_OTHERS))
    if f.about.get("right_to_left"):
        return Recommendation(f"no de-escalation: {RIGHT_TO_LEFT}.")
    if f.sink is not None and f.last in f.sink.blocks and (measure is None or not f.about.get("causal")):
        return Recommendation(
            f"no de-escalation as it stands: token {f.sink.token}, up to {f.sink.peak:.0f} times as large as "
            "the median, is part of the mean, and taking that out would spread it over the others. Find out where it "
            "comes from."
        )
    if measure is not None:
        found = measure()
        if not (found.measured and found.odds is not None and found.remedies):
            return found
        words = f"de-escalate, as measured on this model: {found.reason}"
        if f.may_leak:
            known = "the model is causal" if f.about.get("causal") else "the model may be causal"
            words += f". The mean is that of the tokens up to each one, as {known}"
        if f.look == "trained":
            words += ". Train with it from the start or on: put into trained weights it raises the loss"
        return replace(found, reason=f"{words}.")
    if is_ranked(f):
        kind = kind_of(f)
        first = in_order([*for_new_model(kind, f.remedied), Choice(DEESCALATION, ())], kind)[0]
        if first.remedies:
            return Recommendation(reason_for(first, kind), first.remedies, blocks=f.blocks)
    known = "no training has compared remedies for this kind of model"
    return Recommendation(f"{known}: `depthscope.fix(model, inputs)` measures what de-escalation does to it.")


def is_ranked(f: Facts) -> bool:
    """Whether trainings say what is best: of a new model whose tokens see later ones, and whose blocks are known."""
    return f.look == "initialised" and f.about.get("family") != "unknown" and not f.may_leak


def kind_of(f: Facts) -> Kind:
    """Which trainings this model is compared with."""
    return Kind(f.blocks, f.pre_norm)


@cache
def _study(name: str) -> dict[str, Any]:
    path = files("depthscope.diagnosis") / "comparisons" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
