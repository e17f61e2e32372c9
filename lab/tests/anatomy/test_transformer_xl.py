"""Transformer-XL under the probe: the segment's tokens are measured, the memory's are not."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import depthscope
from depthscope.anatomy import anatomy_of
from depthscope.measures import token_similarity
from depthscope.models.token_means import Full
from depthscope_lab.models import CarriedMean, TransformerXL, TransformerXLConfig
from samples import seeded

CONFIG = TransformerXLConfig(50, 3, 16, 4, 24, dropout=0.0)
IDS = torch.randint(50, (2, 9), generator=seeded(0))


@pytest.mark.parametrize("carried_mean", [None, CarriedMean()])
def test_a_probe_with_memory_measures_the_segment_alone(carried_mean: CarriedMean | None):
    model = TransformerXL(replace(CONFIG, carried_mean=carried_mean), seeded(0)).eval()
    with torch.no_grad():
        memory = model(IDS.flip(1)).memory
        expected = token_similarity(model(IDS, memory=memory).hidden)
        alone = token_similarity(model(IDS).hidden)
    profile = depthscope.probe(model, {"ids": IDS, "memory": memory}, measures=["token_similarity"])
    assert (profile.metadata["family"], profile.metadata["blocks"], profile.metadata["tokens"]) == (
        "transformer-xl",
        3,
        9,
    )
    assert_close(profile.curve("token_similarity")[-1], expected.mean().item(), rtol=1e-5, atol=0)
    assert abs(expected.mean() - alone.mean()) > 1e-4


def test_attention_is_seen_without_a_memory():
    model = TransformerXL(CONFIG, seeded(0)).eval()
    profile = depthscope.probe(model, IDS, measures=["attention_entropy"])
    rows = profile.frame[profile.frame["measure"] == "attention_entropy"]
    assert sorted(set(rows["block"])) == [1, 2, 3]
    assert profile.metadata["notes"] == []


def test_causality_is_what_the_mean_leaves_of_it():
    for carried_mean, causal in (
        (None, True),
        (CarriedMean(), True),
        (CarriedMean(mean=Full()), False),
    ):
        with torch.device("meta"):
            model = TransformerXL(replace(CONFIG, carried_mean=carried_mean))
        assert anatomy_of(model).causal is causal


def test_the_family_is_known_before_its_model_is_imported():
    """Who probes another model does not wait for Transformer-XL."""
    code = (
        "import sys\nfrom depthscope.anatomy import FAMILIES, anatomy_of\nfrom depthscope.models import Encoder\n"
        "assert anatomy_of(Encoder(1)).family == 'depthscope'\n"
        "assert FAMILIES.owner('transformer-xl') == 'depthscope-lab'\n"
        "assert 'depthscope_lab.models' not in sys.modules, 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
