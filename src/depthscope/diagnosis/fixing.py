"""`fix`: a model before and after its remedy, with both verdicts, and the line of Python that puts the remedy in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Unpack

from torch import nn

from depthscope.diagnosis.judge import diagnose
from depthscope.diagnosis.verdict import COLLAPSES, Diagnosis
from depthscope.discovery import Hints, refuse_tensor
from depthscope.inputs import Tokenizer
from depthscope.interruption import attempt
from depthscope.models.token_means import TokenMean
from depthscope.naming import visible
from depthscope.probing import NoLoss, Profile, mean_loss, probe
from depthscope.progress import Tick
from depthscope.remedies import Recommendation, Remedy, applied, apply, recommend
from depthscope.remedies.application import temporarily
from depthscope.scope import Scope, scope_of

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
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    tau: float | Literal["recommended"] | None = None,
    level: float | None = None,
    alpha: float | None = None,
    at: str = "output",
    mixing: str | TokenMean = "auto",
    weigh_branches: bool = True,
    tokenizer: Tokenizer | None = None,
    doing: Doing = lambda _what: None,
    about: Mapping[str, Any] | None = None,
    **hints: Unpack[Hints],
) -> Fixed:
    """Measures a model, recommends remedies, measures the model with them, and leaves it as it was.

    Whether the model is causal is tried once.

    Args:
        model: any model that holds Transformer blocks, or a `Scope` of it.
        inputs: as for `probe`.
        tau: puts de-escalation in with that strength, also against the verdict.
        level: as for `recommend`, and so are `alpha`, `at`, `mixing` and `weigh_branches`.
        alpha: as for `recommend`.
        at: as for `recommend`.
        mixing: as for `recommend`.
        weigh_branches: as for `recommend`.
        tokenizer: makes ids of strings.
        doing: `doing(what)` is called before each part; what it returns is called after each piece of it.
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
    if tau == "recommended":
        tau = None
    if applied(scope.model):
        raise ValueError("the model has remedies already: depthscope.remove(model) takes them out")

    def measured(what: str) -> Profile:
        found = probe(scope, measures="verdict", progress=doing(what))
        found.metadata.update(about or {})
        return found

    before = measured("probing")

    def recommended() -> Recommendation:
        return recommend(
            scope,
            tau=tau,
            level=level,
            alpha=alpha,
            at=at,
            mixing=mixing,
            weigh_branches=weigh_branches,
            progress=doing("measuring the odds"),
        )

    def remedied() -> Fixed:
        notes: tuple[str, ...] = ()
        verdict = diagnose(before, measure=recommended)
        found = verdict.recommendation
        if verdict.verdict not in COLLAPSES or not found.remedies:
            if tau is None:
                return _nothing_put_in(before, found)
            notes = (f"put in as asked for, against the verdict; what to do: {found.reason}",)
            found = recommended()
        loss_before = _loss(scope)
        with temporarily(scope, *found.remedies):
            after = measured("probing again")
            loss_after = _loss(scope)
        losses = None if loss_before is None or loss_after is None else (loss_before, loss_after)
        return Fixed(before, after, found, losses, notes)

    return attempt("the remedy", remedied) or _nothing_put_in(before, diagnose(before).recommendation)


def _nothing_put_in(before: Profile, found: Recommendation) -> Fixed:
    return Fixed(before, before, replace(found, remedies=(), reason=f"no remedy is put in; what to do: {found.reason}"))


def _loss(scope: Scope) -> float | None:
    """The model's own loss, or that of the next token of any causal language model; None if there is none."""
    try:
        return mean_loss(scope)
    except NoLoss:
        return None
