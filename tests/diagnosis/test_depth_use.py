"""A verdict with the use of depth: what it says then, what it says once only, and what it refuses."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import depthscope
from depthscope.diagnosis import diagnose
from depthscope.models import BlockConfig, Encoder
from depthscope.report.subjects import subjects_of
from depthscope.report.words import said_of
from depthscope.usage import DepthUse
from profiles_made_up import INITIALISED, TRAINED, made_up
from samples import seeded

ALIKE = [0.1, 0.95, 0.95, 0.95, 0.95]
SHARED = {"shared": 0.93, "sequence": 0.01, "position": 0.02, "token": 0.04}
OWN = {"shared": 0.05, "sequence": 0.8, "position": 0.05, "token": 0.1}


def used(energy: dict[str, float] | None = None, **columns: list[float]) -> DepthUse:
    """Of four blocks; the second costs nothing, the lens is settled from the third on."""
    table: dict[str, Any] = {
        "block": [1, 2, 3, 4],
        "attention_ratio": [0.5, 0.02, 0.3, 0.3],
        "ffn_ratio": [0.5, 0.03, 0.3, 0.3],
        "lens_top1": [0.2, 0.3, 0.95, 1.0],
        "lens_top5": [0.2, 0.3, 0.9, 1.0],
        "lens_kl": [5.0, 4.0, 0.3, 0.0],
        "skip_later": [0.6, 0.05, 0.3, np.nan],
        "skip_output": [0.6, 0.05, 0.3, 0.3],
        "skip_loss": [1.0, 0.004, 0.2, 0.2],
    }
    about = {"model": "made up", "part": "", "loss": 2.0, "weights": TRAINED, "energy": energy, "shortest": 30}
    return DepthUse(pd.DataFrame(table | columns), pd.DataFrame(), about)


def profile(similarity: list[float], **curves: list[float]) -> depthscope.Profile:
    return made_up({"token_similarity": similarity, **curves}, weights=TRAINED)


def test_the_verdict_says_what_was_asked():
    found = diagnose(profile([0.1, 0.2, 0.3, 0.3, 0.3]), depth=used(OWN))
    assert "Most of the work is in 2 of 4 blocks (1, 3)" in found.finding("half").sentence
    assert "settled after block 3 of 4" in found.finding("settled").sentence
    assert "Block 2 could go: " in found.finding("could go").sentence
    assert "+0.004, +0.2%" in found.finding("could go").sentence
    assert all(finding.numbers for finding in found.findings)
    sentences = [finding.sentence for finding in found.findings]
    assert len(set(sentences)) == len(sentences)
    rules = [finding.rule for finding in found.findings]
    assert rules.index("half") < rules.index("trained") < rules.index("not measured")
    plain = diagnose(profile([0.1, 0.2, 0.3, 0.3, 0.3]))
    assert plain.finding("half") is None
    assert (plain.verdict, plain.headline) == (found.verdict, found.headline)


def test_what_a_profile_says_as_well_is_said_once():
    skipped = pd.DataFrame(
        [(0, 0, 2.0, 0.0), (2, 2, 2.004, 0.004)], columns=["first_block", "last_block", "loss", "change"]
    )
    seen = profile([0.1, 0.2, 0.3, 0.3, 0.3])
    assert diagnose(seen, skipped).finding("spare blocks") is not None
    both = diagnose(seen, skipped, depth=used())
    assert both.finding("could go") is not None
    assert both.finding("spare blocks") is None


def test_alike_tokens_are_told_apart_by_the_use_of_depth():
    """The default measures do not say by whom the common part is shared; the use of depth does."""
    seen = profile(ALIKE)
    assert diagnose(seen).verdict == "cannot tell"
    found = diagnose(seen, depth=used(SHARED))
    assert found.verdict == "anisotropic"
    assert "93%" in found.headline
    assert "what sequences share" not in found.finding("not measured").sentence
    lost = diagnose(seen, depth=used(OWN))
    assert lost.verdict == "collapsing"
    assert diagnose(seen, depth=used(None)).verdict == "cannot tell"


def test_of_another_model_it_is_refused():
    with pytest.raises(ValueError, match=r"\(blocks: it has 5\), got the use of 4 blocks"):
        diagnose(profile([*ALIKE, 0.9]), depth=used())
    with pytest.raises(ValueError, match="is of the whole model, and this one was probed without its skips"):
        diagnose(made_up({"token_similarity": ALIKE}, without=["skips"]), depth=used())
    for name, other in (("width", 48), ("family", "gpt2")):
        wrong = used()
        wrong.metadata[name] = other
        with pytest.raises(ValueError, match=rf"of the model that was probed \({name} .*\), got {name} {other}"):
            diagnose(profile(ALIKE), depth=wrong)
    with pytest.raises(ValueError, match=r"expected depth= from depthscope\.depth_use, got DataFrame"):
        diagnose(profile(ALIKE), depth=used().frame)


def test_a_collapse_is_not_called_harmless():
    """Of random weights, and of tokens with nothing of their own, a shared direction is what a collapse looks like."""
    nothing_left = {"shared": 0.9995, "sequence": 0.0, "position": 0.0, "token": 0.0005}
    for energy, similarity, weights in ((SHARED, 0.95, INITIALISED), (nothing_left, 0.9996, TRAINED)):
        use = used(energy)
        use.metadata["weights"] = weights
        seen = made_up({"token_similarity": [0.1] + [similarity] * 4}, weights=weights)
        found = diagnose(seen, depth=use)
        assert found.verdict in ("collapsing", "collapsed")


def test_of_one_of_several_parts_it_says_which():
    towers = {
        "encoder": {"first_block": 1, "last_block": 3, "samples": 2, "tokens": 9, "placement": "pre", "causal": False},
        "decoder": {"first_block": 4, "last_block": 7, "samples": 2, "tokens": 9, "placement": "pre", "causal": True},
    }
    seen = made_up({"token_similarity": [0.1] * 8}, towers=towers, parts={"encoder": 3, "decoder": 4})
    of_decoder = used()
    of_decoder.metadata["part"] = "decoder"
    said = diagnose(seen, depth=of_decoder).finding("half").sentence
    assert said.startswith("In the decoder, its blocks counted from 1: most of the work is in")
    alone = diagnose(made_up({"token_similarity": ALIKE}), depth=of_decoder)  # as with probe(part="decoder")
    assert alone.finding("half").sentence.startswith("Most of the work is in")
    of_decoder.metadata["part"] = "encoder"
    with pytest.raises(ValueError, match=r"encoder has 3, decoder has 4.*got the use of 4 blocks of its encoder"):
        diagnose(seen, depth=of_decoder)


def test_of_blocks_that_could_all_go_no_half_does_the_work():
    """Without a loss as with one: shares of next to nothing are noise."""
    nothing = used(skip_loss=[np.nan] * 4, skip_output=[0.01, 0.0, 0.01, 0.02])
    rules = {finding.rule: finding.sentence for finding in nothing.findings}
    assert rules["could go"].startswith("Blocks 1–4 could go, one at a time")
    assert "half" not in rules


def test_a_page_says_each_sentence_once_and_leads_to_its_chart():
    import torch

    model = Encoder(3, BlockConfig(16, 4), generator=seeded(0))
    x = torch.randn(3, 25, 16, generator=seeded(1))
    seen, use = depthscope.probe(model, x), depthscope.depth_use(model, x)
    charts = {"depth": "blocks-that-matter"}
    for things in ([seen, use], [seen, use, diagnose(seen, depth=use)], [seen, diagnose(seen), use]):
        (subject,) = subjects_of(things)
        said = said_of(subject, charts).findings
        texts = [sentence.text for sentence in said]
        assert len(set(texts)) == len(texts)
        half = next(sentence for sentence in said if "of what skipping single blocks costs" in sentence.text)
        assert half.chart == "blocks-that-matter"
        assert all(finding.sentence in texts for finding in use.findings)
