"""The bands of what is normal: whole, found for their kind and for nothing else, drawn behind a curve."""

import json
from importlib.resources import files
from typing import Any

from depthscope.diagnosis import reference_for
from profiles_made_up import INITIALISED, TRAINED, by_map, made_up

MINILM: dict[str, Any] = {"class": "BertModel", "family": "bert", "width": 384, "weights": TRAINED}
BERT = MINILM | {"width": 768}
CURVE = {"token_similarity": by_map(1.08, 0.02, 0.37, 12)}


def trained_models() -> list[dict[str, Any]]:
    path = files("depthscope.diagnosis") / "references" / "trained.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_trained_models_are_whole():
    found = trained_models()
    assert len(found) >= 12
    assert {item["kind"] for item in found} == {"language", "sentences", "proteins", "reactions", "tables"}
    for item in found:
        for curve in item["curves"].values():
            assert len(curve["low"]) == len(curve["high"]) == item["blocks"] + 1
            assert all(low <= high <= 1 for low, high in zip(curve["low"], curve["high"], strict=True))


def test_trained_weights_are_set_against_other_trained_models_at_the_same_share_of_depth():
    trained = trained_models()
    count = sum(not item["causal"] for item in trained)
    new = reference_for(made_up(CURVE, **BERT))
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
    for altered in ({"weights": INITIALISED}, {"without": ["skips"]}, {"excluded_tokens": "outliers"}):
        assert reference_for(made_up(six, **MINILM | altered)) is None


def test_the_band_is_drawn_behind_the_curve():
    profile = made_up(CURVE, **BERT)
    plain, with_band = (
        profile.plot(["token_similarity"]),
        profile.plot(["token_similarity"], reference=reference_for(profile)),
    )
    assert len(with_band.axes[0].collections) == len(plain.axes[0].collections) + 1
    assert [text.get_text() for text in with_band.axes[0].get_legend().get_texts()] == [reference_for(profile).label]
    assert plain.axes[0].get_legend() is None
