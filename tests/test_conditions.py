"""The language of gates: one parser for `--fail-on`, `stop_if=` and `--stop-if`."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthscope import stations
from depthscope.conditions import Condition, find, parse_condition, station_of


def parse(text: str, **options) -> Condition:
    return parse_condition(text, ("token_similarity", "effective_rank"), "stop_if=", **{"in_a_row": True} | options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("token_similarity>0.99", Condition("token_similarity", ">", 0.99, "half")),
        (" token_similarity >= 0.99  for 3 ", Condition("token_similarity", ">=", 0.99, "half", looks=3)),
        ("token_similarity>0.99 after 500 for 3", Condition("token_similarity", ">", 0.99, "half", looks=3, after=500)),
        ("token_similarity>.9  at the last  block for 2", Condition("token_similarity", ">", 0.9, looks=2)),
        ("effective_rank<2 at block 12", Condition("effective_rank", "<", 2, 12)),
        ("effective_rank<=2 in  half of the blocks for 2", Condition("effective_rank", "<=", 2, "half", looks=2)),
        ("token_similarity>.9 for 2 in any block", Condition("token_similarity", ">", 0.9, "any", looks=2)),
        ("token_similarity>.9 at after_ffn in all blocks", Condition("token_similarity", ">", 0.9, "all", "after_ffn")),
        ("token_similarity>.9 at block 3 at ffn_input", Condition("token_similarity", ">", 0.9, 3, "ffn_input")),
    ],
)
def test_what_can_be_said(text: str, expected: Condition):
    assert parse(text) == expected


def test_without_a_place_a_profile_is_asked_at_its_last_block_and_a_training_in_half_of_its_blocks():
    assert parse("token_similarity>0.9", in_a_row=False).blocks == "last"
    assert parse("token_similarity>0.9").blocks == "half"


CLAUSES = ["for", "for x", "for 3 for 3", "for 3.5", "at block", "at block x", "in 3 blocks", "and delta>1", "nonsense"]
CLAUSES += ["after", "after x", "after 3 after 3"]
WRONG = [f"token_similarity{rest}" for rest in ("", ">", ">x", ">1>2", "=1", ">1 at block 3 in any block")]
WRONG += ["", *(f"token_similarity>1 {clause}" for clause in CLAUSES)]


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_said_is_refused_and_repeated(text: str):
    with pytest.raises(ValueError, match=r'^expected stop_if= "MEASURE>NUMBER"') as refused:
        parse(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("token_similarty>1", {}, "did you mean 'token_similarity'"),
        ("token_similarity>1 at ffn_inptu", {}, "did you mean 'ffn_input'"),
        ("token_similarity>1 for 0", {}, "1 or more looks in a row"),
        ("token_similarity>1 for 3", {"in_a_row": False}, "there is one look only"),
        ("token_similarity>1 after 3", {"in_a_row": False}, "there is one look only"),
    ],
)
def test_a_mistake_is_named(text: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        parse(text, **options)


@given(
    st.builds(
        Condition,
        st.just("effective_rank"),
        st.sampled_from([">", "<", ">=", "<="]),
        st.sampled_from([-1e-3, 0.0, 0.99, 1e9, 0.1 + 0.2]),
        st.sampled_from(["last", "any", "half", "all", 0, 7]),
        st.sampled_from([None, *stations.ALL]),
        st.integers(1, 9),
        st.sampled_from([None, 0, 500]),
    )
)
def test_what_is_written_is_read_again(condition: Condition):
    written = parse(str(condition))
    assert written == Condition(**{**vars(condition), "threshold": pytest.approx(condition.threshold, rel=1e-14)})


VALUES = {0: 1.0, 1: 0.2, 2: 0.95, 3: 0.4, 4: 0.96}


@pytest.mark.parametrize(
    ("where", "block"),
    [
        ("", 2),
        ("at the last block", 4),
        ("at block 0", 0),
        ("at block 1", None),
        ("in any block", 2),
        ("in half of the blocks", 2),
        ("in all blocks", None),
    ],
)
def test_where_it_is_asked(where: str, block: int | None):
    found = find(parse(f"token_similarity>0.9 {where}"), VALUES, [4])
    assert (found and found.block) == block


def test_half_is_half_and_not_less():
    rule = parse("token_similarity>0.9 in half of the blocks")
    assert find(rule, {0: 1, 1: 1, 2: 0}, [2]) is not None
    assert find(rule, {0: 1, 1: 1, 2: 0, 3: 0}, [3]) is None  # 1 of 3; what enters block 1 does not count
    assert find(rule, {0: 0, 1: 1, 2: 1, 3: 0}, [3]) is not None


def test_each_part_has_a_last_block():
    rule = parse("token_similarity>0.9", in_a_row=False)
    assert find(rule, VALUES, [2, 3]) == find(rule, VALUES, [2])
    assert find(rule, VALUES, [1, 3]) is None


def test_nothing_to_compare_holds():
    for rule in (parse("token_similarity>0.9 at the last block"), parse("token_similarity<0.9 in all blocks")):
        found = find(rule, {1: 0.0, 2: math.nan}, [2])
        assert found is not None
        assert found.block == (2 if rule.blocks == "last" else 1)
    assert find(parse("token_similarity>0.9 in any block"), {0: 0.0}, [0]) is not None
    with pytest.raises(ValueError, match="asks for block 9, and the last one is 4"):
        find(parse("token_similarity>0.9 at block 9"), VALUES, [4])


def test_the_station():
    rule = parse("token_similarity>0.9")
    assert station_of(rule, ["input", "output"]) == "output"
    assert station_of(rule, ["after_ffn", "output"], ("after_ffn", "output")) == "after_ffn"
    assert station_of(rule, ["ffn_input"]) == "ffn_input"
    for there, message in ((["input", "ffn_input"], "it stands at input, ffn_input"), ([], "it was not seen")):
        with pytest.raises(ValueError, match=message):
            station_of(rule, there)
    with pytest.raises(ValueError, match="a value at after_ffn"):
        station_of(parse("token_similarity>0.9 at after_ffn"), ["output"])


def test_a_short_name_is_understood_and_what_can_never_hold_is_refused():
    assert (
        str(parse_condition("t_sim>0.9", ["token_similarity"], "--fail-on")) == "token_similarity>0.9 at the last block"
    )
    for rule in ("token_similarity>2", "cosine_similarity<-2"):
        with pytest.raises(ValueError, match="a number that"):
            parse_condition(rule, None, "--fail-on")


def test_a_comparison_is_met_at_its_own_number_only_with_an_equals_sign():
    for comparison, holds in ((">", False), ("<", False), (">=", True), ("<=", True)):
        assert Condition("delta", comparison, 0.5).holds(0.5) is holds
