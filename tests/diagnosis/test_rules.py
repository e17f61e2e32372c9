"""Every rule of the table: a profile on which it speaks, with its number, and a near one on which it must not."""

from typing import Any

import pandas as pd
import pytest

from depthscope.diagnosis import diagnose
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.rules import FINDINGS, VERDICTS
from profiles_made_up import INITIALISED, TRAINED, by_map, made_up

NAN = float("nan")
COLLAPSE = by_map(1.5, 0.05, 0.1, 20)  # s = 1.5ˡ(1/9 + 0.1) − 0.1 passes 99 at l = 15.2
SLOW = by_map(1.05, 0.01, 0.3, 10)  # 0.3 to 0.44
MIDDLE = by_map(1.1, 0.02, 0.3, 12)  # to 0.64
LEVEL = [0.1] * 9
SINK = [(b, s, 3, 10.0 * b) for b in (2, 3, 4) for s in (0, 1)]
SKIPPED = pd.DataFrame(
    [(0, 0, 2.0, 0.0), (1, 1, 2.5, 0.5), (2, 2, 2.001, 0.001)], columns=["first_block", "last_block", "loss", "change"]
)


def only(**curves: list[float]) -> dict[str, list[float]]:
    return {name.replace("__", "@"): values for name, values in curves.items()}


def sim(values: list[float], **more: list[float]) -> dict[str, list[float]]:
    return only(token_similarity=values, **more)


def split(similarity: list[float], shared: float, sequence: float, position: float = 0.0) -> dict[str, list[float]]:
    n = len(similarity)
    return sim(
        similarity,
        energy_shared=[0.0] * (n - 1) + [shared],
        energy_sequence=[0.01] * (n - 1) + [sequence],
        energy_position=[0.1] * (n - 1) + [position],
        energy_token=[0.0] * n,
    )


TRUNK = {"after_attention": 0.5, "ffn_input": 0.5, "after_ffn": 0.6, "output": 0.6}


def trunk(**levels: float) -> dict[str, list[float]]:
    """One block from 0.2 to the levels at its stations, then blocks that change nothing."""
    at = TRUNK | levels
    end = at["output"]
    curves = sim([0.2, end, end, end])
    for station, level in at.items():
        if station != "output":
            curves[f"token_similarity@{station}"] = [NAN, level, end, end]
            curves[f"token_diversity@{station}"] = [NAN, 1 - level, 1 - end, 1 - end]
    return curves


def spectra(delta: float) -> dict[str, list[float]]:
    per_block = {"second_eigenvalue": 0.1, "delta": delta, "omega": 0.1, "mu_mean": 1.0, "mu_diversity": 0.1}
    curves = {f"{name}@attention": [NAN, *[value] * 8] for name, value in per_block.items()}
    return (
        sim(LEVEL)
        | curves
        | {
            "branch_ratio@attention_branch": [NAN, *[0.3] * 8],
            "escalation_rate@after_attention": [NAN, *[1.2] * 8],
        }
    )


def everything() -> dict[str, list[float]]:
    """All that the rules ask for: the trunk's stations, ranks, energies, attention's spectrum."""
    return (
        trunk()
        | split([0.2, 0.6, 0.6, 0.6], 0.1, 0.1)
        | {"effective_rank": [5.0] * 4, "second_eigenvalue@attention": [NAN, 0.1, 0.1, 0.1]}
    )


# rule: (a profile on which it speaks, a number of it, a near profile on which it must not)
LATE = [0.1] * 7 + [0.3, 0.95]
CASES: dict[str, tuple[tuple[dict[str, list[float]], dict[str, Any]], tuple[str, float], Any]] = {
    # --- verdicts
    "not finite": ((sim([0.1, 0.2, NAN, NAN]), {}), ("block", 2), (sim([0.1, 0.2, 0.2, 0.2]), {})),
    "no similarity": ((only(frobenius_norm=[1.0, 1, 1]), {}), ("measured", 1), (sim(LEVEL), {})),
    "one token": ((sim([1.0] * 4, cosine_similarity=[NAN] * 4), {"tokens": 1}), ("tokens", 1), (sim(LEVEL), {})),
    "one block": ((sim([0.1, 0.5]), {}), ("blocks", 1), (sim([0.1, 0.5, 0.6]), {})),
    "alike at the entrance": ((sim([0.995, 0.999, 0.999]), {}), ("start", 0.995), (sim([0.98, 0.999, 0.999]), {})),
    "converges": ((sim(LATE), {"weights": TRAINED}), ("before", 0.3), (sim(LATE), {"weights": INITIALISED})),
    "anisotropic": (
        (split([0.1, 0.95, 0.95, 0.95, 0.95], 0.93, 0.02), {"weights": TRAINED}),
        ("shared", 0.93),
        (split([0.1, 0.95, 0.95, 0.95, 0.95], 0.5, 0.45), {"weights": TRAINED}),
    ),
    "collapsed": ((sim(COLLAPSE), {}), ("end", COLLAPSE[-1]), (sim(COLLAPSE[:10]), {})),
    "collapsing": ((sim(COLLAPSE[:11]), {}), ("end", COLLAPSE[10]), (sim(MIDDLE), {})),
    "rank collapse": (
        (sim(LEVEL, effective_rank=[20.0] * 8 + [1.2]), {}),
        ("rank_end", 1.2),
        (sim(LEVEL, effective_rank=[20.0] * 8 + [5.0]), {}),
    ),
    "rising": ((sim(MIDDLE), {}), ("end", MIDDLE[-1]), (sim(SLOW), {})),
    "different": ((sim(SLOW), {}), ("end", SLOW[-1]), (sim(COLLAPSE), {})),
    # --- findings
    "crossing": ((sim(COLLAPSE), {}), ("passes_0.99", 16), (sim(MIDDLE), {})),
    "sink": (
        (sim(LEVEL, direction_similarity=[0.1] * 8 + [0.4]), {"sinks": SINK}),
        ("robust", 0.4),
        (sim(LEVEL, direction_similarity=[0.1] * 8 + [0.4]), {}),
    ),
    "uneven": (
        (sim(LEVEL, direction_similarity=[0.1] * 8 + [0.3]), {}),
        ("robust", 0.3),
        (sim(LEVEL, direction_similarity=[0.1] * 8 + [0.12]), {}),
    ),
    "idle depth": ((sim(COLLAPSE), {}), ("idle", 4), (sim(COLLAPSE[:17]), {})),
    "rank": ((sim(LEVEL, effective_rank=[20.0] * 9), {}), ("rank_end", 20), (sim(LEVEL), {})),
    "rank beside a sink": (
        (sim(LEVEL, effective_rank=[20.0] * 8 + [1.1]), {"sinks": SINK}),
        ("rank_end", 1.1),
        (sim(LEVEL, effective_rank=[20.0] * 8 + [1.1]), {}),
    ),
    "shared by all": ((split(MIDDLE, 0.63, 0.01), {}), ("shared", 0.63), (split(MIDDLE, 0.3, 0.33), {})),
    "loss of context": ((split(MIDDLE, 0.3, 0.33), {}), ("sequence", 0.33), (split(MIDDLE, 0.63, 0.01), {})),
    "sequences alike": ((split(LEVEL, 0.05, 0.0, 0.94), {}), ("position", 0.94), (split(LEVEL, 0.05, 0.0, 0.5), {})),
    "steps": (
        (trunk(), {}),
        ("FFN", 0.2263),
        (trunk(after_attention=0.21, ffn_input=0.21, after_ffn=0.22, output=0.22), {}),
    ),
    "steps cancel": ((trunk(after_ffn=0.1, output=0.25), {}), ("norm", 1.0986), (trunk(), {})),
    "trend arrives": ((sim(MIDDLE), {}), ("rho", 1.1), (sim(LEVEL), {})),
    "trend settles": ((sim(by_map(0.5, 0.2, 0.1, 8)), {}), ("rho", 0.5), (sim(MIDDLE), {})),
    "trend passed": ((sim(COLLAPSE), {}), ("half", 1.7095), (sim(MIDDLE), {})),
    "too few blocks": ((sim([0.1, 0.2, 0.3]), {}), ("blocks", 2), (sim(MIDDLE), {})),
    "theory": ((spectra(0.2), {}), ("rate", 1.2), (spectra(0.95), {})),
    "theory says nothing": ((spectra(0.95), {}), ("omega_delta", 1.05), (spectra(0.2), {})),
    "spectra": ((spectra(0.2), {}), ("gap", 0.9), (sim(LEVEL), {})),
    "quiet blocks": (
        (sim(LEVEL, angular_distance=[NAN] + [0.1] * 7 + [0.01]), {}),
        ("count", 1),
        (sim(LEVEL, angular_distance=[NAN] + [0.1] * 8), {}),
    ),
    "spare blocks": (
        (sim(SLOW), {"weights": TRAINED, "skip_loss": SKIPPED}),
        ("change_2", 0.001),
        (sim(SLOW), {"weights": INITIALISED, "skip_loss": SKIPPED}),
    ),
    "initialised": ((sim(LEVEL), {"weights": INITIALISED}), ("norms", 8), (sim(LEVEL), {"weights": TRAINED})),
    "trained": ((sim(LEVEL), {"weights": TRAINED}), ("moved", 8), (sim(LEVEL), {})),
    "normal": (
        (sim(MIDDLE), {"class": "BertModel", "family": "bert", "width": 768, "weights": INITIALISED}),
        ("block", 12),
        (sim(MIDDLE), {"class": "BertModel", "family": "bert", "width": 512, "weights": INITIALISED}),
    ),
    "not measured": ((sim(LEVEL), {}), ("count", 4), (everything(), {})),
}
VERDICT_OF = {rule.name: rule.verdict for rule in VERDICTS}


def judged(case: tuple[dict[str, list[float]], dict[str, Any]]):
    curves, about = case
    about = dict(about)
    skipped = about.pop("skip_loss", None)
    return diagnose(made_up(curves, about.pop("sinks", None), **about), skipped)


def rule_of_verdict(case: tuple[dict[str, list[float]], dict[str, Any]]) -> str:
    curves, about = case
    facts = Facts(made_up(curves, **about))
    return next(rule.name for rule in VERDICTS if rule.applies(facts))


def test_every_rule_has_a_case_and_names_are_unique():
    names = [rule.name for rule in (*VERDICTS, *FINDINGS)]
    assert len(set(names)) == len(names)
    assert set(CASES) == set(names)


@pytest.mark.parametrize("name", VERDICT_OF)
def test_verdicts(name: str):
    fires, (number, value), silent = CASES[name]
    found = judged(fires)
    assert rule_of_verdict(fires) == name
    assert found.verdict == VERDICT_OF[name]
    assert found.numbers[number] == pytest.approx(value, abs=1e-3)
    assert rule_of_verdict(silent) != name


@pytest.mark.parametrize("name", [rule.name for rule in FINDINGS])
def test_findings(name: str):
    fires, (number, value), silent = CASES[name]
    finding = judged(fires).finding(name)
    assert finding is not None
    assert finding.numbers[number] == pytest.approx(value, abs=1e-3)
    assert "{" not in finding.sentence
    assert "nan" not in finding.sentence
    assert any(character.isdigit() for character in finding.sentence)
    assert judged(silent).finding(name) is None


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (("token_similarity@after_ffn", "token_diversity@after_ffn"), "which step is to blame (stations trunk)"),
        (("effective_rank",), "directions left (measure effective_rank)"),
        (("energy_sequence",), "what sequences share (measures all)"),
        (("second_eigenvalue@attention",), "attention's spectrum (measures spectral)"),
    ],
)
def test_what_was_not_measured_is_named_and_nothing_else(lost: tuple[str, ...], said: str):
    finding = judged(({name: values for name, values in everything().items() if name not in lost}, {})).finding(
        "not measured"
    )
    assert finding.numbers == {"count": 1}
    assert said in finding.sentence


def test_a_profile_is_not_needed_in_full():
    """One measure is enough for a verdict, a trend and a remedy, and what could not be said is named."""
    found = diagnose(made_up(only(cosine_similarity=COLLAPSE), causal=None))
    assert found.verdict == "collapsed"
    assert "mean cosine 0.100 at the entrance, 0.9986 at block 20" in found.headline
    assert {finding.rule for finding in found.findings} == {"crossing", "idle depth", "trend passed", "not measured"}
    assert found.finding("crossing").numbers["passes_0.99"] == 16
    assert found.finding("trend passed").numbers["rho"] == pytest.approx(1.5, rel=0.03)
    assert found.finding("not measured").numbers == {"count": 4}
    assert found.recommendation.remedies[0].mixing == "prefix"  # it may be causal
    whole = diagnose(made_up(sim(COLLAPSE), causal=None))
    assert found.recommendation == whole.recommendation
