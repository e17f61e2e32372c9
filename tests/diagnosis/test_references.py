"""The bands of what is normal: whole, found for their kind and for nothing else, drawn behind a curve."""

import json
from importlib.resources import files
from typing import Any

import pytest

from depthscope.diagnosis import reference_for
from profiles_made_up import INITIALISED, TRAINED, by_map, made_up

FILES = sorted(path.name for path in (files("depthscope.diagnosis") / "references").iterdir())
FILES.remove("trained.json")
BERT: dict[str, Any] = {"class": "BertModel", "family": "bert", "width": 768, "weights": INITIALISED}
MINILM: dict[str, Any] = {"class": "BertModel", "family": "bert", "width": 384, "weights": TRAINED}
CURVE = {"token_similarity": by_map(1.08, 0.02, 0.37, 12)}


def load(name: str) -> dict[str, Any]:
    return json.loads((files("depthscope.diagnosis") / "references" / name).read_text(encoding="utf-8"))


def test_the_families_are_there():
    assert {"bert.json", "albert.json", "vit.json", "gpt2.json", "llama.json"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_whole(name: str):
    found = load(name)
    assert {"token_similarity", "effective_rank"} <= set(found["curves"])
    for measure, curve in found["curves"].items():
        assert [len(side) for side in curve.values()] == [found["blocks"] + 1] * 3
        for low, mean, high in zip(curve["low"], curve["mean"], curve["high"], strict=True):
            assert low <= mean <= high
            assert high <= (1 if "similarity" in measure else found["tokens"])
    assert (found["weights"], found["runs"]) == ("initialised", 5)


def test_a_band_is_found_for_its_kind_only():
    found = reference_for(made_up(CURVE, **BERT))
    assert found.label == "BERT-base at initialisation"
    assert len(found.low["token_similarity"]) == 13
    for other in ({"width": 512}, {"class": "XlmModel"}, {"tokens": 16}, {"placement": "pre"}, {"causal": True}):
        assert reference_for(made_up(CURVE, **BERT | other)) is None
    short = reference_for(made_up({"token_similarity": CURVE["token_similarity"][:5]}, **BERT))
    assert len(short.high["token_similarity"]) == 5
    assert "effective_rank" in found.low
    assert "effective_rank" not in reference_for(made_up(CURVE, **BERT | {"tokens": 100})).low


def test_the_trained_models_are_whole():
    found = load("trained.json")
    assert len(found) >= 12
    assert {item["kind"] for item in found} == {"language", "sentences", "proteins", "reactions", "tables"}
    for item in found:
        for curve in item["curves"].values():
            assert len(curve["low"]) == len(curve["high"]) == item["blocks"] + 1
            assert all(low <= high <= 1 for low, high in zip(curve["low"], curve["high"], strict=True))


def test_trained_weights_are_set_against_other_trained_models_at_the_same_share_of_depth():
    trained = load("trained.json")
    count = sum(not item["causal"] for item in trained)
    new = reference_for(made_up(CURVE, **BERT | {"weights": TRAINED}))
    assert new.label == f"{count} other trained bidirectional models"
    assert [len(side["token_similarity"]) for side in (new.low, new.high)] == [13, 13]
    first = [item["curves"]["token_similarity"] for item in trained if not item["causal"]]
    assert new.low["token_similarity"][0] == min(curve["low"][0] for curve in first)
    assert new.high["token_similarity"][-1] == max(curve["high"][-1] for curve in first)
    six = {"token_similarity": CURVE["token_similarity"][:7]}
    itself = reference_for(made_up(six, **MINILM))
    assert itself.label == f"{count - 1} other trained bidirectional models"
    assert "causal" in reference_for(made_up(six, **MINILM | {"causal": True})).label
    assert reference_for(made_up(six, **MINILM | {"tokens": 8})) is None
    assert reference_for(made_up(six, **MINILM | {"causal": None})) is None


def test_gpt2_scales_its_weights_with_depth():
    about = BERT | {"class": "GPT2LMHeadModel", "family": "gpt2", "placement": "pre", "causal": True}
    assert reference_for(made_up(CURVE, **about)).label == "GPT-2 at initialisation"
    assert reference_for(made_up({"token_similarity": CURVE["token_similarity"][:9]}, **about)) is None


def test_the_band_is_drawn_behind_the_curve():
    profile = made_up(CURVE, **BERT)
    plain, with_band = (
        profile.plot(["token_similarity"]),
        profile.plot(["token_similarity"], reference=reference_for(profile)),
    )
    assert len(with_band.axes[0].collections) == len(plain.axes[0].collections) + 1
    assert [text.get_text() for text in with_band.axes[0].get_legend().get_texts()] == ["BERT-base at initialisation"]
    assert plain.axes[0].get_legend() is None
