"""Dovonon et al.'s Fig. 3: what the claims are made of, on curves that are made up, and each claim where it fails."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from depthscope_lab.papers.dovonon2025 import fig3
from depthscope_lab.papers.dovonon2025.fig3 import KINDS, best_rate
from depthscope_lab.training.data import load_digits

CONFIG = fig3.STUDY.full
LAST = {"both": (1.5, 0.4, 6.0), "smooth": (0.5, 0.9, 3.0), "plain": (1.5, 0.4, 6.0), "sharpen": (4.0, 0.1, 9.0)}


def made_up() -> pd.DataFrame:
    """Three seeds of a world in which all claims hold."""
    rows = []
    for kind in KINDS:
        for rate, loss in zip(CONFIG.rates, (0.5, 0.2, 0.4), strict=True):
            rows.append({"kind": kind, "state": "tuning", "seed": 1000, "rate": rate, "loss": loss, "block": 0})
        for seed in range(3):
            for state in ("fresh", "trained"):
                for block in range(5):
                    share = block / 4
                    ratio, cosine, rank = (
                        (1 - share) * first + share * last
                        for first, last in zip((1.5, 0.4, 6.0), LAST[kind], strict=True)
                    )
                    gain = {"plain": 0, "both": 0.01, "smooth": 0.02, "sharpen": 0.03}[kind]
                    rows.append(
                        {
                            "kind": kind,
                            "state": state,
                            "seed": seed,
                            "rate": 1e-3,
                            "block": block,
                            "frequency_ratio": ratio + 0.01 * seed,
                            "cosine_similarity": cosine,
                            "effective_rank": rank,
                            "loss": 0.2,
                            "accuracy": 0.9 + gain + 0.001 * seed * (gain > 0),
                            "outside_smooth": 0.0 if kind == "smooth" else 0.5,
                            "outside_sharpen": 0.0 if kind == "sharpen" else 0.5,
                        }
                    )
    return pd.DataFrame(rows)


def verdicts(frame: pd.DataFrame) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in fig3.claims(frame, CONFIG)}


def test_all_claims_hold_where_they_should():
    assert set(verdicts(made_up()).values()) == {"reproduced"}


def where(frame: pd.DataFrame, column: str, value: object, **chosen: object) -> pd.DataFrame:
    rows = np.logical_and.reduce([frame[name] == wanted for name, wanted in chosen.items()])
    return frame.assign(**{column: frame[column].mask(rows, value)})


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (
            "stay in their interval",
            {"column": "outside_smooth", "value": 0.01, "kind": "smooth", "seed": 1, "block": 2},
        ),
        (
            "before training",
            {"column": "frequency_ratio", "value": 0.1, "kind": "sharpen", "state": "fresh", "seed": 2},
        ),
        ("after training, tokens", {"column": "frequency_ratio", "value": 9, "kind": "smooth", "seed": 0, "block": 4}),
        ("other two definitions", {"column": "effective_rank", "value": 20, "kind": "smooth", "seed": 1, "block": 4}),
        ("more alike", {"column": "frequency_ratio", "value": 0.1, "kind": "smooth", "seed": 1, "block": 0}),
        ("more different over", {"column": "frequency_ratio", "value": 9, "kind": "sharpen", "seed": 1, "block": 0}),
        ("smoothing helps", {"column": "accuracy", "value": 0.5, "kind": "smooth"}),
        ("sharpening raises", {"column": "accuracy", "value": 0.5, "kind": "sharpen", "seed": 1}),
        ("sharpening raises", {"column": "accuracy", "value": 1.0, "kind": "both", "seed": 1}),
    ],
)
def test_a_claim_fails_where_it_should(words: str, change: dict[str, object]):
    found = verdicts(where(made_up(), **change))
    assert {verdict for claim, verdict in found.items() if words in claim} == {"not reproduced"}


def test_too_few_steps_judge_nothing_that_is_trained():
    few = replace(CONFIG, steps=10)
    judged = {claim.claim: claim.verdict for claim in fig3.claims(made_up(), few)}
    assert [claim for claim, verdict in judged.items() if verdict == "reproduced"] == [
        "the eigenvalues of every block's H stay in their interval through training",
        "before training, tokens stay more different where H sharpens than where H smooths (input convergence)",
    ]


def test_nothing_is_gained_where_a_model_has_not_learned():
    found = verdicts(where(made_up(), column="accuracy", value=0.1, kind="plain", seed=1))
    assert {verdict for claim, verdict in found.items() if "accuracy" in claim} == {"not testable here"}


def test_a_rate_at_the_edge_is_named():
    changed = where(made_up(), column="loss", value=0.1, kind="sharpen", rate=CONFIG.rates[-1])
    notes = {claim.note for claim in fig3.claims(changed, CONFIG) if "accuracy" in claim.claim}
    assert notes == {"at the edge of the rates, so that one beyond may be better: sharpen"}


def test_students_interval_is_that_of_the_table():
    # 4.3027 is the 97.5 % quantile with two degrees of freedom; the deviation of 1, 2, 3 is 1.
    mean, half = fig3.interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.30265 / np.sqrt(3), rel=1e-5)
    assert fig3.interval([1.0]) == (1.0, float("inf"))


def test_the_best_rate_is_that_of_the_least_loss_and_a_failed_run_is_not_it():
    tuning = pd.DataFrame({"rate": [1e-3, 1e-2, 1e-1], "loss": [0.3, 0.2, np.nan]})
    assert best_rate(tuning) == 1e-2


def test_images_for_tuning_are_training_images_and_disjoint():
    data = load_digits()
    tuning = data.for_tuning(0.25)
    assert len(tuning.test_images) == round(0.25 * len(data.train_images))
    assert (tuning.train_images.tolist() + tuning.test_images.tolist()) == data.train_images.tolist()
    assert (tuning.train_labels.tolist() + tuning.test_labels.tolist()) == data.train_labels.tolist()
    assert tuning.describe()["fingerprint"] != data.describe()["fingerprint"]
