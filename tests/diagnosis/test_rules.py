"""Every rule of the table: a profile on which it speaks, with its number, and a near one on which it must not."""

import json
import re
from typing import Any

import pytest
from torch import nn

from depthscope.diagnosis import Diagnosis, diagnose
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.findings import FINDINGS
from depthscope.diagnosis.rules import VERDICTS
from profiles_made_up import INITIALISED, TRAINED, by_map, made_up

NAN = float("nan")
COLLAPSE = by_map(1.5, 0.05, 0.1, 20)  # s = 1.5ˡ(1/9 + 0.1) − 0.1 passes 99 at l = 15.2
SLOW = by_map(1.05, 0.01, 0.3, 10)  # 0.3 to 0.44
MIDDLE = by_map(1.1, 0.02, 0.3, 12)  # to 0.64
LEVEL = [0.1] * 9
SINK = [(b, s, 3, 10.0 * b) for b in (2, 3, 4) for s in (0, 1)]
LASTING_SINK = [(b, s, 3, 10.0 * b) for b in range(2, 9) for s in (0, 1)]
# A trained causal model: alike from block 2 on, with a dip before the end; nine tenths of it shared by all sequences.
DIP = [0.1, 0.6, *[0.97] * 13, 0.88, 0.86, 0.9, 0.92]


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
    "zeros enter": (
        (sim([NAN, 0.2, 0.2, 0.2], frobenius_norm=[0.0, 1, 1, 1]), {}),
        ("block", 0),
        (sim([NAN, 0.2, 0.2, 0.2], frobenius_norm=[1.0, 1, 1, 1]), {}),
    ),
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
    "rise": ((sim([0.1, 0.12, 0.5, 0.51, 0.5]), {}), ("share", 0.95), (sim(LEVEL), {})),
    "loss of context": ((split(MIDDLE, 0.3, 0.33), {}), ("sequence", 0.33), (split(MIDDLE, 0.63, 0.01), {})),
    "sequences alike": ((split(LEVEL, 0.05, 0.0, 0.94), {}), ("position", 0.94), (split(LEVEL, 0.05, 0.0, 0.5), {})),
    "steps": (
        (trunk(), {}),
        ("FFN", 0.2263),
        (trunk(after_attention=0.21, ffn_input=0.21, after_ffn=0.22, output=0.22), {}),
    ),
    "trend arrives": ((sim(MIDDLE), {}), ("arrival", 54), (sim(MIDDLE), {"placement": "pre"})),
    "attention learns": (
        (sim(LEVEL, **roles([0.1] * 6 + [0.009, 0.001])), {}),
        ("able", 6),
        (sim(LEVEL, weight_gradient=[NAN] + [1.0] * 8), {}),
    ),
    "normal": (
        (sim(MIDDLE), {"weights": TRAINED}),
        ("block", 12),
        (sim(MIDDLE), {"weights": INITIALISED}),
    ),
    "not measured": ((sim(MIDDLE), {}), ("end", MIDDLE[-1]), (trunk(), {})),
}
VERDICT_OF = {rule.name: rule.verdict for rule in VERDICTS}


def judged(case: tuple[dict[str, list[float]], dict[str, Any]]):
    curves, about = case
    about = dict(about)
    return diagnose(made_up(curves, about.pop("sinks", None), **about))


def rule_of_verdict(case: tuple[dict[str, list[float]], dict[str, Any]]) -> str:
    curves, about = case
    facts = Facts(made_up(curves, **about))
    return next(rule.name for rule in VERDICTS if rule.applies(facts))


def test_every_rule_has_a_case_and_names_are_unique():
    names = [rule.name for rule in VERDICTS] + list(FINDINGS)
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


@pytest.mark.parametrize("name", list(FINDINGS))
def test_findings(name: str):
    fires, (number, value), silent = CASES[name]
    finding = judged(fires).finding(name)
    assert finding is not None
    assert finding.numbers[number] == pytest.approx(value, abs=1e-3)
    assert "{" not in finding.sentence
    assert "nan" not in finding.sentence
    assert name == "not measured" or any(character.isdigit() for character in finding.sentence)
    assert judged(silent).finding(name) is None


def test_a_model_in_the_place_of_its_profile_is_refused():
    with pytest.raises(TypeError, match=r"expected a Profile, got a Linear: diagnose\(depthscope.probe"):
        diagnose(nn.Linear(2, 2))


def test_a_profile_is_not_needed_in_full():
    """One measure is enough for a verdict, and what could not be said is named."""
    found = diagnose(made_up(only(cosine_similarity=COLLAPSE), causal=None))
    assert found.verdict == "collapsed"
    assert "mean cosine is 0.100 before block 1 and 0.999 after block 20" in found.headline
    assert [finding.rule for finding in found.findings] == ["crossing", "rise", "not measured"]
    assert found.finding("crossing").numbers["passes_0.99"] == 16
    assert found.recommendation == diagnose(made_up(sim(COLLAPSE), causal=None)).recommendation


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


def forecast(curve: list[float], **about: Any) -> str:
    found = judged((sim(curve), {"weights": INITIALISED} | about)).finding("trend arrives")
    return "" if found is None else found.sentence


def test_only_laws_that_hold_forecast():
    assert "token similarity passes 0.99 at about block 54" in forecast(MIDDLE)
    assert forecast(MIDDLE, weights=TRAINED) == ""
    for placement in (None, "sandwich", "pre"):
        assert forecast(MIDDLE, placement=placement) == ""
    scattered = [0.2, 0.5, 0.3, 0.62, 0.35, 0.7, 0.42, 0.75, 0.5, 0.8]
    assert forecast(scattered) == ""


def test_fits_that_disagree_forecast_nothing():
    """Every other block does nothing: which of them are drawn decides whether a fit arrives."""
    steps = [0.0, 0.2, 0.0, 0.2, 0.0, 0.2, 0.0, 0.2, 0.0, 0.2, 0.1]
    logs = [0.4 + sum(steps[:n]) for n in range(len(steps) + 1)]
    curve = [1 / (1 + 2.718281828**-x) for x in logs]
    assert judged((sim(curve), {"weights": INITIALISED})).verdict == "no collapse"  # nor does a verdict rest on it
    assert forecast(curve) == ""


def test_where_steps_cancel_no_step_is_to_blame():
    levels = {"after_attention": 0.95, "ffn_input": 0.95, "after_ffn": 0.55, "output": 0.55}
    assert judged((trunk(**levels), {})).finding("steps") is None


def test_a_sink_is_said_with_the_block_where_it_is_born():
    ratios = {3: 11.0} | dict.fromkeys(range(12, 30), 150.0)
    rows = [(block, sample, 0, ratio + sample / 4) for sample in range(8) for block, ratio in ratios.items()]
    found = judged((sim([0.1] * 31, direction_similarity=[0.1] * 31), {"sinks": rows, "samples": 8})).finding("sink")
    assert (found.numbers["born"], found.numbers["peak"]) == (12, 151.75)
    assert found.sentence == (
        "Token 0 (' the') is an outlier in 8 of 8 sequences: up to 152 × the median norm after block 12. It becomes "
        "large in block 12. The verdict leaves it out: similarity of directions is 0.100 after block 30 (with it "
        "0.100)."
    )


def test_a_block_at_which_few_sequences_have_the_outlier_is_not_one_of_its_blocks():
    rows = [(b, s, 0, 50.0) for s in range(8) for b in (4, 5, 6)] + [(2, 1, 0, 11.0)]
    assert Facts(made_up(sim(LEVEL), rows, samples=8)).sink.blocks == (4, 5, 6)


def test_one_sequence_of_eight_does_not_switch_what_is_judged():
    one = [(b, 5, 3, 40.0) for b in range(1, 9)]
    assert Facts(made_up(sim(LEVEL), one, samples=8)).judged == "token_similarity"
    most = [(b, s, s, 40.0) for b in range(1, 9) for s in range(5)]  # each at a place of its own
    assert Facts(made_up(sim(LEVEL), most, samples=8)).judged == "direction_similarity"


def test_the_rank_without_outliers_is_judged_where_it_was_measured():
    effective, ordinary = [20.0] * 8 + [1.1], [20.0] * 8 + [1.2]
    spoilt = judged((sim(LEVEL, effective_rank=effective), {"sinks": LASTING_SINK}))
    assert spoilt.verdict == "no collapse"  # it is the outlier's rank
    line = judged((sim(LEVEL, effective_rank=effective, ordinary_rank=ordinary), {"sinks": LASTING_SINK}))
    assert line.verdict == "rank collapse"


def test_the_rise_is_placed():
    found = judged((sim([0.103, 0.3, 0.52, 0.5, 0.55, 0.52, 0.61]), {})).finding("rise")
    assert found.sentence == "Blocks 1–2 make 82% of the rise: from 0.103 to 0.520."
    assert judged((sim([0.1, 0.11, 0.9, 0.9]), {})).finding("rise").sentence.startswith("Block 2 makes 99% of the rise")
    past = judged((sim([0.1, 0.9, 0.8, 0.7]), {})).finding("rise").sentence
    assert past == "Block 1 makes more than the whole rise: from 0.100 to 0.900."


def test_the_sentence_on_learning_names_the_blocks_that_cannot():
    said = judged((sim(LEVEL, **roles([0.1] * 5 + [0.009, 0.02, 0.001])), {})).finding("attention learns")
    assert said.sentence == (
        "Attention can learn in 6 of 8 blocks: there the gradient of its queries and keys is at least 1 % of that of "
        "values and output; not in blocks 6, 8."
    )
    zero = roles([0.1] * 8) | {"values_output_gradient": [NAN] + [0.0] * 8}  # frozen, or no loss: nothing to compare
    assert judged((sim(LEVEL, **zero), {})).finding("attention learns") is None


def test_a_verdict_comes_back_from_json_as_far_as_it_is_shown():
    found = judged((sim(COLLAPSE), {}))
    again = Diagnosis.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.render(full=True) == found.render(full=True)
    saved = found.to_dict()
    saved["recommendation"]["line"] = saved["recommendation"]["line"][:-1] + ", causal=False)"
    assert Diagnosis.from_dict(saved).recommendation.apply_options == {"causal": False}
    for other in ([], {"findings": 3}, {**found.to_dict(), "recommendation": []}, found.to_dict() | {"findings": [3]}):
        with pytest.raises(ValueError, match="expected a verdict"):
            Diagnosis.from_dict(other)


def test_what_takes_back_makes_no_share_larger_than_the_whole():
    """Attention brings the odds from .25 to 4, the FFN takes a part of it back: no share of the rise is above 100 %."""
    found = judged((trunk(after_attention=0.8, ffn_input=0.8, after_ffn=0.6, output=0.6), {})).finding("steps")
    assert found is not None
    assert "Attention is responsible for 100% of the rise" in found.sentence
    assert "the FFN takes" in found.sentence
    assert all(int(part) <= 100 for part in re.findall(r"(\d+)%", found.sentence))


def test_a_small_rise_is_not_taken_apart():
    """Tokens that are not alike in the end: where a rise lies and which step makes it is nothing to act on."""
    low = judged((trunk(after_attention=0.45, ffn_input=0.45, after_ffn=0.48, output=0.48), {}))
    assert low.verdict == "no collapse"
    assert low.finding("steps") is None
    assert low.finding("rise") is None
