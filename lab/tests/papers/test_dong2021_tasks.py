"""The studies of paths, path lengths and the toy of Dong et al. 2021: quick forms, and claims that can fail."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from depthscope_lab.papers import load
from depthscope_lab.papers.dong2021 import lengths, path_networks, paths, toy
from depthscope_lab.papers.dong2021.toy import (
    BOTH,
    INNER,
    PLAIN,
    RADIUS,
    VARIANTS,
    Mover,
    Variant,
    arcs,
    run_free,
    train,
)

NAMES = ("dong2021-lengths", "dong2021-toy", "dong2021-paths")


@cache
def quick(name: str) -> tuple[pd.DataFrame, tuple[float, ...]]:
    study, shares = load(name), []
    if not study.in_folder:
        return study.compute(study.quick, shares.append), tuple(shares)
    with TemporaryDirectory() as folder:
        return study.compute(study.quick, shares.append, Path(folder)), tuple(shares)


def verdicts(name: str, frame: pd.DataFrame) -> dict[str, str]:
    study = load(name)
    return {claim.claim: claim.verdict for claim in study.claims(frame, study.quick)}


@pytest.mark.parametrize("name", NAMES)
def test_the_quick_form_computes_judges_and_draws(name: str):
    frame, shares = quick(name)
    assert list(shares) == sorted(shares)
    assert shares[-1] == 1.0
    assert len(verdicts(name, frame)) >= 3
    before = frame.copy()
    figure = load(name).draw(frame)
    pd.testing.assert_frame_equal(frame, before)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) >= 2
    assert all(axes.get_xlabel() for axes in shown)


# Lengths


def test_the_lengths_of_the_paper_and_of_the_published_mobilebert():
    said = verdicts("dong2021-lengths", quick("dong2021-lengths")[0])
    assert said.pop("the MobileBERT of Fig. 5 is the published one") == "not reproduced"
    few = "where there are 8 heads or more, fewer than 0.001 of all paths are of at most half the depth"
    assert said.pop(few) == "not reproduced"  # DistilBERT: 6 layers are too few
    assert set(said.values()) == {"reproduced"}


def test_a_wrong_law_of_lengths_is_refuted():
    law = "the share of each length is Binomial(L, H/(H + 1)), whose mean is LH/(H + 1)"
    frame = quick("dong2021-lengths")[0].copy()
    frame.loc[frame["length"] == 3, "share"] *= 1 + 1e-9
    assert verdicts("dong2021-lengths", frame)[law] == "not reproduced"
    frame = quick("dong2021-lengths")[0]
    assert verdicts("dong2021-lengths", frame.assign(mean=frame["mean"] + 1e-9))[law] == "not reproduced"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("DistilBERT", "DistilBert"),
        (lengths.PUBLISHED_MOBILEBERT, "MobileBert"),
        ("BERT-base, ViT-B", "Bert"),
        ("BERT-base, ViT-B", "ViT"),
        ("Llama 3.1 8B, Mistral 7B", "Mistral"),
        ("ModernBERT-base", "ModernBert"),
        ("gpt-oss-120b", "GptOss"),
        ("DeepSeek-V3", "DeepseekV3"),
    ],
)
def test_sizes_are_those_of_the_default_configurations(name: str, family: str):
    transformers = pytest.importorskip("transformers")
    (known,) = (each for each in lengths.ARCHITECTURES if each.name == name)
    config = getattr(transformers, f"{family}Config")()
    assert (known.layers, known.heads) == (config.num_hidden_layers, config.num_attention_heads)


# The toy


def test_arcs_go_round_half_a_circle_each_in_even_steps():
    path = arcs(100)
    assert path.shape == (50, 2, 2)
    assert_close(path.norm(dim=-1), torch.full((50, 2), RADIUS, dtype=torch.float64))
    assert_close(path[0], torch.tensor([[RADIUS, 0.0], [-RADIUS, 0.0]], dtype=torch.float64), rtol=0, atol=1e-12)
    steps = (path[1:] - path[:-1]).norm(dim=-1)
    assert_close(steps, steps[0, 0].expand_as(steps))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_mover_has_the_parts_that_its_variant_names(variant: Variant):
    """Without attention and FFN (all their weights 0), only what a skip carries is left."""
    model = Mover(8, variant, torch.Generator().manual_seed(0)).double()
    for part in (model.block.attention, model.block.ffn):
        for parameter in part.parameters():
            torch.nn.init.zeros_(parameter)
    points = arcs(20)
    moved = model(points) - (points if variant.outer else 0)
    assert bool((moved.abs() > 1e-3).any()) == variant.inner


def test_the_ffn_is_used_by_the_variants_that_have_one():
    for variant in VARIANTS:
        model = Mover(8, variant, torch.Generator().manual_seed(0))
        before = model(arcs(20).float())
        with torch.no_grad():
            model.block.ffn[0].weight.mul_(-1)
        assert torch.equal(model(arcs(20).float()), before) != variant.mlp


def test_training_makes_a_better_mover_and_free_running_feeds_back():
    short = toy.Config(points=40, every=1, epochs=200)
    _, untrained = train(replace(short, epochs=0), 16, BOTH, 0)
    model, off = train(short, 16, BOTH, 0)
    assert off < 0.1 * untrained
    track = run_free(model, arcs(40)[0], 5)
    assert track.shape == (6, 2, 2)
    assert_close(track[3], model(track[2].unsqueeze(0)).squeeze(0))


@pytest.mark.parametrize(
    ("distances", "together"),
    [
        ([1.0, 0.5, 0.05, 1e-7, 0.0], 3),
        ([1.0, 0.5, 1e-3, 0.5, 1e-3], 4),  # it comes back once
        ([1.0, 1.0, 1.0], -1),
        ([1.0, float("nan"), float("nan")], -1),  # what is no number is not together
    ],
)
def test_when_points_have_fallen_together(distances: list[float], together: int):
    assert toy.together_from(distances) == together


def test_the_claims_of_the_toy_can_fail_and_hold():
    frame = quick("dong2021-toy")[0].copy()
    plain, skips = (f"trained: {text}" for text in ("with attention alone the two points fall together", "skips slow"))
    frame["together"] = -1
    said = verdicts("dong2021-toy", frame)
    assert said[plain] == "not reproduced"
    frame.loc[frame["variant"] == PLAIN.name, "together"] = 5
    said = verdicts("dong2021-toy", frame)
    assert said[plain] == said[f"{skips} or stop the fall"] == "reproduced"
    frame.loc[frame["variant"] == INNER.name, "together"] = 5
    assert verdicts("dong2021-toy", frame)[f"{skips} or stop the fall"] == "not reproduced"


# Paths


def test_a_study_that_was_interrupted_goes_on_with_the_next_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    study, real, calls = load("dong2021-paths"), path_networks.train, []
    expected = quick("dong2021-paths")[0]  # before anything is counted: it may have to be computed

    def train_three(*given, **options):
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*given, **options)

    monkeypatch.setattr(paths, "train", train_three)
    with pytest.raises(KeyboardInterrupt):
        study.compute(study.quick, lambda _share: None, tmp_path)
    frame = study.compute(study.quick, lambda _share: None, tmp_path)
    pd.testing.assert_frame_equal(frame, expected)
    assert len(calls) == 2 * 3 + 1  # two seeds of three tasks, one interrupted
    monkeypatch.setattr(paths, "train", lambda *_, **__: pytest.fail("trained again"))
    study.compute(replace(study.quick, trials=1), lambda _share: None, tmp_path)


def changed(task: str, mode: str, reading: str, values: list[float]) -> dict[str, str]:
    """The verdicts if these had been the accuracies by length."""
    frame = quick("dong2021-paths")[0].copy()
    for length, value in enumerate(values):
        chosen = (frame["task"] == task) & (frame["mode"] == mode) & (frame["reading"] == reading)
        chosen &= (frame["length"] == length) & (frame["part"] == "accuracy")
        assert chosen.any()
        frame.loc[chosen, "value"] = value
    return verdicts("dong2021-paths", frame)


def test_the_claims_of_paths_follow_the_accuracies():
    recomputed = "sorting: from length 1 on, recomputed paths, all of each length, do worse with every further step"
    assert changed("sorting", "recomputed", "alone", [0.2, 0.9, 0.5, 0.3])[recomputed] == "reproduced"
    assert changed("sorting", "recomputed", "alone", [0.9, 0.3, 0.5, 0.9])[recomputed] == "not reproduced"
    short = "sorting: terms of short paths, up to half the depth, carry the majority of the performance"
    assert changed("sorting", "frozen", "up to", [0.1, 1.0, 1.0, 1.0])[short] == "reproduced"
    assert changed("sorting", "frozen", "up to", [0.1, 0.1, 1.0, 1.0])[short] == "not reproduced"
    frame = quick("dong2021-paths")[0].copy()
    frame.loc[frame["part"] == "check", "value"] = 1e-3
    (first, *_rest) = verdicts("dong2021-paths", frame).values()
    assert first == "not reproduced"
