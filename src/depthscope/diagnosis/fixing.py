"""`fix`: a model before and after its remedy, with both verdicts, and the line of Python that puts the remedy in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from depthscope.diagnosis.judge import diagnose
from depthscope.diagnosis.verdict import COLLAPSES, Diagnosis
from depthscope.naming import visible
from depthscope.passes import Tokenizer, Told, refuse_tensor
from depthscope.probing import NoLoss, Profile, mean_loss, probe
from depthscope.progress import Tick
from depthscope.remedies import Recommendation, Remedy, applied, apply, recommend
from depthscope.remedies.application import temporarily

Doing = Callable[[str], Tick | None]  # told what is being done; may give what to call after each piece of it


@dataclass(frozen=True)
class Fixed:
    """A model before and after what is recommended for it. The model itself is as it was."""

    before: Profile
    after: Profile  # the same as before if no remedy is put in
    recommendation: Recommendation
    losses: tuple[float, float] | None = None  # before, after; None: the model has no loss
    notes: tuple[str, ...] = ()

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """What was put in; none: nothing needs to be done, or no remedy here would help."""
        return self.recommendation.remedies

    @property
    def python(self) -> str | None:
        """The lines of Python that put the remedies in."""
        return self.recommendation.python

    @property
    def trained(self) -> bool:
        """Whether the weights look trained: the remedies are for training, not for patching trained weights."""
        return self.before.metadata.get("weights", {}).get("look") == "trained"

    @cached_property
    def verdicts(self) -> tuple[Diagnosis, Diagnosis]:
        """Before and after."""
        before = diagnose(self.before, measure=lambda: self.recommendation)
        if before.verdict in COLLAPSES and self.remedies:  # its reason is in the verdict's words already
            before = replace(before, recommendation=self.recommendation)
        return before, diagnose(self.after)

    def apply_to(self, model: nn.Module, inputs: Any = None) -> nn.Module:
        """Puts the remedies into a model, to stay, and returns it."""
        options: dict[str, Any] = dict(self.recommendation.apply_options)
        return apply(model, *self.remedies, inputs=inputs, **options) if self.remedies else model

    def __str__(self) -> str:
        before, after = self.verdicts
        lines = [f"Before: {before.verdict}. {before.headline}"]
        if self.remedies:
            lines += [f"After: {after.verdict}. {after.headline}", "", str(self.python)]
        else:
            lines.append(self.recommendation.reason)
        return visible("\n".join(lines))


def fix(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Tokenizer | None = None,
    tau: float | Literal["recommended"] | None = None,
    doing: Doing = lambda _what: None,
    about: Mapping[str, Any] | None = None,
    **wishes: Any,
) -> Fixed:
    """Measures a model, recommends remedies, measures the model with them, and leaves it as it was.

    `fixed = depthscope.fix(model, batch); fixed.apply_to(model)` puts the remedies in to stay. `tau` puts de-escalation
    in with that strength, also against the verdict; `wishes` are the other options of `recommend` (`level`, `alpha`,
    `at`, `mixing`), and what you may say of the model (`blocks`, `part`, `token_axis`, `causal`, `mask`). `doing(what)`
    is told what is being done. `about` is added to the profiles' metadata.
    """
    told: Any = {name: wishes.pop(name) for name in Told.__annotations__ if name in wishes}
    refuse_tensor(told)
    if tau == "recommended":
        tau = None
    if isinstance(inputs, Iterator):
        inputs = list(inputs)  # they are read several times
    if applied(model):
        raise ValueError("the model has remedies already: depthscope.remove(model) takes them out")

    def measured(what: str, **found_out: Any) -> Profile:
        options = told | found_out
        found = probe(model, inputs, measures="verdict", tokenizer=tokenizer, progress=doing(what), **options)
        found.metadata.update(about or {})
        return found

    before = measured("probing")
    tried = {"causal": before.metadata["causal"]} if before.metadata["causal_by"] == "tried" else {}
    notes: tuple[str, ...] = ()

    def recommended() -> Recommendation:
        tick = doing("measuring the odds")
        return recommend(model, inputs, tau=tau, tokenizer=tokenizer, progress=tick, **wishes, **told | tried)

    verdict = diagnose(before, measure=recommended)
    found = verdict.recommendation
    if verdict.verdict not in COLLAPSES or not found.remedies:
        if tau is None:
            advice = f"no remedy is put in; what to do: {found.reason}"
            return Fixed(before, before, replace(found, reason=advice))
        notes = (f"put in as asked for, against the verdict; what to do: {found.reason}",)
        found = recommended()
    loss_before = _loss(model, inputs, tokenizer, told)
    options = dict(found.apply_options)
    with temporarily(model, *found.remedies, inputs=inputs, tokenizer=tokenizer, **options):
        after = measured("probing again", **options)
        loss_after = _loss(model, inputs, tokenizer, told)
    losses = None if loss_before is None or loss_after is None else (loss_before, loss_after)
    return Fixed(before, after, found, losses, notes)


def _loss(model: nn.Module, inputs: Any, tokenizer: Tokenizer | None, told: Told) -> float | None:
    """The model's own loss, or that of the next token of any causal language model; None if there is none."""
    try:
        return mean_loss(model, inputs, tokenizer=tokenizer, **told)
    except NoLoss:
        return None
