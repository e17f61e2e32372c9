"""What a verdict takes from the use of depth: its sentences, each once, and how the energy splits in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from depthscope.diagnosis.facts import Facts
from depthscope.naming import lowered
from depthscope.probing import Profile
from depthscope.usage import DepthUse, Finding
from depthscope.usage.verdict import HALF

# Of a verdict with the use of depth: what the second says as well, and better, so that the first is silent.
_SAID_BETTER = {"spare blocks": "could go", "quiet blocks": "small branches"}
# By whom the tokens' common part is shared: of tokens that are alike the use of depth says all of it, of others the
# profile says what became of it since the entrance; "anisotropic" is a headline, and says it for both.
_SHARED_BY = {"shared by all", "loss of context"}
_HEADLINE = "anisotropic"


def require_same_model(profile: Profile, used: DepthUse) -> None:
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


def with_depth(f: Facts, headline: str, findings: Sequence[Finding]) -> list[Finding]:
    """The findings of a profile, and those of the use of depth that say something else; `headline` is the verdict's
    rule."""
    if f.use is None:
        return list(findings)
    there = {finding.rule for finding in findings}
    silent = {"alike"} if headline == _HEADLINE else set()
    for item in f.use.findings:
        if item.rule == "alike" and there & _SHARED_BY:
            alike = item.numbers["shared"] + item.numbers["sequence"] >= HALF
            silent |= _SHARED_BY if alike else {"alike"}
        silent |= {rule for rule, better in _SAID_BETTER.items() if better == item.rule}
    kept = [item for item in findings if item.rule not in silent]
    return [*kept, *(_of_part(f, item) for item in f.use.findings if item.rule not in silent)]


def _of_part(f: Facts, finding: Finding) -> Finding:
    """Its blocks are counted from 1 in each part, those of a profile through all parts."""
    if len(f.profile.parts) == 1:
        return finding
    assert f.use is not None
    where = f"In the {f.use.metadata['part']}, its blocks counted from 1: "
    return replace(finding, sentence=where + lowered(finding.sentence))
