"""Every rule of the table: a profile on which it speaks, with its number, and a near one on which it must not."""

from typing import Any

import pandas as pd
import pytest

from depthscope.diagnosis import diagnose
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.findings import FINDINGS
from depthscope.diagnosis.rules import VERDICTS
from profiles_made_up import INITIALISED, TRAINED, by_map, made_up, made_up_spectra

NAN = float("nan")
COLLAPSE = by_map(1.5, 0.05, 0.1, 20)  # s = 1.5ˡ(1/9 + 0.1) − 0.1 passes 99 at l = 15.2
SLOW = by_map(1.05, 0.01, 0.3, 10)  # 0.3 to 0.44
MIDDLE = by_map(1.1, 0.02, 0.3, 12)  # to 0.64
LEVEL = [0.1] * 9
SINK = [(b, s, 3, 10.0 * b) for b in (2, 3, 4) for s in (0, 1)]
LASTING_SINK = [(b, s, 3, 10.0 * b) for b in range(2, 9) for s in (0, 1)]
# A trained causal model: alike from block 2 on, with a dip before the end; nine tenths of it shared by all sequences.
DIP = [0.1, 0.6, *[0.97] * 13, 0.88, 0.86, 0.9, 0.92]
BEHIND_NORMS = {
    "token_similarity@attention_input": [NAN, *[0.3] * 8],
    "token_similarity@ffn_input": [NAN, *[0.2] * 8],
    "token_similarity@final_norm": [*[NAN] * 8, 0.45],
}
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


def roles(ratios: list[float]) -> dict[str, list[float]]:
    return {"queries_keys_gradient": [NAN, *ratios], "values_output_gradient": [NAN] + [1.0] * len(ratios)}


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
    "weights not finite": (
        (sim([0.1, 0.2, 0.2, 0.2]), {"weights_not_finite": ["a", "b", "c", "d"]}),
        ("count", 4),
        (sim([0.1, 0.2, 0.2, 0.2]), {"weights_not_finite": []}),
    ),
    "not finite": ((sim([0.1, 0.2, NAN, NAN]), {}), ("block", 2), (sim([0.1, 0.2, 0.2, 0.2]), {})),
    "nothing finite enters": (
        (sim([NAN] * 4), {"not_finite": [{"sample": s, "block": 0, "station": "output"} for s in (0, 1)]}),
        ("count", 2),
        (sim(LEVEL), {"not_finite": [{"sample": 0, "block": 0, "station": "output"}]}),
    ),
    "no similarity": ((only(frobenius_norm=[1.0, 1, 1]), {}), ("measured", 1), (sim(LEVEL), {})),
    "one token": ((sim([1.0] * 4, cosine_similarity=[NAN] * 4), {"tokens": 1}), ("tokens", 1), (sim(LEVEL), {})),
    "one block": ((sim([0.1, 0.5]), {}), ("blocks", 1), (sim([0.1, 0.5, 0.6]), {})),
    "poor inputs": (
        (sim([0.1, 0.2, 0.2, 0.2]), {"ids": {"unknown": 0.5, "different": 1.0}}),
        ("unknown", 0.5),
        (sim([0.1, 0.2, 0.2, 0.2]), {"ids": {"unknown": 0.01, "different": 1.0, "equal": False}}),
    ),
    "alike at the entrance": ((sim([0.995, 0.999, 0.999]), {}), ("start", 0.995), (sim([0.98, 0.999, 0.999]), {})),
    "stand-in inputs": (
        (sim([0.226, 0.4, 0.674]), {"weights": TRAINED, "stand_in": "random normal pixels"}),
        ("end", 0.674),
        (sim([0.226, 0.4, 0.674]), {"weights": INITIALISED, "stand_in": "random normal pixels"}),
    ),
    "converges": (
        (split(LATE, 0.3, 0.6), {"weights": TRAINED}),
        ("before", 0.3),
        (split(LATE, 0.3, 0.6), {"weights": INITIALISED}),
    ),
    "shared by whom": (
        (sim([0.1, 0.95, 0.95, 0.95, 0.95]), {"weights": TRAINED}),
        ("end", 0.95),
        (sim([0.1, 0.95, 0.95, 0.95, 0.95]), {"weights": INITIALISED}),
    ),
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
    "as they came": ((sim([0.55, 0.58, 0.6, 0.61]), {}), ("start", 0.55), (sim([0.4, 0.41, 0.42, 0.43]), {})),
    "different": ((sim(SLOW), {}), ("end", SLOW[-1]), (sim(COLLAPSE), {})),
    # --- findings
    "crossing": ((sim(COLLAPSE), {}), ("passes_0.99", 16), (sim(MIDDLE), {})),
    "sink": (
        (sim(LEVEL, direction_similarity=[0.1] * 8 + [0.4]), {"sinks": SINK}),
        ("robust", 0.4),
        (sim(LEVEL, direction_similarity=[0.1] * 8 + [0.4]), {}),
    ),
    "few outliers": (
        (sim(LEVEL), {"sinks": SINK, "samples": 8}),
        ("carriers", 2),
        (sim(LEVEL), {"sinks": SINK, "samples": 3}),
    ),
    "rogue feature": (
        (sim(LEVEL, largest_feature_share=[0.1] * 8 + [0.89], largest_feature=[7.0] * 9), {}),
        ("feature", 7),
        (sim(LEVEL, largest_feature_share=[0.1] * 9, largest_feature=[7.0] * 9), {}),
    ),
    "read": (
        (sim(LEVEL) | BEHIND_NORMS, {"placement": "pre"}),
        ("final_norm", 0.45),
        (sim(LEVEL) | {"token_similarity@final_norm": [*[NAN] * 8, 0.12]}, {"placement": "pre"}),
    ),
    "rise": ((sim([0.1, 0.12, 0.5, 0.51, 0.5]), {}), ("share", 0.95), (sim(LEVEL), {})),
    "uneven": (
        (sim(LEVEL, direction_similarity=[0.1] * 8 + [0.3]), {}),
        ("robust", 0.3),
        (sim(LEVEL, direction_similarity=[0.1] * 8 + [0.12]), {}),
    ),
    "rank": ((sim(LEVEL, effective_rank=[20.0] * 9), {}), ("rank_end", 20), (sim(LEVEL), {})),
    "shared by all": ((split(MIDDLE, 0.63, 0.01), {}), ("shared", 0.63), (split(MIDDLE, 0.3, 0.33), {})),
    "loss of context": ((split(MIDDLE, 0.3, 0.33), {}), ("sequence", 0.33), (split(MIDDLE, 0.63, 0.01), {})),
    "sequences alike": ((split(LEVEL, 0.05, 0.0, 0.94), {}), ("position", 0.94), (split(LEVEL, 0.05, 0.0, 0.5), {})),
    "steps": (
        (trunk(), {}),
        ("FFN", 0.2263),
        (trunk(after_attention=0.21, ffn_input=0.21, after_ffn=0.22, output=0.22), {}),
    ),
    "trend arrives": ((sim(MIDDLE), {}), ("rho", 1.1), (sim(LEVEL), {})),
    "trend settles": ((sim(by_map(0.5, 0.2, 0.1, 8)), {}), ("rho", 0.5), (sim(MIDDLE), {})),
    "trend passed": ((sim(COLLAPSE), {}), ("half", 1.7095), (sim(MIDDLE), {})),
    "no forecast": ((sim(MIDDLE), {"weights": TRAINED}), ("blocks", 12), (sim(MIDDLE), {"weights": INITIALISED})),
    "theory": ((spectra(0.2), {}), ("rate", 1.2), (spectra(0.95), {})),
    "spectra": ((spectra(0.2), {}), ("gap", 0.9), (sim(LEVEL), {})),
    "attention learns": (
        (sim(LEVEL, **roles([0.1] * 6 + [0.009, 0.001])), {}),
        ("able", 6),
        (sim(LEVEL, weight_gradient=[NAN] + [1.0] * 8), {}),
    ),
    "quiet blocks": (
        (sim(LEVEL, angular_distance=[NAN] + [0.1] * 7 + [0.01]), {}),
        ("count", 1),
        (sim(LEVEL, angular_distance=[NAN] + [0.1] * 8), {}),
    ),
    "value weights": (
        (sim(SLOW), {"weights": TRAINED, "spectra": made_up_spectra(*[0.9] * (len(SLOW) - 1))}),
        ("share", 0.9),
        (sim(SLOW), {"weights": TRAINED, "spectra": made_up_spectra(*[0.5] * (len(SLOW) - 1))}),
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
    skipped, weights = about.pop("skip_loss", None), about.pop("spectra", None)
    return diagnose(made_up(curves, about.pop("sinks", None), **about), skipped, spectra=weights)


def rule_of_verdict(case: tuple[dict[str, list[float]], dict[str, Any]]) -> str:
    curves, about = case
    facts = Facts(made_up(curves, **about))
    return next(rule.name for rule in VERDICTS if rule.applies(facts))


def test_every_rule_has_a_case_and_names_are_unique():
    names = [rule.name for rule in VERDICTS] + [name for rule in FINDINGS for name in rule.names]
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


@pytest.mark.parametrize("name", [name for rule in FINDINGS for name in rule.names])
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
        (("token_similarity@after_ffn", "token_diversity@after_ffn"), "which step is to blame"),
        (("effective_rank",), "how many directions are left"),
        (("energy_sequence",), "what sequences share"),
        (("second_eigenvalue@attention",), "attention's spectrum"),
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
    assert "mean cosine is 0.100 before block 1 and 0.999 after block 20" in found.headline
    assert {finding.rule for finding in found.findings} == {
        "crossing",
        "rise",
        "not measured",
        "initialised",
        "trend passed",
    }
    assert found.finding("crossing").numbers["passes_0.99"] == 16
    assert found.finding("trend passed").numbers["rho"] == pytest.approx(1.5, rel=0.03)
    assert found.finding("not measured").numbers == {"count": 4}
    assert found.recommendation.remedies[0].mixing == "prefix"  # it may be causal
    whole = diagnose(made_up(sim(COLLAPSE), causal=None))
    assert found.recommendation == whole.recommendation


# --- trained models ---------------------------------------------------------------------------------------


def test_a_dip_is_no_late_convergence():
    """Alike from block 2 on, and by what all sequences share: anisotropic, and nothing that a sentence encoder does."""
    found = judged((split(DIP, 0.84, 0.08), {"weights": TRAINED, "causal": True}))
    assert found.verdict == "anisotropic"
    assert "84% of their energy" in found.headline
    assert found.finding("crossing").sentence == (
        "Token similarity passes 0.9 after block 2, and is below 0.9 again after blocks 15–16."
    )
    lower = [*DIP[:-2], 0.87, 0.88]  # whether it ends on this side of 0.9 or on that is a matter of the text
    assert judged((split(lower, 0.81, 0.05), {"weights": TRAINED, "causal": True})).verdict == "anisotropic"
    assert rule_of_verdict((sim(DIP), {"weights": TRAINED})) != "converges"  # nor where energies were not measured


@pytest.mark.parametrize("causal", [True, None])
def test_pooling_is_not_said_of_what_may_be_causal(causal: bool | None):
    late = split(LATE, 0.3, 0.6)
    bidirectional = judged((late, {"weights": TRAINED}))
    assert "sentence encoders pool" in bidirectional.headline
    assert "trained to pool" in bidirectional.render(full=True)
    found = judged((late, {"weights": TRAINED, "causal": causal}))
    assert found.verdict == "converges by training"
    assert "pool" not in found.render(full=True)


def forecast(found) -> str:
    return " ".join(f.sentence for f in found.findings if f.rule.startswith("trend") or f.rule == "no forecast")


def test_only_laws_that_hold_forecast():
    about = {"weights": INITIALISED}
    assert "passes 0.99 at about block" in forecast(judged((sim(MIDDLE), about)))
    assert "further blocks would be trained too" in forecast(judged((sim(MIDDLE), {"weights": TRAINED})))
    for placement, why in ((None, "was not seen"), ("sandwich", "norms before and after each branch")):
        said = forecast(judged((sim(MIDDLE), about | {"placement": placement})))
        assert why in said
        assert "at about block" not in said
    scattered = [0.2, 0.5, 0.3, 0.62, 0.35, 0.7, 0.42, 0.75, 0.5, 0.8]
    said = forecast(judged((sim(scattered), about)))
    assert "follow no known law (half of them miss it by" in said
    assert "at about block" not in said


def test_fits_that_disagree_forecast_nothing():
    """Every other block does nothing: which of them are drawn decides whether a fit arrives."""
    steps = [0.0, 0.2, 0.0, 0.2, 0.0, 0.2, 0.0, 0.2, 0.0, 0.2, 0.1]
    logs = [0.4 + sum(steps[:n]) for n in range(len(steps) + 1)]
    found = judged((sim([1 / (1 + 2.718281828**-x) for x in logs]), {"weights": INITIALISED}))
    assert found.verdict == "no collapse"  # no verdict rests on such a forecast either
    assert "the blocks allow fits that pass 0.99 at block 27, and fits that pass it not within 110" in forecast(found)


def test_a_law_that_falls_is_said_to_fall():
    curve = [0.1, 0.3, 0.5, 0.6, *(1 / (1 + 0.5 * b**0.28) for b in range(4, 13))]
    found = judged((sim(curve), {"placement": "pre", "weights": INITIALISED}))
    assert "s = t_sim/(1 − t_sim) falls like block^-0.28" in found.finding("trend settles").sentence
    assert found.finding("trend settles").numbers["exponent"] == pytest.approx(-0.28, abs=1e-3)


def test_where_steps_cancel_no_step_is_to_blame():
    assert judged((trunk(after_ffn=0.1, output=0.25), {})).finding("steps") is None


def test_odds_are_named_after_what_is_judged():
    curves = sim(MIDDLE) | {"direction_similarity": MIDDLE}
    assert "s = t_sim/(1 − t_sim)" in forecast(judged((curves, {})))
    beside = judged((curves, {"sinks": [(b, s, 0, 50.0) for b in range(1, 13) for s in (0, 1)]}))
    assert "s = similarity/(1 − similarity)" in forecast(beside)
    assert "t_sim" not in beside.render(full=True)


def test_a_sink_is_told_by_runs_with_the_block_where_it_is_born():
    ratios = {3: 11.0} | dict.fromkeys(range(12, 30), 150.0)
    rows = [(block, sample, 0, ratio + sample / 4) for sample in range(8) for block, ratio in ratios.items()]
    curves = sim([0.1] * 31, direction_similarity=[0.1] * 31)
    curves["sink_attention@attention"] = [NAN] * 13 + [0.6] * 18
    found = judged((curves, {"sinks": rows, "samples": 8})).finding("sink")
    assert (found.numbers["born"], found.numbers["peak"]) == (12, 151.75)
    assert found.sentence.startswith(
        "Token 0 (' the') is an outlier in 8 of 8 sequences: up to 13 × the median norm after block 3, up to 152 × "
        "after blocks 12–29. It becomes large in block 12. Blocks after it give it 60% of their attention."
    )


def test_a_block_at_which_few_sequences_have_the_outlier_is_in_no_run():
    rows = [(b, s, 0, 50.0) for s in range(8) for b in (4, 5, 6)] + [(2, 1, 0, 11.0)]
    facts = Facts(made_up(sim(LEVEL), rows, samples=8))
    assert [(run.first, run.last) for run in facts.sink.runs] == [(4, 6)]


def test_one_sequence_of_eight_does_not_switch_what_is_judged():
    one = [(b, 5, 3, 40.0) for b in range(1, 9)]
    assert Facts(made_up(sim(LEVEL), one, samples=8)).judged == "token_similarity"
    most = [(b, s, s, 40.0) for b in range(1, 9) for s in range(5)]  # each at a place of its own
    facts = Facts(made_up(sim(LEVEL), most, samples=8))
    assert facts.judged == "direction_similarity"
    assert facts.sink.others == 4


def test_the_rank_without_outliers_is_judged_where_it_was_measured():
    ranks = {"effective_rank": [20.0] * 8 + [1.1], "ordinary_rank": [20.0] * 8 + [18.0]}
    found = judged((sim(LEVEL, **ranks), {"sinks": LASTING_SINK}))
    said = found.finding("rank").sentence
    assert (
        said
        == "The tokens fill 18.0 directions after block 8, 20.0 before block 1 (effective rank, outliers left out)."
    )
    alone = {"effective_rank": ranks["effective_rank"]}
    assert judged((sim(LEVEL, **alone), {"sinks": LASTING_SINK})).finding("rank") is None  # it is the outlier's rank
    line = ranks | {"ordinary_rank": [20.0] * 8 + [1.2]}
    assert judged((sim(LEVEL, **line), {"sinks": LASTING_SINK})).verdict == "rank collapse"


def test_what_is_read_behind_the_norms_stands_beside_the_trunk():
    curves = sim([0.1] * 8 + [0.906]) | BEHIND_NORMS
    said = judged((curves, {"placement": "pre"})).finding("read").sentence
    assert said == (
        "Token similarity is 0.300 in what attention reads (mean over the blocks; 0.100 on the residual stream), 0.200 "
        "in what the FFN reads (mean over the blocks; 0.100 on the residual stream), 0.450 after the final norm (0.906 "
        "before it)."
    )
    post = judged((curves, {"placement": "post"})).finding("read").sentence  # its branches read the trunk itself
    assert post == "Token similarity is 0.450 after the final norm (0.906 before it)."


def test_the_rise_is_placed():
    found = judged((sim([0.103, 0.3, 0.52, 0.5, 0.55, 0.52, 0.61]), {})).finding("rise")
    assert found.sentence == "Blocks 1–2 make 82% of the rise: from 0.103 to 0.520."
    assert judged((sim([0.1, 0.11, 0.9, 0.9]), {})).finding("rise").sentence.startswith("Block 2 makes 99% of the rise")
    past = judged((sim([0.1, 0.9, 0.8, 0.7]), {})).finding("rise").sentence
    assert past == "Block 1 makes more than the whole rise: from 0.100 to 0.900."


def test_a_feature_that_each_sequence_has_for_itself_is_no_rogue_dimension():
    profile = made_up(sim(LEVEL, largest_feature_share=[0.9] * 9, largest_feature=[7.0] * 9))
    assert diagnose(profile).finding("rogue feature").numbers["samples"] == 2
    other = (profile.frame["measure"] == "largest_feature") & (profile.frame["sample"] == 1)
    profile.frame.loc[other, "value"] = 3.0
    assert diagnose(profile).finding("rogue feature") is None


def test_the_sentence_on_learning_names_the_blocks_that_cannot():
    said = diagnose(made_up(sim(LEVEL, **roles([0.1] * 5 + [0.009, 0.02, 0.001])))).finding("attention learns")
    assert said is not None
    assert said.sentence == (
        "Attention can learn in 6 of 8 blocks: the gradient of its queries and keys is at least 1 % of that of values "
        "and output. It is 0.1 of it in block 1 and 0.001 in block 8; less than 0.01 in blocks 6, 8."
    )
    small = diagnose(made_up(sim(LEVEL, **roles([0.008] * 8)))).finding("attention learns")
    assert small is not None
    assert "the size of attention's weights" in small.sentence
    falls = diagnose(made_up(sim(LEVEL, **roles([0.008] * 7 + [1e-4])))).finding("attention learns")
    assert falls is not None
    assert "the size of attention's weights" not in falls.sentence
    zero = roles([0.1] * 8) | {"values_output_gradient": [NAN] + [0.0] * 8}  # frozen, or no loss: nothing to compare
    assert diagnose(made_up(sim(LEVEL, **zero))).finding("attention learns") is None
