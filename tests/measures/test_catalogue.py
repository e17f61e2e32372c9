"""Every measure is one record, and can read only what its record says that it needs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from depthscope import measures as m
from depthscope.measures import MEASURES, Measure, MissingNeed, choose_measures, list_measures, only_at_outputs
from depthscope.models import BlockConfig, Encoder
from depthscope.probing import probe
from samples import seeded


@pytest.fixture
def register() -> Iterator:
    """Adds measures for one test."""
    added = []

    def add(measure: Measure) -> Measure:
        added.append(MEASURES.register(measure).name)
        return measure

    yield add
    for name in added:
        MEASURES.unregister(name)


def model_and_tokens() -> tuple[Encoder, torch.Tensor]:
    x = torch.randn(3, 8, 16, generator=seeded(1))
    x[:, 2] *= 3  # directions and raw tokens differ
    return Encoder(2, BlockConfig(16, 4), generator=seeded(0)), x


def test_a_new_measure_of_directions_is_one_of_directions(register):
    register(Measure("mine", "station", lambda s: m.token_similarity(s.directions), frozenset({"directions"})))
    model, x = (part.double() for part in model_and_tokens())  # in float32 sums in another order differ by 1e-8
    alone = probe(model, x, measures=["mine"])
    beside = probe(model, x, measures=["token_similarity", "mine"])
    expected = m.token_similarity(m.TokenMatrix(x).directions.norms).mean().item()
    assert alone.curve("mine")[0] == pytest.approx(expected, rel=1e-12)
    assert beside.curve("mine") == alone.curve("mine")
    assert alone.curve("mine")[0] != pytest.approx(m.token_similarity(x).mean().item(), rel=1e-3)


def test_what_is_not_declared_cannot_be_read_even_if_another_measure_needs_it(register):
    register(Measure("greedy", "station", lambda s: m.token_similarity(s.directions), frozenset({"norms"})))
    model, x = model_and_tokens()
    with pytest.raises(MissingNeed, match="'directions' was not computed: add it to the measure's needs"):
        probe(model, x, measures=["greedy", "cosine_similarity"])


def test_a_head_gives_only_what_is_declared(register):
    register(Measure("mine", "attention", lambda h: h.matrix.double().diagonal(dim1=-2, dim2=-1).mean(-1),
                     frozenset({"matrix"})))  # fmt: skip
    register(Measure("greedy", "attention", lambda h: h.tokens.norm, frozenset({"matrix"})))
    model, x = model_and_tokens()
    found = probe(model, x, measures=["mine"])
    assert all(0 < value < 1 for value in found.curve("mine", "attention")[1:])
    with pytest.raises(MissingNeed, match="'tokens'"):
        probe(model, x, measures=["greedy", "omega"])


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (Measure("token_similarity", "tokens", m.effective_rank), "the measure 'token_similarity' exists twice"),
        (Measure("x", "station", m.token_similarity, frozenset({"spectrum"})), "needs spectrum"),
        (Measure("x", "station", m.token_similarity), "must name its needs"),
        (Measure("all", "tokens", m.effective_rank), "the name of a group"),
        ("effective_rank", "expected a Measure"),
        (Measure("x", "stationn", m.effective_rank), "is of 'stationn': expected one of station, tokens"),
        (Measure("x", "station", m.effective_rank, {"norms"}), "its needs as a frozenset"),
        (Measure("x", "tokens", m.effective_rank, groups=("al",)), "unknown groups: al"),
        (Measure("a,b", "tokens", m.effective_rank), "small letters, digits and _"),
        (Measure("", "tokens", m.effective_rank), "small letters, digits and _"),
        (Measure("output_gradient", "tokens", m.effective_rank), "that is free, got 'output_gradient'"),
    ],
)
def test_a_record_that_cannot_be_right_is_refused(measure: Measure, message: str):
    before = list(MEASURES)
    with pytest.raises(ValueError, match=message):
        MEASURES.register(measure)
    assert list(MEASURES) == before


@pytest.mark.parametrize(
    ("of", "compute", "expected"),
    [
        ("tokens", lambda x: torch.ones(3, 2), r"must return shape \(3,\) here, got \(3, 2\)"),
        ("tokens", lambda x: torch.ones(()), r"shape \(3,\) here, got \(\)"),
        ("batch", lambda x: torch.ones(3), r"shape \(\) here, got \(3,\)"),
        ("step", lambda before, after: torch.ones(2), r"shape \(2, 3\) here, got \(2,\)"),
    ],
)
def test_a_result_of_the_wrong_shape_is_refused(register, of: str, compute, expected: str):
    register(Measure("odd", of, compute))
    with pytest.raises(ValueError, match=f"the measure 'odd' {expected}" if "must" in expected else expected):
        probe(*model_and_tokens(), measures="odd", stations="output")


def test_what_one_head_measure_computed_from_more_is_not_read_by_another(register):
    def with_tokens(head):
        return head.tokens.norm

    register(Measure("first", "attention", lambda h: h.once(with_tokens), frozenset({"matrix", "tokens"})))
    register(Measure("greedy", "attention", lambda h: h.once(with_tokens), frozenset({"matrix"})))
    with pytest.raises(MissingNeed, match="'tokens'"):
        probe(*model_and_tokens(), measures=["first", "greedy"])


def test_groups_contain_each_other():
    names = [set(list_measures(name)) for name in ("light", "spectral", "all")]
    assert names[0] < names[1] < names[2] == set(MEASURES)
    assert names[0] < set(list_measures("verdict")) < names[2]
    assert only_at_outputs("verdict") == set(list_measures("verdict")) - names[0]
    assert only_at_outputs("light") == frozenset()
    assert choose_measures(["light", "delta", "token_similarity"]) == (*list_measures("light"), "delta")


def test_every_record_computes_what_the_function_of_its_name_does():
    """The catalogue against the public functions, on one token matrix."""
    _, x = model_and_tokens()
    tokens = m.TokenMatrix(x)
    for name in ("effective_rank", "stable_rank", "composite_residual"):
        assert torch.equal(MEASURES[name].compute(tokens), getattr(m, name)(x))
    for name in ("token_similarity", "token_diversity", "frobenius_norm", "frequency_ratio"):
        kept = m.Summary({part: m.PARTS[part](tokens, tokens) for part in m.PARTS}).only(MEASURES[name].needs)
        assert torch.equal(MEASURES[name].compute(kept), getattr(m, name)(x))
    split = m.energy_split(x)
    assert all(torch.equal(MEASURES[f"energy_{part}"].compute(tokens), split._asdict()[part]) for part in split._fields)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'token_similarity'"):
        choose_measures("token_similarty")
    with pytest.raises(ValueError, match="at least one measure"):
        choose_measures([])


def test_a_record_is_a_value():
    assert replace(MEASURES["delta"]) == MEASURES["delta"]
