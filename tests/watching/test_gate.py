"""The gate of a watch: it fires at the right look and block, and never where nothing collapses."""

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.watching import Alarm, DepthAlarm
from depthscope.watching import gate as gate_module
from depthscope.watching.gate import Gate, Look, decide, make_gate
from samples import seeded
from zoo import TOKENS, make

RULE = "token_similarity>0.99 for 3 after 0"


def encoder(depth: int = 4) -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(depth, BlockConfig(16, 4))


def collapse(model: Encoder, block: int) -> None:
    """From now on the output of this block is the same vector for every token."""
    with torch.no_grad():
        model.blocks[block - 1].norm2.weight.zero_()
        model.blocks[block - 1].norm2.bias.normal_(generator=seeded(0))


def planted(
    rules: Any,
    *,
    at: int | None = 6,
    block: int = 3,
    steps: int = 20,
    every: int = 2,
    back: int | None = None,
    **more: Any,
) -> tuple[list[int], list[Alarm]]:
    """A loop whose model collapses at step `at` in a block, and is well again at step `back`; it stops if asked to.

    Returns the steps that were made, and the alarms.
    """
    model, well, made = encoder(), encoder().state_dict(), []
    raised: list[Alarm] = []
    with depthscope.watch(model, every, **{"stop_if": rules, "on_alarm": raised.append} | more) as watch:
        for step in range(steps):
            if step == at:
                collapse(model, block)
            if step == back:
                model.load_state_dict(well)
            model(TOKENS)
            made.append(step)
            model.eval()(TOKENS)  # a look at test data in between counts for nothing
            model.train()
            if watch.should_stop:
                break
    assert raised == (watch.alarms if "on_alarm" not in more else [])
    return made, watch.alarms


def test_a_planted_collapse_fires_at_its_step_and_block():
    made, (alarm,) = planted("token_similarity>0.99 at block 3 for 3 after 0")
    assert made[-1] == 10  # watched: 6, 8, 10
    assert (alarm.since, alarm.step, alarm.good, alarm.block, alarm.stops) == (6, 10, 4, 3, True)
    assert alarm.value == pytest.approx(1)
    line = str(alarm)
    assert "\n" not in line
    for part in (
        "token_similarity>0.99 at block 3 for 3",
        "since step 6",
        "; step 10: 1 at block 3: ",
        "nearly equal",
    ):
        assert part in line
    assert "at step 4 it did not hold" in line


@pytest.mark.parametrize(
    ("rule", "last_step", "block"),
    [
        ("token_similarity>0.99 after 0", 6, 3),
        (RULE, 10, 3),  # half of the blocks: 3 and 4
        ("token_similarity>0.99 at the last block for 3 after 0", 10, 4),
        ("token_similarity>0.99 in any block for 2 after 0", 8, 3),
        ("token_similarity>0.99 in half of the blocks after 0", 6, 3),
        ("token_similarity>0.99 at block 2 after 0", None, None),
        ("token_similarity>0.99 in all blocks after 0", None, None),
        ("cosine_similarity<-1 after 0", None, None),
    ],
)
def test_rules_by_block(rule: str, last_step: int | None, block: int | None):
    made, alarms = planted(rule)
    assert made[-1] == (19 if last_step is None else last_step)
    assert [alarm.block for alarm in alarms] == ([] if block is None else [block])


def test_a_run_that_does_not_collapse_never_fires():
    made, alarms = planted([RULE, "cosine_similarity>0.99 after 0"], at=None)
    assert (len(made), alarms) == (20, [])


def test_a_count_begins_again_after_a_good_look():
    made, alarms = planted(RULE, back=10)  # it holds at 6 and 8
    assert (len(made), alarms) == (20, [])
    made, (alarm,) = planted(RULE, back=11)  # and at 10
    assert alarm.step == 10


def test_several_rules_are_a_list_and_any_is_enough():
    _, (alarm,) = planted(["token_similarity>1", "cosine_similarity>0.99 for 2 after 0"])
    assert (alarm.measure, alarm.step) == ("cosine_similarity", 8)


def test_a_warning_does_not_stop_and_comes_once_per_collapse():
    made, alarms = planted(None, warn_if="token_similarity>0.99 for 2 after 0", back=12)
    assert len(made) == 20
    assert [(alarm.stops, alarm.since, alarm.step) for alarm in alarms] == [(False, 6, 8)]
    with pytest.warns(
        DepthAlarm,
        match=r"^token_similarity>0.99 in half of the blocks for 2 after 0 holds since step 6; step 8: 1 at block 3, "
        "2 of 4 blocks above 0.99: ",
    ):
        planted(None, warn_if="token_similarity>0.99 for 2 after 0", on_alarm=None, steps=10)


# --- the count, against its definition ------------------------------------------------------------------


def fired_at(held: list[bool], looks: int) -> list[int]:
    """The definition: the first look of each stretch at which the rule has held that often in a row."""
    enough = [i >= looks - 1 and all(held[i - looks + 1 : i + 1]) for i in range(len(held))]
    return [i for i, one in enumerate(enough) if one and not (i > 0 and enough[i - 1])]


def counted(held: list[bool], looks: int) -> list[int]:
    gate = make_gate(f"token_similarity>0.5 for {looks} after 0", None, ["token_similarity"], ["output"])
    return [alarm.step for alarm in seen(gate, held)]


HELD = st.lists(st.booleans(), max_size=12)


@given(HELD, st.integers(1, 4))
def test_the_count_is_its_definition(held: list[bool], looks: int):
    assert counted(held, looks) == fired_at(held, looks)


def one_too_many(rule: Any, history: list[Look], **more: Any) -> Alarm | None:
    return decide(replace(rule, looks=rule.looks + 1), history, **more)


def never_forgets(rule: Any, history: list[Look], **more: Any) -> Alarm | None:
    return decide(replace(rule, looks=1), history, **more)


@pytest.mark.parametrize("mutant", [one_too_many, never_forgets])
def test_an_off_by_one_is_seen(mutant: Any, monkeypatch: pytest.MonkeyPatch):
    held = [True, False, True, True, True, True, False, True]
    assert counted(held, 2) == fired_at(held, 2) == [3]
    monkeypatch.setattr(gate_module, "decide", mutant)
    assert counted(held, 2) != [3]


@given(HELD, HELD, st.integers(1, 4))
def test_a_count_goes_on_from_its_state(before: list[bool], after: list[bool], looks: int):
    whole, first, second = (
        make_gate(f"token_similarity>0.5 for {looks} after 0", None, ["token_similarity"], ["output"]) for _ in range(3)
    )
    everything, split = seen(whole, before + after), len(before)
    seen(first, before)
    second.restore(first.state())
    rest = seen(second, after, split)
    # A rule that had fired says so once more: nobody has heeded it.
    heard = {alarm.since for alarm in everything if alarm.step < split}
    assert all(alarm.step == split for alarm in rest if alarm.since in heard)
    assert [alarm for alarm in rest if alarm.since not in heard] == [a for a in everything if a.step >= split]
    assert (second.state(), second.goods) == (whole.state(), whole.goods)


def seen(gate: Gate, held: list[bool], first: int = 0) -> list[Alarm]:
    looks = [{"output": {"token_similarity": {1: float(one)}}} for one in held]
    return [alarm for step, means in enumerate(looks, start=first) for alarm in gate.see(step, means, [1])]


# --- hard cases -----------------------------------------------------------------------------------------


def test_undefined_counts_as_holding():
    model, raised = encoder(), []
    with depthscope.watch(model, 1, stop_if="token_similarity>0.99 for 2 after 0", on_alarm=raised.append) as watch:
        for step in range(3):
            model(TOKENS * (math.nan if step else 1))
        assert watch.should_stop
    (alarm,) = raised
    assert (alarm.since, alarm.step) == (1, 2)
    assert "undefined (nan) at block 1, 4 of 4 blocks above 0.99: it has no value there" in str(alarm)


def test_half_precision_and_several_passes_per_step():
    model, raised = encoder(), []
    with depthscope.watch(model, 1, stop_if=RULE, on_alarm=raised.append) as watch:
        for step in range(6):
            watch.step()
            if step == 2:
                collapse(model, 3)
            for _ in range(2):  # accumulated: one look per step
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    model(TOKENS).square().mean().backward()
            if watch.should_stop:
                break
    assert [(alarm.since, alarm.step) for alarm in raised] == [(2, 4)]


def test_every_part_of_a_model_has_a_last_block():
    model, inputs = make("t5")
    model.train()
    with depthscope.watch(
        model, 1, stop_if="token_similarity>-9 at the last block after 0", on_alarm=lambda _: None
    ) as watch:
        model(**inputs)
    depth = watch.records["block"].max()
    assert watch.alarms[0].block == depth // 2  # the encoder's last, the first of the two that hold


def test_stations_and_branches_can_be_asked():
    options = {"measures": ["token_similarity", "branch_ratio"], "stations": "trunk", "on_alarm": lambda _: None}
    rules = [
        "token_similarity>-9 at the last block at ffn_input after 0",
        "branch_ratio>0 at ffn_branch at block 2 after 0",
    ]
    model = encoder()
    with depthscope.watch(model, 1, warn_if=rules, **options) as watch:
        model(TOKENS)
    rows = watch.records.set_index(["station", "measure", "block"])["value"]
    assert [alarm.value for alarm in watch.alarms] == [
        rows["ffn_input", "token_similarity", 4],
        rows["ffn_branch", "branch_ratio", 2],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_if": "effective_rank<2"}, r"'effective_rank', which is not measured: choose it with measures="),
        ({"warn_if": "token_similarity>x"}, r"^expected warn_if= .* got 'token_similarity>x'"),
        ({"stop_if": "token_similarity>1 at ffn_input"}, "which is not watched: add it to stations="),
        ({"stop_if": "token_similarity>1", "stations": ["input", "ffn_input"]}, "say at which station"),
        ({"stop_if": "branch_ratio>1", "measures": "branch_ratio"}, "say at which branch"),
        ({"stop_if": 5}, "or a list of rules, got 5"),
        ({"stop_if": ["token_similarity>1", 5]}, "or a list of rules, got"),
        ({"on_alarm": "print"}, "expected on_alarm= to be a function"),
    ],
)
def test_a_rule_that_could_not_be_decided_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        depthscope.watch(encoder(), **options)


def test_a_block_that_is_not_there_ends_the_watch_at_the_first_look():
    model = encoder()
    with (
        pytest.warns(UserWarning, match="its rules are asked no more.* asks for block 9, and the last one is 4"),
        depthscope.watch(model, stop_if="token_similarity>1 at block 9"),
    ):
        model(TOKENS)
    assert not model._forward_hooks


def test_training_is_bitwise_the_same_with_a_gate():
    def weights(**rules: Any) -> list[torch.Tensor]:
        model = encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with depthscope.watch(model, 1, **rules):
            for _ in range(3):
                nn.functional.mse_loss(model(TOKENS), TOKENS).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DepthAlarm)
        found = weights(stop_if="token_similarity>-9 after 0", warn_if=RULE)
    assert all(torch.equal(a, b) for a, b in zip(found, weights(), strict=True))


def test_trackers_get_a_handful_of_numbers_however_deep():
    for depth in (2, 12):
        model = encoder(depth)
        with depthscope.watch(model, warn_if=RULE) as watch:
            model(TOKENS)
        assert len(watch.scalars()) == 6
