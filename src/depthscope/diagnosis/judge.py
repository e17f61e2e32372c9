"""`diagnose`: a profile in, a verdict out, by the rules of `rules.py` and `findings.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from depthscope.diagnosis.advice import advise
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.findings import CLOSING, FINDINGS, OF_WHOLE_MODELS
from depthscope.diagnosis.rules import VERDICTS
from depthscope.diagnosis.verdict import Diagnosis
from depthscope.naming import counted, lowered
from depthscope.probing import Profile
from depthscope.probing.finite import in_words
from depthscope.remedies import Recommendation
from depthscope.usage import DepthUse, Finding
from depthscope.value_spectra import Spectra

# Of a verdict with the use of depth: what the second says as well, and better, so that the first is silent.
_SAID_BETTER = {"could go": "spare blocks"}


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
        depth: what `depthscope.depth_use` did: with it the verdict also says which blocks do the work, which could go
            and at what loss, and where the prediction is settled.
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
        _require_same_model(profile, depth)
    chosen = next(rule for rule in VERDICTS if rule.applies(facts))
    headline, numbers = chosen.say(facts)
    findings: list[Finding] = []
    if chosen.verdict not in ("broken", "cannot tell"):
        said = [found for rule in FINDINGS if (found := rule.find(facts)) is not None]
        said = [found for found in said if not (facts.without and found.rule in OF_WHOLE_MODELS)]
        findings = _with_depth(facts, [found for found in said if found.rule not in CLOSING])
        findings += [found for found in said if found.rule in CLOSING]
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
        dict(numbers),
        str(profile.metadata.get("model", "")),
    )


def _require_same_model(profile: Profile, used: DepthUse) -> None:
    """Refuses the use of depth of a model that is of another family or width, or has other blocks.

    The class may be another: a profile of the bare model goes with the use of the same blocks below a head."""
    if not isinstance(used, DepthUse):
        raise ValueError(f"expected depth= from depthscope.depth_use, got {type(used).__name__}")
    part = str(used.metadata.get("part") or "")
    # A part that was probed alone is a model of one part, without a name.
    first, last = profile.parts.get(part, (1, 0)) if len(profile.parts) > 1 else next(iter(profile.parts.values()))
    if last - first + 1 != used.depth:
        known = ", ".join(f"{name or 'it'} has {end - begin + 1}" for name, (begin, end) in profile.parts.items())
        of = f" of its {part}" if part else ""
        raise ValueError(
            f"expected depth= of the model that was probed (blocks: {known}), got the use of {used.depth} blocks{of}"
        )
    probed = profile.metadata | profile.metadata.get("towers", {}).get(part, {})
    for name in ("family", "width"):
        theirs, ours = probed.get(name), used.metadata.get(name)
        if theirs is not None and ours is not None and theirs != ours:
            raise ValueError(f"expected depth= of the model that was probed ({name} {theirs}), got {name} {ours}")


def _with_depth(f: Facts, findings: list[Finding]) -> list[Finding]:
    """The findings of a profile, and those of the use of depth, which says some of them better. The blocks of a part
    are counted from 1 in its use of depth, and through all parts in a profile."""
    if f.use is None:
        return findings
    of_use = list(f.use.findings)
    silent = {_SAID_BETTER.get(item.rule) for item in of_use}
    if len(f.profile.parts) > 1:
        where = f"In the {f.use.metadata['part']}, its blocks counted from 1: "
        of_use = [replace(item, sentence=where + lowered(item.sentence)) for item in of_use]
    return [*(finding for finding in findings if finding.rule not in silent), *of_use]
