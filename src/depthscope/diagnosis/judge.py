"""`diagnose`: a profile in, a verdict out, by the table in `rules.py`."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from depthscope.diagnosis.advice import advise
from depthscope.diagnosis.depth_use import require_same_model, with_depth
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.rules import CLOSING, FINDINGS, OF_WHOLE_MODELS, VERDICTS, Rule
from depthscope.diagnosis.verdict import Diagnosis
from depthscope.naming import counted, lowered
from depthscope.probing import Profile
from depthscope.probing.finite import in_words
from depthscope.remedies import Recommendation
from depthscope.usage import DepthUse, Finding
from depthscope.value_spectra import Spectra


def diagnose(
    profile: Profile,
    skip_loss: pd.DataFrame | None = None,
    *,
    spectra: Spectra | None = None,
    depth: DepthUse | None = None,
    measure: Callable[[], Recommendation] | None = None,
) -> Diagnosis:
    """Whether tokens collapse, why, how fast, and what to do; every sentence with its numbers.

    What was not measured is said and not guessed: `stations="trunk"` shows which step is to blame, `measures="all"` the
    rest.

    Args:
        profile: what `probe` returned.
        skip_loss: what `depthscope.skip_loss` returned for the same model.
        spectra: what `depthscope.spectra` did.
        depth: what `depthscope.depth_use` did: with it the verdict also says which half of the blocks does the work,
            where the prediction is settled, which blocks could go and at what loss, and who shares what is alike.
        measure: gives the measured strength of a remedy, which from a profile alone is an estimate and is called one
            (`lambda: recommend(model, inputs)`); it is called only if a remedy is called for.

    Returns:
        A `Diagnosis`, which prints itself.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> depthscope.diagnose(depthscope.probe(model, torch.randn(2, 5, 16))).verdict
        'no collapse'
    """
    facts = Facts(profile, skip_loss, spectra, depth)
    if depth is not None:
        if facts.without:
            raise ValueError(f"depth= is of the whole model, and this one was probed without its {facts.without}")
        require_same_model(profile, depth)
    chosen = next(rule for rule in VERDICTS if rule.applies(facts))
    verdict = _finding(chosen, facts)
    unreadable = chosen.verdict in ("broken", "cannot tell")
    rules = [rule for rule in FINDINGS if not (facts.without and rule.name in OF_WHOLE_MODELS)]
    findings: list[Finding] = []
    if not unreadable:
        said = [_finding(rule, facts) for rule in rules if rule.applies(facts)]
        closing = [finding for finding in said if finding.rule in CLOSING]
        findings = with_depth(facts, chosen.name, [finding for finding in said if finding.rule not in CLOSING])
        findings += closing
    headline = verdict.sentence
    if facts.entered_broken and facts.samples:
        others = f"Of the {counted(facts.samples, 'other sequence')}: {lowered(headline)}"
        headline = f"Not finite (NaN or infinity): {in_words(facts.entered_broken)}. {others}"
    if facts.without:
        headline = f"Without its {facts.without}, which is not the model as it is: {lowered(headline)}"
    return Diagnosis(
        chosen.verdict,
        headline,
        tuple(findings),
        advise(facts, chosen.verdict, measure),
        verdict.numbers,
        str(profile.metadata.get("model", "")),
    )


def _finding(rule: Rule, facts: Facts) -> Finding:
    values = rule.values(facts)
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    return Finding(rule.name, rule.sentence.format(**values), numbers)
