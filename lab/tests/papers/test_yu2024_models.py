"""The quick forms of the studies of whole models: what they compute, and verdicts that can fail."""

from functools import cache

import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from depthscope.models import Block, BlockConfig, post_norm, pre_norm
from depthscope_lab.papers import load
from depthscope_lab.papers.simulation.blocks import attend, attention_half, ffn_half, pre_norm_block
from depthscope_lab.papers.simulation.collapse_rate import fit
from depthscope_lab.papers.simulation.weights import Sampler
from depthscope_lab.papers.study import Study

MINE = ("yu2024-fig1", "yu2024-fig4", "yu2024-rate", "causal-rate")
# Pre-norm is not much slower at first, and attention's share of its trunk rises before it falls.
SLOWER = "similarity rises much more slowly in pre-norm than in post-norm"
SHARE_FALLS = "attention's share of the trunk diminishes from the first block on"
REFUTED = {"yu2024-fig4": {f"up to t_sim = .9, {SLOWER}", SHARE_FALLS}}


@cache
def quick(name: str) -> tuple[Study, pd.DataFrame]:
    study = load(name)
    return study, study.compute(study.quick, lambda _share: None)


def verdicts(name: str, frame: pd.DataFrame | None = None) -> dict[str, str]:
    study, computed = quick(name)
    return {claim.claim: claim.verdict for claim in study.claims(computed if frame is None else frame, study.quick)}


def changed(name: str, change) -> dict[str, str]:
    """The verdicts that another frame turns, with what they become."""
    frame = quick(name)[1].copy()
    change(frame)
    before, after = verdicts(name), verdicts(name, frame)
    return {claim: verdict for claim, verdict in after.items() if before[claim] != verdict}


# --- the blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("placement", "causal"), [(post_norm, False), (post_norm, True), (pre_norm, False)])
def test_the_batched_blocks_are_our_block(placement, causal: bool):
    """One trial with the weights of a `Block`, in float64: equal but for the order of additions."""
    weights = Sampler("theorem", trials=2, width=16, heads=4, seed=3, dtype=torch.float64).draw()
    x = torch.randn(2, 1, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    config = BlockConfig(16, 4, causal=causal, alpha=1.0, output_projection=False, scale="width", placement=placement)
    if placement is pre_norm:
        ours = pre_norm_block(weights, x, heads=4).output
    else:
        ours = ffn_half(weights, attention_half(weights, x, heads=4, causal=causal))
    for trial in range(2):
        block = Block(config).double()
        parts = {
            block.attention.query: weights.query,
            block.attention.key: weights.key,
            block.attention.value: weights.value,
            block.ffn[0]: weights.expand,
            block.ffn[2]: weights.contract,
        }
        with torch.no_grad():
            for linear, drawn in parts.items():
                linear.weight.copy_(drawn.weight[trial])
                linear.bias.copy_(torch.zeros(()) if drawn.bias is None else drawn.bias[trial, 0])
            assert_close(ours[trial], block(x[trial]), rtol=1e-10, atol=1e-10)


def test_causal_attention_looks_back_only():
    weights = Sampler("theorem", trials=1, width=8, heads=2, seed=0, dtype=torch.float64).draw()
    _, p = attend(weights, torch.randn(1, 1, 5, 8, dtype=torch.float64), 2, causal=True)
    assert not p.triu(1).any()
    assert_close(p.sum(dim=-1), torch.ones(1, 1, 2, 5, dtype=torch.float64))


# --- every study ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MINE)
def test_the_quick_form_refutes_what_is_refuted_and_draws(name: str):
    study, frame = quick(name)
    refuted = {claim for claim, verdict in verdicts(name).items() if verdict == "not reproduced"}
    assert refuted == REFUTED.get(name, set())
    assert "reproduced" in verdicts(name).values()
    before = frame.copy()
    figure = study.draw(frame)
    pd.testing.assert_frame_equal(frame, before)  # draw changes nothing
    assert figure.axes
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend() is not None


@pytest.mark.parametrize("name", ["yu2024-fig4", "yu2024-rate", "causal-rate"])
def test_the_same_seed_gives_the_same_numbers_and_progress_goes_from_nothing_to_everything(name: str):
    study, frame = quick(name)
    shares: list[float] = []
    pd.testing.assert_frame_equal(study.compute(study.quick, shares.append), frame)
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0


# --- one by one -----------------------------------------------------------------------------------


def test_fig1_measures_both_models_and_bert_gradients():
    frame = quick("yu2024-fig1")[1]
    assert list(frame.columns) == ["family", "input", "block", "sample", "measure", "value", "text_sha256"]
    assert set(frame["family"]) == {"bert", "albert"}
    assert set(frame["input"]) == {"text", "random ids"}
    assert set(frame.loc[frame["measure"] == "weight_gradient", "family"]) == {"bert"}
    assert set(frame["block"]) == set(range(13))
    assert verdicts("yu2024-fig1")["similarity escalates to unity in BERT"] == "not testable here"  # 12 blocks


def test_fig1_can_fail():
    def vanish(frame):
        gradient = frame["measure"] == "weight_gradient"
        frame.loc[gradient, "value"] *= 0.5 ** frame.loc[gradient, "block"]

    assert changed("yu2024-fig1", vanish) == {"BERT's gradient norm neither vanishes nor explodes": "not reproduced"}


def test_fig1_of_a_deep_model_is_judged():
    study, frame = quick("yu2024-fig1")
    deep = type(study.quick)(depth=100)
    found = {claim.claim: claim.verdict for claim in study.claims(frame, deep)}
    assert found["similarity escalates to unity in BERT"] == "not reproduced"
    risen = frame.assign(value=frame["value"].where(frame["block"] < 12, 0.999))
    assert study.claims(risen, deep)[0].verdict == "reproduced"


def test_fig4_can_fail():
    def shrink(frame):
        frame["norm"] *= 0.9 ** frame["block"]

    def constant_share(frame):
        frame["branch_norm"] = 0.5 * frame["input_norm"]

    def fast(frame):
        frame["similarity"] = frame["post_norm_similarity"].fillna(1.0)

    assert changed("yu2024-fig4", shrink) == {
        "the trunk's norm ‖X‖ grows from block to block in pre-norm": "not reproduced"
    }
    assert changed("yu2024-fig4", constant_share) == {SHARE_FALLS: "reproduced"}
    assert changed("yu2024-fig4", fast)[f"from t_sim = .9 on, {SLOWER}"] == "not reproduced"


def test_rate_recovers_a_planted_rate_and_sees_another():
    """t_div = 0.7^b from every trial: found to 1e-6, and not the theory's ½."""
    study, frame = quick("yu2024-rate")
    planted = frame.assign(diversity=0.7 ** frame["block"])
    found = fit(planted, "attention", 1.0)
    assert found is not None
    assert found.rate == pytest.approx(0.7, abs=1e-6)
    after = {claim.claim: claim.verdict for claim in study.claims(planted, study.quick)}
    assert after["t_div shrinks by the factor 1/(1 + α²) per block, for every α"] == "not reproduced"
    assert after["the FFN does not change the rate at which t_div shrinks"] == "not reproduced"


def test_rate_goes_down_to_the_rounding_of_float64():
    assert quick("yu2024-rate")[1]["diversity"].min() < 1e-28


def test_causal_can_fail():
    def bidirectional(frame):
        for measure in ("diversity", "strangers"):
            rows = frame["measure"] == measure
            frame.loc[rows & (frame["case"] == "causal"), "value"] = frame.loc[
                rows & (frame["case"] == "bidirectional"), "value"
            ].to_numpy()

    def flat(frame):
        frame.loc[frame["measure"] == "ramp_cosine", "value"] = 0.2

    turned = changed("causal-rate", bidirectional)
    assert turned["t_div shrinks by .625 per causal block, ρ∞ = 1.6"] == "not reproduced"
    assert turned["tokens of causal blocks collapse onto the first token"] == "not reproduced"
    assert changed("causal-rate", flat) == {
        "the diversity that survives causal blocks is a linear ramp in position": "not reproduced"
    }
