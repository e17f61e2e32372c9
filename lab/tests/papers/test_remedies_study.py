"""The study `remedies`: the quick form trains and draws, every verdict can fail, every variant can be built."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from depthscope.report.formats import COLUMNS
from depthscope_lab.papers import load
from depthscope_lab.papers.deep.remedies import ALL, INITIAL, Config, Stage, rank_correlation
from depthscope_lab.papers.study import earlier, run
from depthscope_lab.training import make_task
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.task import Share

STUDY = load("remedies")
TRAINS, PRE, HELP, AT_48, AT_100 = range(5)
LOSSES = {  # (depth, variant) → test loss
    (12, "post"): 1.2, (12, "pre"): 1.0, (12, "deescalated"): 1.0,
    (48, "post"): 2.2, (48, "pre"): 1.3, (48, "deescalated"): 1.5, (48, "mv-split"): 1.4,
    (100, "post"): 2.3, (100, "pre"): 1.5, (100, "deescalated"): 1.9,
}  # fmt: skip
ALIKE = {"post": 1.0, "pre": 0.6, "deescalated": 0.7, "mv-split": 0.65}


def verdicts(changes: dict | None = None, failed: tuple = (), alike: dict | None = None) -> list[str]:
    rows = []
    for (depth, variant), loss in (LOSSES | (changes or {})).items():
        for seed in (1, 2, 3):
            key = (variant, depth, 1e-3, 0, seed)
            if (depth, variant) in failed:
                rows.append((*key, 5, "failed", 1.0))
            rows.append((*key, 0, INITIAL, (ALIKE | (alike or {}))[variant]))
            rows.append((*key, 10, "test_loss", loss + 0.01 * seed))
    claims = STUDY.claims(pd.DataFrame(rows, columns=COLUMNS), Config(stages=(Stage(12, 10, 1e-3, ("post",)),)))
    return [claim.verdict for claim in claims]


def refuted(**given) -> set[int]:
    return {place for place, verdict in enumerate(verdicts(**given)) if verdict == "not reproduced"}


def test_every_verdict_can_fail():
    assert refuted() == set()
    assert refuted(changes={(100, "deescalated"): 2.2}) == {TRAINS}
    assert refuted(changes={(100, "post"): 2.0}) == {TRAINS}
    assert refuted(changes={(12, "deescalated"): 0.9}) == {PRE}
    assert refuted(changes={(48, "post"): 1.0}) == {HELP, AT_48}
    assert refuted(changes={(48, "deescalated"): 2.3, (48, "mv-split"): 2.19}) == {HELP}
    assert refuted(alike={"post": 0.1}) == {AT_48, AT_100}


def test_a_variant_that_failed_counts_as_at_chance_and_does_not_help():
    assert refuted(failed=((48, "post"), (100, "post"))) == set()
    assert refuted(failed=((100, "deescalated"),)) == {TRAINS}
    assert refuted(failed=((48, "deescalated"), (48, "mv-split"))) == {HELP, AT_48}  # two more at chance
    assert verdicts(failed=((12, "pre"),))[PRE] == "not testable here"
    assert refuted(failed=tuple(LOSSES)) == {TRAINS, HELP}


def test_the_rank_correlation_is_spearmans():
    one, other = [3.0, 1.0, 2.0, 2.0], [30.0, 10.0, 25.0, 20.0]
    # ranks 4, 1, 2.5, 2.5 and 4, 1, 3, 2: Σ(d − d̄)(e − ē) = 4.5, Σ(d − d̄)² = 4.5, Σ(e − ē)² = 5
    assert rank_correlation(one, other) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert rank_correlation(one, [-value for value in one]) == pytest.approx(-1)


def test_the_quick_form_trains_draws_and_judges_nothing(tmp_path: Path):
    shares: list[float] = []
    claims = run(STUDY, STUDY.quick, tmp_path, shares.append)
    assert {claim.verdict for claim in claims} == {"not testable here"}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    frame = pd.read_parquet(tmp_path / "remedies" / "data.parquet")
    assert set(frame["variant"]) == {"post", "pre", "deescalated"}
    assert (frame["quantity"] == INITIAL).sum() == 9
    assert earlier(STUDY, STUDY.quick, tmp_path).claims == claims


@pytest.mark.parametrize("variant", ALL)
def test_every_variant_of_the_full_form_can_be_trained(variant: str):
    config = RECIPES["vit-digits"](variant).changed(depth=2, **STUDY.full.settings)
    task = make_task(config)
    model = task.build()
    loss, _ = task.loss(model, task.batch(0, Share(0, 1), torch.device("cpu")), None)
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
