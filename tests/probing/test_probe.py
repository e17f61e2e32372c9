"""`probe` against plain loops over the same model, for every family."""

import gc
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from depthscope import measures as m
from depthscope.anatomy import anatomy_of
from depthscope.measures import MEASURES
from depthscope.models import BlockConfig, Encoder
from depthscope.probing import probe
from depthscope.probing.profile import COLUMNS
from depthscope.stations import BRANCH, TRUNK
from samples import seeded
from zoo import HAS_HIDDEN_STATES, IDS, MASK, TOKENS, ZOO, make


def values(profile, measure: str, block: int, station: str = "output") -> np.ndarray:
    rows = profile.frame.query("measure == @measure and block == @block and station == @station")
    return rows.sort_values(["sample", "head"])["value"].to_numpy()


@pytest.mark.parametrize("name", HAS_HIDDEN_STATES)
def test_equals_a_loop_over_the_hidden_states(name: str):
    model, inputs = make(name)
    profile = probe(model, inputs, measures=["light", "effective_rank"])
    batch = inputs if isinstance(inputs, dict) else {"pixel_values": inputs}
    mask = batch.get("attention_mask")
    with torch.no_grad():
        states = list(model.eval()(**batch, output_hidden_states=True).hidden_states)
    if name == "xlnet":
        states = [state.transpose(0, 1) if state.shape[0] != 2 else state for state in states]
    assert profile.depth == 3
    for block, state in enumerate(states):
        if ZOO[name].final_norm and block == 3:
            continue  # Hugging Face puts the final norm into the last hidden state
        for measure in ("token_similarity", "token_diversity", "cosine_similarity", "effective_rank"):
            expected = getattr(m, measure)(state, mask).numpy()
            np.testing.assert_allclose(values(profile, measure, block), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ZOO)
def test_every_measure_at_every_station(name: str):
    model, inputs = make(name)
    profile = probe(model, inputs, measures="all", stations="all")
    depth = ZOO[name].blocks
    assert profile.depth == profile.metadata["blocks"] == depth
    assert profile.metadata["tokens"] == ZOO[name].tokens
    assert list(profile.frame.columns) == COLUMNS
    taken = set(profile.frame["measure"])
    missing = {"sink_attention", "sink_value_norm"}  # these tiny models have no sinks
    if "attention_branch" in ZOO[name].hides and "ffn_branch" in ZOO[name].hides:
        missing.add("branch_ratio")
    without_attention = ZOO[name].attending == () or name == "gpt-oss"  # its rows do not sum to 1
    if without_attention:
        missing |= {measure.name for measure in MEASURES.values() if measure.of == "attention"}
    assert set(MEASURES) - taken <= missing
    heads = profile.frame.query("measure == 'delta' and block == 2")
    assert len(heads) == (0 if without_attention else 2 * 4)
    assert sorted(heads["head"].unique()) == ([] if without_attention else [0, 1, 2, 3])
    notes = " ".join(profile.metadata["notes"])
    hidden = {*TRUNK, *BRANCH} & ZOO[name].hides
    assert all(station in notes for station in hidden)
    assert ("stations that this model does not show" in notes) == bool(hidden)
    assert ("attention was not seen" in notes) == (ZOO[name].attending is not None)
    assert ("rows sum to less than 1" in notes) == (name == "gpt-oss")
    assert profile.metadata["causal"] in ({True, False} if len(ZOO[name].starts) == 1 else {ZOO[name].causal})


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5-encoder", "vit", "mpnet", "xlnet"])
def test_attention_equals_the_eager_implementation(name: str):
    model, inputs = make(name)
    profile = probe(model, inputs, measures="spectral")
    eager, _ = make(name)
    batch = inputs if isinstance(inputs, dict) else {"pixel_values": inputs}
    if name not in {"mpnet", "xlnet"}:
        eager.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = eager.eval()(**batch, output_attentions=True).attentions
    mask = None if "attention_mask" not in batch else MASK.unsqueeze(1)
    assert len(attentions) == 3
    for block, p in enumerate(attentions, start=1):
        for measure in ("delta", "second_eigenvalue", "attention_entropy"):
            expected = getattr(m, measure)(p, mask).numpy().reshape(-1)
            found = values(profile, measure, block, "attention")
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)  # float32 attention


@pytest.mark.parametrize("name", ["bert", "gpt2", "encoder", "torch", "torch-tokens-first", "xlnet", "t5-encoder"])
def test_padded_equals_unpadded(name: str):
    model, inputs = make(name)
    padded = probe(model, inputs, measures="spectral", stations="trunk").frame.query("sample == 1")
    axis = 0 if name == "torch-tokens-first" else 1
    alone = {}
    for key, value in inputs.items():
        batch_axis = 1 - axis if value.ndim == 3 else 0
        one = value.narrow(batch_axis, 1, 1)
        alone[key] = one.narrow(axis if value.ndim == 3 else 1, 0, 4).contiguous()
    cropped = probe(model, alone, measures="spectral", stations="trunk").frame
    both = padded.merge(cropped, on=["block", "station", "head", "measure"], suffixes=("", "_alone"))
    assert len(both) == len(cropped) > 200
    # XLNet's relative positions depend on the length, and its padding with them.
    if name != "xlnet":
        np.testing.assert_allclose(both["value"], both["value_alone"], rtol=1e-4, atol=1e-6)
    block_zero = both.query("block == 0")
    assert len(block_zero) > 3
    np.testing.assert_allclose(block_zero["value"], block_zero["value_alone"], rtol=1e-6, atol=1e-6)


def test_steps_between_trunk_stations():
    model, inputs = make("encoder")
    profile = probe(model, inputs, stations="trunk")
    tokens: dict[str, torch.Tensor] = {}
    block = model.blocks[1]
    hooks = [
        block.stations[s].register_forward_hook(lambda _m, _i, out, s=s: tokens.update({s: out}))
        for s in ("input", "after_attention", "ffn_input", "after_ffn", "output")
    ]
    with torch.no_grad():
        model.eval()(**inputs)
    for hook in hooks:
        hook.remove()
    order = list(tokens)
    assert order == ["input", "after_attention", "ffn_input", "after_ffn", "output"]
    for before, after in [*pairwise(order[:-1]), ("input", "output")]:  # at the output the whole block is told
        xi1, xi2 = m.growth(tokens[before], tokens[after], MASK)
        rate = m.escalation_rate(tokens[before], tokens[after], MASK)
        for measure, expected in (("growth_mean", xi1), ("growth_diversity", xi2), ("escalation_rate", rate)):
            np.testing.assert_allclose(values(profile, measure, 2, after), expected.numpy(), rtol=1e-5)
    whole = probe(model, inputs)  # whatever else is measured
    np.testing.assert_allclose(
        values(whole, "escalation_rate", 2), m.escalation_rate(tokens["input"], tokens["output"], MASK), rtol=1e-5
    )
    np.testing.assert_allclose(
        values(profile, "angular_distance", 2), m.angular_distance(tokens["input"], tokens["output"], MASK), rtol=1e-5
    )


def test_branch_ratio_is_the_branch_over_the_trunk():
    model, inputs = make("encoder-pre")
    profile = probe(model, inputs, measures="branch_ratio")
    seen: dict[str, torch.Tensor] = {}
    for s in ("input", "attention_branch", "after_attention", "ffn_branch"):
        model.blocks[2].stations[s].register_forward_hook(lambda _m, _i, out, s=s: seen.update({s: out}))
    model.eval()(**inputs)
    norm = {s: m.frobenius_norm(x.detach(), MASK) for s, x in seen.items()}
    np.testing.assert_allclose(
        values(profile, "branch_ratio", 3, "attention_branch"), norm["attention_branch"] / norm["input"], rtol=1e-5
    )
    np.testing.assert_allclose(
        values(profile, "branch_ratio", 3, "ffn_branch"), norm["ffn_branch"] / norm["after_attention"], rtol=1e-5
    )


def test_inputs_of_every_kind():
    model, batch = make("bert")
    light = partial(probe, measures="light")  # the others have numbers of a whole batch
    whole = light(model, batch).frame
    pieces = light(model, ({k: v[i : i + 1] for k, v in batch.items()} for i in range(2))).frame
    merged = whole.merge(pieces, on=["block", "station", "head", "measure", "sample"])
    assert len(merged) == len(whole)
    np.testing.assert_allclose(merged["value_x"], merged["value_y"], rtol=1e-4, atol=1e-6)
    ids = light(model, IDS).frame
    pairs = light(model, [(IDS, torch.zeros(2))]).frame
    pd.testing.assert_frame_equal(ids, pairs)

    def tokenizer(texts, return_tensors, padding, truncation):
        assert return_tensors == "pt"
        return {"input_ids": IDS[: len(texts)], "attention_mask": MASK[: len(texts)]}

    pd.testing.assert_frame_equal(light(model, ["a", "b"], tokenizer=tokenizer).frame, whole)
    assert probe(model, "a", tokenizer=tokenizer).metadata["samples"] == 1


def test_exclude_tokens():
    model, _ = make("encoder")
    x = TOKENS.clone()
    without = probe(model, x, exclude_tokens=[0, -1]).curve("token_similarity")
    assert_close(without[0], m.token_similarity(x[:, 1:-1]).mean().item())
    assert without[0] != probe(model, x).curve("token_similarity")[0]


def test_causality_is_found_by_trying_where_it_is_not_known():
    model, batch = make("torch")
    assert probe(model, batch).metadata["causal"] is False
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert probe(model, {"src": TOKENS, "mask": later}).metadata["causal"] is True


def test_unknown_models_are_measured_at_their_outputs():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    profile = probe(model, TOKENS, measures="spectral")
    assert profile.depth == 4
    assert "unknown family" in profile.metadata["notes"][0]
    assert "attention was not seen in blocks 1, 2, 3, 4" in profile.metadata["notes"]
    x = TOKENS
    for block, layer in enumerate(model, start=1):
        x = layer(x)
        np.testing.assert_allclose(
            values(profile, "token_similarity", block), m.token_similarity(x.detach()), rtol=1e-6
        )


def test_memory_does_not_grow_with_depth():
    """Of the tokens, nothing is kept but the unit tokens of one block's input."""
    model = Encoder(40, BlockConfig(16, 4), generator=seeded(0))
    alive: list[int | None] = []

    def count() -> None:
        """At some blocks: to look through all objects of a test run takes a while."""
        if len(alive) in (1, 5, 13, 26, 39):
            objects = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
            alive.append(sum(1 for o in objects if o.shape == (3, 11, 16)))
        else:
            alive.append(None)

    probe(model, torch.randn(3, 11, 16, generator=seeded(1)), measures="spectral", stations="all", progress=count)
    assert len(alive) == 40
    assert alive[1] is not None
    assert max(number for number in alive[5:] if number is not None) <= alive[1] + 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: probe(make("bert")[0], IDS, measures="spectrall"), "unknown measure 'spectrall'"),
        (lambda: probe(make("bert")[0], IDS, measures=[]), "at least one measure"),
        (lambda: probe(make("bert")[0], IDS, stations="middle"), "unknown station 'middle'"),
        (lambda: probe(make("bert")[0], "text"), "pass tokenizer="),
        (lambda: probe(make("bert")[0], []), "at least one batch"),
        (lambda: probe(make("bert")[0].to("meta"), IDS), "meta device"),
        (lambda: probe(nn.Linear(2, 2), torch.ones(1, 2)), "no repeated blocks"),
        (lambda: probe(make("bert")[0], IDS, blocks="decoder.*"), "no module is named"),
        (
            lambda: probe(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)), torch.ones(1, 3, 4, 4)),
            r"expected tokens \(batch, n, d\)",
        ),
        (lambda: probe(make("encoder")[0], {"x": TOKENS, "mask": torch.ones(2, 9)}), r"mask is \(2, 9\)"),
    ],
)
def test_mistakes_are_refused_with_a_message(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="expected a tensor, a dict batch"):
        probe(make("bert")[0], 7)


def test_half_precision_and_autocast():
    model, inputs = make("bert")
    reference = probe(model, inputs).curve("token_similarity")
    profile = probe(model.to(torch.bfloat16), inputs)
    assert profile.metadata["dtype"] == "bfloat16"
    np.testing.assert_allclose(profile.curve("token_similarity"), reference, atol=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = probe(make("bert")[0], inputs, measures="spectral")
    np.testing.assert_allclose(mixed.curve("token_similarity"), reference, atol=0.02)


def test_compiled_models_are_probed_uncompiled():
    model, inputs = make("bert")
    profile = probe(torch.compile(model, backend="eager"), inputs)
    assert "the model was compiled" in profile.metadata["notes"][0]
    assert profile.curve("token_similarity") == probe(model, inputs).curve("token_similarity")
    in_place, _ = make("bert")
    in_place.compile(backend="eager")
    before = in_place._compiled_call_impl
    assert probe(in_place, inputs).curve("token_similarity") == profile.curve("token_similarity")
    assert in_place._compiled_call_impl is before


def test_the_anatomy_is_not_changed_by_a_probe():
    model, inputs = make("albert")
    profile = probe(model, inputs)
    assert profile.metadata["shared_weights"] is True
    assert len(anatomy_of(model).blocks) == 1


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon-mamba"])
def test_state_space_models_are_measured_and_have_no_attention(name: str):
    model, inputs = make(name)
    profile = probe(model, inputs, measures=["light", "spectral"], stations="all")
    with torch.no_grad():
        states = model.eval()(**inputs, output_hidden_states=True).hidden_states  # what leaves each block, and a norm
    for block, state in enumerate(states[:-1], start=1):
        expected = m.token_similarity(state, inputs["attention_mask"]).numpy()
        np.testing.assert_allclose(values(profile, "token_similarity", block), expected, rtol=1e-6, atol=1e-6)
    assert "branch_ratio" in profile.names("attention_branch")
    assert not profile.names("attention")
    assert profile.metadata["causal"] is True
    assert profile.metadata["notes"][0].startswith("no attention: each block has a mixer")
