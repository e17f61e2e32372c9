"""`diagnose`: a profile in, a verdict out, by the rules of `rules.py` and `findings.py`."""

from __future__ import annotations

from collections.abc import Callable

from depthscope.diagnosis.choices import advise
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.findings import FINDINGS, OF_WHOLE_MODELS
from depthscope.diagnosis.rules import VERDICTS
from depthscope.diagnosis.verdict import Diagnosis
from depthscope.naming import counted, lowered
from depthscope.probing import Profile
from depthscope.probing.finite import in_words
from depthscope.remedies import Recommendation
from depthscope.usage import Finding


def diagnose(profile: Profile, *, measure: Callable[[], Recommendation] | None = None) -> Diagnosis:
    """Whether tokens collapse, where, by what, and what to do; every sentence with its numbers.

    What was not measured is not guessed: `stations="trunk"` shows which step is to blame, `measures="verdict"` whether
    all texts share what makes tokens alike.

    Args:
        profile: what `probe` returned.
        measure: chooses and measures a remedy on the model (`lambda: recommend(model, inputs)`), where one is called
            for; from a profile alone none has a strength.

    Returns:
        A `Diagnosis`, which prints itself.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> depthscope.diagnose(depthscope.probe(model, torch.randn(2, 5, 16))).verdict
        'no collapse'
    """
    if not isinstance(profile, Profile):
        made = type(profile).__name__
        raise TypeError(f"expected a Profile, got a {made}: diagnose(depthscope.probe(model, inputs))")
    facts = Facts(profile)
    chosen = next(rule for rule in VERDICTS if rule.applies(facts))
    headline, numbers = chosen.say(facts)
    findings: list[Finding] = []
    if chosen.verdict not in ("broken", "cannot tell"):
        silent = OF_WHOLE_MODELS if facts.without else frozenset()
        found = [find(facts) for name, find in FINDINGS.items() if name not in silent]
        findings = [one for one in found if one is not None]
    if facts.entered_broken and facts.samples:
        others = f"Of the {counted(facts.samples, 'other sequence')}: {lowered(headline)}"
        headline = f"Not finite (NaN or infinity): {in_words(facts.entered_broken)}. {others}"
    if facts.without:
        headline = f"Without its {facts.without}, which is not the model as it is: {lowered(headline)}"
    model = str(profile.metadata.get("model", ""))
    advice = advise(facts, chosen.verdict, measure)
    return Diagnosis(chosen.verdict, headline, tuple(findings), advice, dict(numbers), model)
