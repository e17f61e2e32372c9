"""The task of a language model: rows, memory, variants, evaluation with and without the future."""

import math
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from depthscope.hooks.staying import TokenHook, hang
from depthscope.memory import count_parameters
from depthscope.models.token_means import Ema, Full, Prefix
from depthscope.remedies import Remedy, applied, deescalate
from depthscope.remedies.remedy import REMEDIES
from depthscope.report import read_metrics
from depthscope_lab.models import CarriedMean, TransformerXL
from depthscope_lab.training.estimate import estimate
from depthscope_lab.training.language import reading_of
from depthscope_lab.training.loading import make_task
from depthscope_lab.training.perplexity import evaluate, evaluate_without_future
from depthscope_lab.training.recipes import txl_manual, txl_wikitext103
from depthscope_lab.training.task import Share
from processes import ENVIRONMENT, TORCHRUN
from samples import seeded
from tiny_language import small, task_of
from tiny_training import Recorder, assert_bitwise_equal, run_in, saved

CPU = torch.device("cpu")
ALL = Share(0, 1)

NAMED = ("post", "pre", "pre-final-norm", "deescalated", "deescalated-leaking")


class Crash(Exception):
    pass


def crash_at(step: int) -> Recorder:
    """Ends a run as abruptly as an exception can."""

    def end(now: int) -> None:
        if now == step:
            raise Crash

    return Recorder(end)


@pytest.mark.parametrize("variant", NAMED)
def test_txl_wikitext103_is_the_papers(variant: str):
    config = txl_wikitext103(variant)
    assert (config.depth, config.width, config.ffn_width, config.heads) == (60, 410, 820, 10)
    assert (config.batch_size, config.segment, config.memory, config.steps) == (40, 150, 150, 50_000)
    assert (config.dropout, config.clip_norm, config.warmup_steps, config.weight_decay) == (0, None, 0, 0)
    assert (config.lr, config.schedule, config.init_std) == (2.5e-4, "cosine", 0.02)
    assert (config.eval_segment, config.eval_memory, config.eval_clamp, config.eval_rows) == (64, 640, 400, 10)
    task = make_task(config, empty=True)
    with torch.device("meta"):
        parameters = count_parameters(task.build())
    assert parameters == 200_987_338 + (820 if variant == "pre-final-norm" else 0)
    assert task.steps_per_epoch == math.ceil((103_227_021 // 40 - 1) / 150)


def test_the_estimate_counts_the_memory():
    with_memory, without = (estimate(txl_manual("post").changed(memory=memory)) for memory in (32, 0))
    # Keys and values of the memory at least: 2 · 60 blocks · 8 rows · 32 tokens · 64 · 4 bytes
    assert with_memory.activations - without.activations > 2 * 60 * 8 * 32 * 64 * 4
    assert with_memory.parameters == without.parameters


def test_a_variant_is_the_model_it_names():
    built = {variant: task_of(small(variant)).build().config for variant in NAMED}
    assert [built[name].placement for name in NAMED] == ["post", "pre", "pre", "post", "post"]
    assert [built[name].final_norm for name in NAMED] == [False, False, True, False, False]
    assert built["deescalated"].carried_mean == CarriedMean(1.0, Prefix())
    assert built["deescalated-leaking"].carried_mean == CarriedMean(1.0, Full())
    assert all(built[name].carried_mean is None for name in ("post", "pre", "pre-final-norm"))
    composed = {
        "deescalated(tau=0.5)": CarriedMean(0.5, Prefix()),
        "deescalated(mixing=Ema(decay=0.9, shrink=2.0))": CarriedMean(1.0, Ema(0.9, shrink=2.0)),
        "deescalated-leaking(tau=0.5)": CarriedMean(0.5, Full()),
        "post+de-escalation(tau=0.25)": CarriedMean(0.25, Prefix()),
    }
    for variant, carried in composed.items():
        assert task_of(small(variant)).build().config.carried_mean == carried
    wide = task_of(small("post", init_std=0.5)).build()
    assert wide.blocks[0].ffn[0].weight.std().item() == pytest.approx(0.5, rel=0.15)  # 384 numbers
    assert wide.blocks[0].norm1.weight.std() < 0.05


def test_rows_are_read_on_and_every_share_has_its_own():
    task = task_of(small())
    assert task.steps_per_epoch == 6
    stream = torch.from_numpy(task.data.train.reshape(4, 29)).long()
    for step, (start, end) in {0: (0, 5), 1: (5, 10), 5: (25, 28), 6: (0, 5)}.items():
        whole = task.batch(step, ALL, CPU)
        assert torch.equal(whole.ids, stream[:, start:end])
        assert torch.equal(whole.targets, stream[:, start + 1 : end + 1])
        assert whole.begins == (start == 0)
        halves = [task.batch(step, Share(index, 2), CPU).ids for index in (0, 1)]
        assert torch.equal(torch.cat(halves), whole.ids)


@pytest.mark.parametrize("variant", ["post", "deescalated"])
def test_the_memory_is_used_and_forgotten_where_the_text_begins_again(variant: str):
    task = task_of(small(variant))
    model = task.build()
    _, carry = task.loss(model, task.batch(0, ALL, CPU), None)
    losses = {
        (step, remembered): task.loss(model, task.batch(step, ALL, CPU), carry if remembered else None)[0].item()
        for step in (1, 6)
        for remembered in (True, False)
    }
    assert losses[1, True] != losses[1, False]
    assert losses[6, True] == losses[6, False]


@pytest.mark.parametrize("variant", ["post", "deescalated", "deescalated-leaking"])
def test_a_run_is_continued_bit_by_bit_with_its_memory(tmp_path: Path, variant: str):
    """Stopped within an epoch, so that what is remembered matters; the epoch ends after it."""
    config = small(variant, dropout=0.1)
    _, losses = run_in(tmp_path / "whole", config, task=task_of(config))
    display = crash_at(5)
    with pytest.raises(Crash):
        run_in(tmp_path / "parts", config, task=task_of(config), display=display, checkpoint_every=4)
    kept = saved(tmp_path / "parts")["carry"]
    assert set(kept) == {f"0.{name}" for name in ("hidden", *(("total", "weight") if variant == "deescalated" else ()))}
    assert kept["0.hidden"].shape == (2, 4, 4, 16)
    _, rest = run_in(tmp_path / "parts", config, task=task_of(config), resume=True)
    assert display.losses[:4] + rest == losses
    assert_bitwise_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


def test_in_parts_and_checkpointed_it_learns_the_same(tmp_path: Path):
    config = small(precision="float64")
    _, losses = run_in(tmp_path / "plain", config, task=task_of(config))
    for name, changes in {"a": {"accumulate": 2}, "b": {"checkpoint_activations": True}}.items():
        changed = config.changed(**changes)
        _, others = run_in(tmp_path / name, changed, task=task_of(changed))
        assert others == pytest.approx(losses, rel=1e-9)  # float64, sums in another order, 9 large steps


@pytest.mark.parametrize("variant", ["pre", "deescalated-leaking"])
def test_evaluation_is_that_of_perplexity_and_shares_add_up(variant: str):
    config = small(variant)
    task = task_of(config)
    model = task.build()
    assert isinstance(model, TransformerXL)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5, generator=seeded(parameter.numel()))
    whole = task.evaluate(model, ALL, CPU)
    parts = [task.evaluate(model, Share(index, 5), CPU) for index in range(5)]  # more processes than rows
    assert {name: sum(part[name] for part in parts) for name in whole} == pytest.approx(whole)
    shown = task.report({name: value / whole["count"] for name, value in whole.items() if name != "count"})
    reading = reading_of(config)
    assert shown["valid_loss"] == pytest.approx(evaluate(model, task.data.valid, reading).loss)
    assert shown["valid_perplexity"] == pytest.approx(math.exp(shown["valid_loss"]))
    if variant == "pre":
        assert len(shown) == 2
        return
    hidden = evaluate_without_future(model, task.data.valid, replace(reading, segments=2)).loss
    assert shown["valid_loss_future_hidden"] == pytest.approx(hidden)
    assert shown["valid_perplexity_future_hidden"] == pytest.approx(math.exp(hidden))


def test_two_processes_give_the_losses_of_one(tmp_path: Path):
    """Each remembers its own rows; 9 steps go over the end of the text."""
    code = (
        "import sys, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "from tiny_language import small, task_of; from tiny_training import run_in\n"
        "config = small(precision='float64')\n"
        "run_in(Path(sys.argv[1]), config, task=task_of(config))"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    result = subprocess.run(
        [*TORCHRUN, str(script), str(tmp_path / "two")],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    config = small(precision="float64")
    _, losses = run_in(tmp_path / "one", config, task=task_of(config), display=Recorder())
    rows = read_metrics(tmp_path / "two" / "metrics.jsonl")
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses, rel=1e-9)
    assert saved(tmp_path / "two")["carry"].keys() == {
        f"{share}.{name}" for share in (0, 1) for name in ("hidden", "total", "weight")
    }
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl")[-1]["valid_loss"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment": 0}, "expected segment greater than 0"),
        ({"memory": -1}, "expected memory of at least 0"),
        ({"dropout": 1.0}, "expected dropout from 0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("deescalated(mixing=full)", "give allow_leak=true if that is meant"),
        ("deescalated(mixing=Ema(decay=1.0))", "expected a decay between 0 and 1"),
        ("deescalated(at=output)", "carries it at the ffn_input"),
        ("deescalated(blocks=[1])", "carries it at the ffn_input"),
        ("deescalated+de-escalation(tau=0.5)", "at most one mean of tokens"),
        ("deescalated(tau=2)", "expected tau in \\[0, 1\\], got 2"),
        ("pre+de-escalation", "expected post-norm with a carried mean"),
        ("post@xavier", "draws its weights by init_std"),
    ],
)
def test_a_variant_that_cannot_be_built_is_refused(variant: str, message: str):
    with pytest.raises(ValueError, match=message):
        task_of(small(variant)).build()


def test_other_remedies_are_put_in_by_apply():
    model = task_of(small("deescalated+residual-weight(alpha=0.5)")).build()
    assert {found.remedy.name for found in applied(model)} == {"residual-weight"}
    assert model.config.carried_mean == CarriedMean()


@dataclass(frozen=True)
class Centre(Remedy):
    """Another package's remedy: subtracts a mean of the tokens, of the segment or of those up to a token's own."""

    full: bool = True
    every: int = 1
    allow_leak: bool = False

    name = "centre"

    def stations_in(self, block) -> tuple[str, ...]:
        return ("output",)

    def install(self, site) -> None:
        hang(site.block.module, CentreHook(self, site.block.name), "out")

    def mixing_in(self, site):
        return "full" if self.full else "causal"


class CentreHook(TokenHook):
    side, station = "out", "output"

    def __init__(self, remedy: Centre, block: str):
        self.remedy, self.block = remedy, block

    def change(self, tokens: torch.Tensor) -> torch.Tensor:
        return deescalate(tokens, 0.5, mixing="full" if self.remedy.full else "prefix")


@pytest.fixture
def centre():
    REMEDIES.register(Centre)
    yield
    REMEDIES.unregister("centre")


@pytest.mark.parametrize("variant", ["post+centre(allow_leak=true)", "post+centre(allow_leak=true, every=2)"])
def test_whatever_lets_the_model_see_the_future_is_also_read_with_it_hidden(variant: str, centre):
    task = task_of(small(variant))
    model = task.build()
    sums = task.evaluate(model, ALL, CPU)
    hidden = evaluate_without_future(model, task.data.valid, replace(reading_of(task.config), segments=2))
    assert sums["hidden_loss"] / sums["hidden_count"] == pytest.approx(hidden.loss)
    assert "valid_loss_future_hidden" in task.report({name: value / sums["count"] for name, value in sums.items()})
    unhidden = task_of(small(variant, hidden_segments=0))
    assert "hidden_loss" not in unhidden.evaluate(unhidden.build(), ALL, CPU)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("post+centre", "centre with full mixing in a model that is causal"),
        ("pre+centre(full=false)", "centre mixes tokens with earlier ones, of which the model carries none"),
        ("deescalated+centre(full=false, every=2)", "centre mixes tokens with earlier ones"),
    ],
)
def test_a_remedy_that_leaks_unasked_or_would_begin_anew_with_every_segment_is_refused(variant, message, centre):
    with pytest.raises(ValueError, match=message) as refused:
        task_of(small(variant)).build()
    assert "\n" not in str(refused.value)


def test_the_manual_takes_no_folder():
    with pytest.raises(ValueError, match="txl-wikitext103 --data somewhere"):
        make_task(txl_manual("post"), "somewhere")
