"""`diagnose`: a profile in, a verdict out, by the table in `rules.py`."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from depthscope.diagnosis.advice import advise
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.rules import FINDINGS, VERDICTS, Rule
from depthscope.diagnosis.verdict import Diagnosis, Finding
from depthscope.probing import Profile, Spectra
from depthscope.remedies import Recommendation


def diagnose(
    profile: Profile,
    skip_loss: pd.DataFrame | None = None,
    *,
    spectra: Spectra | None = None,
    measure: Callable[[], Recommendation] | None = None,
) -> Diagnosis:
    """Whether tokens collapse, why, how fast, and what to do; every sentence with its numbers.

    `skip_loss` is what `depthscope.skip_loss` returned for the same model, and `spectra` what `depthscope.spectra` did.
    What was not measured is said and not guessed: `stations="trunk"` shows which step is to blame, `measures="all"` the
    rest.

    From a profile alone the strength of a remedy is an estimate, and is called one. `measure` gives the measured one
    where the model is at hand (`lambda: recommend(model, inputs)`); it is called only if a remedy is called for.
    """
    facts = Facts(profile, skip_loss, spectra)
    chosen = next(rule for rule in VERDICTS if rule.applies(facts))
    verdict = _finding(chosen, facts)
    unreadable = chosen.verdict in ("broken", "cannot tell")
    findings = () if unreadable else tuple(_finding(rule, facts) for rule in FINDINGS if rule.applies(facts))
    return Diagnosis(
        chosen.verdict,
        verdict.sentence,
        findings,
        advise(facts, chosen.verdict, measure),
        verdict.numbers,
        str(profile.metadata.get("model", "")),
    )


def _finding(rule: Rule, facts: Facts) -> Finding:
    values = rule.values(facts)
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    return Finding(rule.name, rule.sentence.format(**values), numbers)
