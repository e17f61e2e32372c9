"""The gate on recorded trainings, of which what became of them is known (scripts/gate_trainings.py), and on new ones.

At .99, with the loss known, the last block and half of the blocks decide alike on all recorded trainings, since a gate
waits for 200 steps and while the loss falls. What separates the two is a loss that is not known.
"""

import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.watching import Alarm
from depthscope.watching.gate import make_gate
from samples import seeded

RUNS = json.loads((Path(__file__).parent / "gate_trainings.json").read_text())
RULE = "token_similarity>0.99 for 3"  # the documentation's own
LAST = "token_similarity>0.99 at the last block for 3"
EVERY = 10

COLLAPSED = {name for name, run in RUNS.items() if run["truth"] == "collapsed"}
TOO_SHORT = "minilm-finetuned-hot"  # 200 steps, and its tokens stay at .91
TOO_FAST = "pre-6-far-too-fast"  # it learns, to a loss of 1.59 where others come to 0.04


def alarms(name: str, rule: str, *, knows_loss: bool = True) -> list[Alarm]:
    """The alarms of a gate along a recorded training. Its tokens stand for those that were: as many blocks above."""
    run, gate, found = RUNS[name], make_gate(rule, None, ["token_similarity"], ["output"]), []
    depth = run["blocks"]
    looks = zip(run["above 0.99"], run["above 0.9"], run["last"], strict=True)
    for look, (nearly, alike, last) in enumerate(looks):
        if knows_loss and look > 0:
            for _ in range(EVERY):
                gate.losses.tell(run["losses"][look - 1] / 100)
        before = [0.999] * (nearly - (last == 2)) + [0.95] * (alike - nearly - (last == 1))
        curve = [*before, *[0.5] * (depth - 1 - len(before)), (0.5, 0.95, 0.999)[last]]
        assert len(curve) == depth
        found += gate.see(look * EVERY, {"output": {"token_similarity": dict(enumerate(curve, 1))}}, [depth])
    return found


def stopped(rule: str, *, knows_loss: bool = True) -> set[str]:
    return {name for name in RUNS if alarms(name, rule, knows_loss=knows_loss)}


def test_the_recorded_trainings():
    truths = [run["truth"] for run in RUNS.values()]
    assert (len(RUNS), truths.count("collapsed"), truths.count("stuck")) == (33, 8, 2)


@pytest.mark.parametrize("knows_loss", [True, False])
def test_the_documentation_s_rule_stops_what_has_collapsed_and_nothing_that_learns(knows_loss: bool):
    assert stopped(RULE, knows_loss=knows_loss) == COLLAPSED - {TOO_SHORT} | {TOO_FAST}
    late = [alarms(name, RULE, knows_loss=knows_loss)[0].step for name in COLLAPSED - {TOO_SHORT}]
    assert min(late) == 200
    assert max(late) <= 270


def test_at_a_lower_number_the_last_block_is_a_wrong_alarm_where_half_of_the_blocks_is_none():
    stuck = {name for name, run in RUNS.items() if run["truth"] == "stuck"}
    half = stopped("token_similarity>0.9 for 3", knows_loss=False)
    assert half - stuck == COLLAPSED - {TOO_SHORT} | {TOO_FAST}
    last = stopped("token_similarity>0.9 at the last block for 3", knows_loss=False)
    assert last - half - stuck == {"gpt2-6-slow", "post-18-slow", "post-6-pooled", "pre-6-pooled"}  # all of them learn


def test_a_short_fine_tuning_names_its_own_step():
    (alarm,) = alarms(TOO_SHORT, "token_similarity>0.9 for 3 after 100")
    assert 100 <= alarm.step <= 150
    assert "4 of 6 blocks above 0.9: at 1 the tokens of a sequence are equal;" in str(alarm)


def test_without_the_grace_period_what_learns_would_be_stopped():
    """A mutant of the rule: tokens are alike in nearly all blocks of a Llama that begins to learn."""
    wrong = stopped(f"{RULE} after 0", knows_loss=False) - stopped(RULE, knows_loss=False)
    assert {"llama-6-small-batch", "llama-6-small-batch-wide"} <= wrong


# --- new trainings ----------------------------------------------------------------------------------------


def watched(model: nn.Module, rate: float, steps: int, loss_of: Any, **rules: Any) -> depthscope.watching.Watch:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with depthscope.watch(model.train(), EVERY, on_alarm=lambda _: None, **rules) as watch:
        for step in range(steps):
            loss = loss_of(step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.tell(loss=loss)
            if watch.should_stop:
                break
    return watch


def test_a_new_llama_whose_tokens_are_alike_as_it_begins_is_not_stopped():
    transformers = pytest.importorskip("transformers")
    text = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    known = {letter: number for number, letter in enumerate(sorted(set(text)))}
    stream = torch.tensor([known[letter] for letter in text])
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 6}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(known), **sizes))
    generator = seeded(0)

    def loss_of(_step: int) -> torch.Tensor:
        at = torch.randint(len(stream) - 33, (8,), generator=generator)
        pieces = torch.stack([stream[i : i + 33] for i in at.tolist()])
        return nn.functional.cross_entropy(model(pieces[:, :-1]).logits.flatten(0, 1), pieces[:, 1:].flatten())

    watch = watched(model, 3e-3, 110, loss_of, stop_if=RULE, warn_if=[f"{RULE} after 0", f"{LAST} after 0"])
    rows = watch.records.query("block > 0 and measure == 'token_similarity'")
    assert rows[rows["value"] > 0.99].groupby("step").size().nlargest(3).min() >= 4  # of 6, at three looks
    assert rows[rows["step"] == 100]["value"].max() < 0.9
    assert not watch.should_stop
    assert {alarm.stops for alarm in watch.alarms} == {False}  # without the grace period it would have been


def test_a_deep_post_norm_model_that_learns_nothing_is_stopped():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), Encoder(24, BlockConfig(16, 4)), nn.Linear(16, 10))
    x, labels, generator = torch.randn(256, 8, 4, generator=seeded(1)), torch.arange(256) % 10, seeded(2)

    def loss_of(_step: int) -> torch.Tensor:
        chosen = torch.randint(256, (16,), generator=generator)
        return nn.functional.cross_entropy(model(x[chosen]).mean(1), labels[chosen])

    watch = watched(model, 1e-2, 400, loss_of, stop_if=RULE)
    (alarm,) = watch.alarms
    assert 200 <= alarm.step < 400
    assert "of 24 blocks above 0.99: the tokens of a sequence are nearly equal" in str(alarm)
    assert "; the loss has not fallen: " in str(alarm)
