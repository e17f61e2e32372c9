"""`fix`: a model before and after its remedy, with both verdicts, and the line of Python that puts the remedy in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Unpack

from torch import nn

from depthscope.diagnosis.choices import (
    AS_IT_IS,
    DEESCALATION,
    Choice,
    for_new_model,
    for_trained_model,
    in_order,
    is_ranked,
    kind_of,
    reason_for,
    rebuilt,
)
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.judge import diagnose
from depthscope.diagnosis.verdict import COLLAPSES, Diagnosis
from depthscope.discovery import Hints, refuse_tensor
from depthscope.inputs import Tokenizer
from depthscope.interruption import attempt
from depthscope.naming import visible
from depthscope.probing import NoLoss, Profile, mean_loss, probe
from depthscope.progress import Tick
from depthscope.remedies import Recommendation, Remedy, applied, apply, recommend
from depthscope.remedies.application import temporarily
from depthscope.remedies.recommendation import Unmeasurable, sink_positions
from depthscope.scope import Scope, scope_of

Progress = Callable[[str], Tick | None]  # hears what is being done; may give what to call after each piece of it


@dataclass(frozen=True)
class Fixed:
    """A model before and after what is recommended for it. The model itself is as it was."""

    before: Profile
    after: Profile  # the same as before if no remedy is put in
    recommendation: Recommendation
    losses: tuple[float, float] | None = None  # before, after; None: the model has no loss
    notes: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()  # what can be done, the best first, with what was measured of each

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
        if self.remedies or self.choices:  # its reason is in the verdict's words already
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
            lines.append(f"What to do: {self.recommendation.reason}")
        return visible("\n".join(lines))


def fix(
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    tau: float | Literal["recommended"] | None = None,
    alpha: float | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Progress = lambda _what: None,
    about: Mapping[str, Any] | None = None,
    **hints: Unpack[Hints],
) -> Fixed:
    """Measures a model, recommends remedies, measures the model with them, and leaves it as it was.

    Whether the model is causal is tried once.

    Args:
        model: any model that holds Transformer blocks, or a `Scope` of it.
        inputs: as for `probe`.
        tau: puts de-escalation in with that strength, also against the verdict; "recommended" measures it. Without it
            and the next, remedies are ranked by what was trained, and the first one is put in.
        alpha: the weight of the branches beside de-escalation.
        tokenizer: makes ids of strings.
        progress: `progress(what)` is called before each part; what it returns is called after each piece of it.
        about: is added to the profiles' metadata.
        hints: what you say of the model: `blocks`, `part`, `token_axis`, `mask`, `causal`, as for `Scope`.

    Returns:
        A `Fixed`: before, after, and the remedies; `fixed.apply_to(model)` puts them in to stay.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> fixed = depthscope.fix(model, torch.randn(2, 5, 16), tau=0.3)
        >>> len(fixed.after.curve("token_similarity"))
        4
    """
    scope = scope_of(model, inputs, tokenizer, **hints).keep_inputs()
    refuse_tensor(scope.hints)
    asked = tau is not None or alpha is not None
    strength = None if tau == "recommended" else tau
    if applied(scope.model):
        raise ValueError("the model has remedies already: depthscope.remove(model) takes them out")

    def measured(what: str) -> Profile:
        found = probe(scope, stations="output", progress=progress(what))
        found.metadata.update(about or {})
        return found

    before = measured("probing")
    facts = Facts(before)

    def recommended() -> Recommendation:
        return recommend(scope, tau=strength, alpha=alpha, progress=progress("measuring the odds"))

    def remedied() -> Fixed:
        notes: tuple[str, ...] = ()
        choices: list[Choice] = []

        def measure() -> Recommendation:
            """What is put in; called if the verdict calls for a remedy."""
            if asked:
                return recommended()
            if is_ranked(facts):
                choices.extend(_ranked(scope, facts, progress("trying remedies")))
                first = next(choice for choice in choices if choice.similarity is not None)
                if first.name not in (DEESCALATION, AS_IT_IS):
                    return _put_in(first, facts)
            try:
                return recommended()
            except Unmeasurable as error:
                return Recommendation(f"no remedy could be measured: {error}")

        verdict = diagnose(before, measure=measure)
        found = verdict.recommendation
        if verdict.verdict not in COLLAPSES or not found.remedies:
            if strength is None:
                return _nothing_put_in(before, found, _priced(scope, facts, progress("trying remedies")))
            notes = (f"applied on request, although no remedy is called for: {found.reason}",)
            found = recommended()
        loss_before = _loss(scope)
        with temporarily(scope, *found.remedies):
            after = measured("probing again")
            loss_after = _loss(scope)
        losses = None if loss_before is None or loss_after is None else (loss_before, loss_after)
        return Fixed(before, after, found, losses, notes, tuple(choices))

    return attempt("the remedy", remedied) or _nothing_put_in(before, diagnose(before).recommendation, [])


def best(scope: Scope, profile: Profile, progress: Tick | None = None) -> Recommendation:
    """What `fix` puts in: of a new model the first choice that can be put in, else de-escalation as measured."""
    facts = Facts(profile)
    if is_ranked(facts):
        first = next(_tried(scope, facts, progress), None)
        if first is not None and first.name != DEESCALATION:
            return _put_in(first, facts)
    return recommend(scope, progress=progress)


def _put_in(choice: Choice, facts: Facts) -> Recommendation:
    reason = reason_for(choice, kind_of(facts))
    return Recommendation(reason, choice.remedies, expected_similarity=choice.similarity, blocks=facts.blocks)


def _tried(scope: Scope, facts: Facts, progress: Tick | None) -> Iterator[Choice]:
    """What can be put into a new model, in the order of the trainings; each was probed once on the first batch.

    De-escalation has its place in the order; its strength takes measuring of its own.
    """
    kind, first = kind_of(facts), scope.keep_inputs().first_only()
    for choice in in_order([*for_new_model(kind, facts.remedied), Choice(DEESCALATION, ())], kind):
        if choice.name == DEESCALATION:
            yield choice
            continue
        try:
            with temporarily(first, *choice.remedies):
                found = probe(first, measures="token_similarity", stations="output")
                curve = found.curve("token_similarity", part=facts.span[0])
        except ValueError:
            continue  # the model does not show what the remedy changes
        yield replace(choice, similarity=float(curve[-1]))
        if progress is not None:
            progress()


def _ranked(scope: Scope, facts: Facts, progress: Tick | None) -> list[Choice]:
    """What can be done for a new model, the best first, beside the model as it is."""
    kind, better, tried = kind_of(facts), rebuilt(kind_of(facts)), []
    for choice in _tried(scope, facts, progress):
        if choice.name == DEESCALATION:
            try:
                found = recommend(scope, progress=progress)
            except ValueError:
                continue
            options, similarity = found.apply_options, found.expected_similarity
            choice = replace(choice, remedies=found.remedies, similarity=similarity, apply_options=options)
        if choice.remedies:
            tried.append(choice)
    ranked = in_order([*tried, Choice(AS_IT_IS, (), similarity=facts.end(facts.judged))], kind)
    lowest = kind.loss(ranked[0].name)
    return [better, *ranked] if better is not None and lowest is not None and kind.rebuilt_loss < lowest else ranked


def _priced(scope: Scope, facts: Facts, progress: Tick | None) -> list[Choice]:
    """What remedies would cost trained weights in loss, the cheapest first; empty without trained weights or a loss."""
    plain = _loss(scope) if facts.look == "trained" else None
    if plain is None:
        return []
    found = [Choice(AS_IT_IS, (), loss=plain)]
    for choice in for_trained_model(facts.blocks, sink_positions(facts.profile, facts.span[0]), facts.remedied):
        try:
            with temporarily(scope, *choice.remedies):
                found.append(replace(choice, loss=_loss(scope)))
        except ValueError:
            continue  # the model does not show what the remedy changes
        if progress is not None:
            progress()
    return sorted(found, key=lambda choice: math.inf if choice.loss is None else choice.loss)


def _nothing_put_in(before: Profile, found: Recommendation, choices: list[Choice]) -> Fixed:
    reason = found.reason
    if choices:
        plain = next(choice.loss for choice in choices if not choice.remedies)
        cheaper = [choice for choice in choices if (choice.loss or 0) < (plain or 0)]
        said = ", ".join(f"{choice.name} lowers the loss to {choice.loss:.4f}" for choice in cheaper)
        reason = f"leave it as it is: {said or 'no remedy lowers the loss'} on these inputs"
    return Fixed(before, before, replace(found, remedies=(), reason=reason), choices=tuple(choices))


def _loss(scope: Scope) -> float | None:
    """The model's own loss, or that of the next token of any causal language model; None if there is none."""
    try:
        return mean_loss(scope)
    except NoLoss:
        return None
