"""`paths` against every path by itself, in every family, and that nothing is left behind."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import depthscope
from attention_paths import naive as oracle
from depthscope.attention_paths import CONSTANT, PathShares, paths, rules
from depthscope.attention_paths.linear_rules import through_weights
from depthscope.attention_paths.terms import Terms
from depthscope.discovery import anatomy_with_hints
from depthscope.inputs import batches
from depthscope.theory import path_counts
from samples import seeded
from traces import state_of
from zoo import IDS, MASK, ZOO, make

EXACT = {"rtol": 1e-9, "atol": 1e-10}  # float64
STATE_SPACES = {"mamba", "mamba2", "falcon-mamba", "jamba"}  # a product of tokens with tokens, and no attention


def ready(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    """A model whose biases and gains are drawn too, so that nothing of it is 0 or 1, and its inputs."""
    model, inputs = make(name)
    model = model.to(dtype).eval()
    for number, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            drawn = 0.2 * torch.randn(parameter.shape, generator=seeded(number), dtype=dtype)
            parameter.data += drawn
    return model, converted(inputs, dtype)


def converted(inputs: Any, dtype: torch.dtype) -> Any:
    if isinstance(inputs, dict):
        return {key: converted(value, dtype) for key, value in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def parts_of(model: nn.Module, inputs: Any) -> list[str | None]:
    parts = anatomy_with_hints(model, {}, next(batches(model, inputs))).parts
    return list(parts) if len(parts) > 1 else [None]


FFNS = {
    "encoder": lambda block: (block.ffn[0], block.ffn[1], block.ffn[2]),
    "encoder-pre": lambda block: (block.ffn[0], block.ffn[1], block.ffn[2]),
    "bert": lambda block: (block.intermediate.dense, block.intermediate.intermediate_act_fn, block.output.dense),
    "gpt2": lambda block: (block.mlp.c_fc, block.mlp.act, block.mlp.c_proj),
    "vit": lambda block: (block.mlp.fc1, block.mlp.activation_fn, block.mlp.fc2),
}


@pytest.mark.parametrize("name", FFNS)
def test_terms_are_the_sums_of_all_paths(name: str):
    """125 paths, one by one, padding included."""
    model, inputs = ready(name)
    found = paths(model, inputs, keep_terms=True)
    assert found.terms is not None
    assert_close(found.terms, oracle.all_paths(model, inputs, FFNS[name]), **EXACT)
    assert found.terms[-1].abs().max() > 0.01


@pytest.mark.parametrize("name", sorted(ZOO.keys() - STATE_SPACES))
def test_every_family_adds_up(name: str):
    model, inputs = ready(name)
    if name == "llava":
        with pytest.raises(ValueError, match=r"block 1 .* add use_cache=False"):
            paths(model, inputs, part="language", by_head=True)
        inputs["use_cache"] = False
    for part in parts_of(model, inputs):
        found = paths(model, inputs, keep_terms=True, by_head=True, part=part)
        assert found.metadata["largest_error"] < 1e-10
        assert found.terms is not None
        assert found.terms.shape[0] == found.depth + 2
        sums = found.frame.groupby("sample")["projection_share"].sum()
        assert_close(torch.tensor(sums.to_numpy()), torch.ones(len(sums), dtype=torch.float64), **EXACT)
        # A path of length k passes k heads.
        by_length = found.heads.groupby(["sample", "length"])["projection_share"].sum()
        whole = found.frame[found.frame["length"] > 0].set_index(["sample", "length"])["projection_share"]
        expected = whole * whole.index.get_level_values("length")
        assert (by_length - expected).abs().max() < 1e-10
        assert sum(found.counts.values()) == math.prod(h + 1 for h in found.metadata["heads"])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5-encoder", "torch"])
def test_terms_add_up_in_float32(name: str):
    model, inputs = ready(name, torch.float32)
    found = paths(model, inputs, keep_terms=True)
    assert found.terms is not None
    assert found.terms.dtype == torch.float32
    assert found.metadata["largest_error"] < 1e-5


@pytest.mark.parametrize("name", sorted(STATE_SPACES))
def test_state_spaces_are_refused(name: str):
    model, inputs = ready(name)
    with pytest.raises(ValueError, match=r"block 1 \(.*\): a product of tokens with tokens is not linear"):
        paths(model, inputs)


def test_heads_have_the_paths_that_lead_through_them():
    """Every path through one head of block 2, one by one."""
    model, inputs = ready("encoder")
    with_head = paths(model, inputs, keep_terms=True, by_head=True)
    assert with_head.terms is not None
    whole = with_head.terms.sum(dim=0) * MASK.unsqueeze(-1)
    energy = whole.square().sum(dim=(1, 2))
    seen = oracle.look(model, inputs)
    for head in (0, 3):
        chosen = torch.zeros(4, 2, dtype=torch.float64)
        for path in oracle.product(range(5), [head + 1], range(5)):
            y = seen[0].entered["input"]
            for block, choice in zip(seen, path, strict=True):
                y = oracle.through(block, y, choice, False, FFNS["encoder"](block.block.module), "post")
            chosen[sum(h > 0 for h in path)] += (y * whole).sum(dim=(1, 2)) / energy
        rows = with_head.heads.query(f"block == 2 and head == {head}").pivot(index="length", columns="sample")
        assert_close(torch.tensor(rows["projection_share"].to_numpy()), chosen[1:], **EXACT)


def test_padding_changes_nothing():
    model, inputs = ready("bert")
    other = {**inputs, "input_ids": torch.where(MASK.bool(), IDS, 7)}
    first, second = (paths(model, given, by_head=True) for given in (inputs, other))
    for name in ("frame", "blocks", "heads"):
        pd.testing.assert_frame_equal(getattr(first, name), getattr(second, name), rtol=1e-9, atol=1e-12)


def test_measures_are_what_they_say():
    model, inputs = ready("gpt2")
    found = paths(model, inputs, keep_terms=True)
    terms = found.terms * MASK.unsqueeze(-1)  # real tokens alone
    whole = terms.sum(dim=0)
    for sample in range(2):
        rows = found.frame[found.frame["sample"] == sample].set_index("length")
        for length, term in zip([0, 1, 2, 3, CONSTANT], terms[:, sample], strict=True):
            dot, size, own = (term * whole[sample]).sum(), whole[sample].norm(), term.norm()
            expected = {
                "norm_share": own / size,
                "projection_share": dot / size**2,
                "cosine": dot / (size * own),
            }
            for measure, value in expected.items():
                assert rows.loc[length, measure] == pytest.approx(float(value), rel=1e-9)
            kept = term[MASK[sample].bool()]
            residual = kept - kept.mean(dim=0)
            ratio = [(r.abs().sum(0).max() * r.abs().sum(1).max()).sqrt() for r in (residual, kept)]
            assert rows.loc[length, "composite_residual"] == pytest.approx(float(ratio[0] / ratio[1]), rel=1e-9)
    last = found.blocks[found.blocks["block"] == 3].set_index(["sample", "length"])["projection_share"]
    assert (last - found.frame.set_index(["sample", "length"])["projection_share"]).abs().max() < 1e-12


def test_losses_are_those_of_the_tokens_that_are_left():
    model, inputs = ready("gpt2")
    labelled = inputs | {"labels": IDS}
    found = paths(model, labelled, keep_terms=True, loss=True)

    @torch.no_grad()
    def loss_of(tokens: Tensor) -> float:
        logits = model.lm_head(model.transformer.ln_f(tokens))
        return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))

    terms = found.terms
    whole = terms.sum(dim=0)
    expected = {
        ("nothing", CONSTANT): whole,
        ("constant", CONSTANT): whole - terms[-1],
        **{("length", k): whole - terms[k] for k in range(4)},
        **{("above", k): whole - terms[k + 1 : 4].sum(dim=0) for k in range(3)},
        **{("below", k): whole - terms[:k].sum(dim=0) for k in range(1, 4)},
    }
    table = found.losses.set_index(["left_out", "length"])
    assert set(table.index) == set(expected)
    for key, tokens in expected.items():
        assert table.loc[key, "loss"] == pytest.approx(loss_of(tokens), rel=1e-6)
        assert table.loc[key, "change"] == pytest.approx(loss_of(tokens) - loss_of(whole), rel=1e-4, abs=1e-6)
    own = paths(model, inputs, loss=lambda output: output.logits.mean())
    assert len(own.losses) == len(table)
    with pytest.raises(ValueError, match="one number"):
        paths(model, inputs, loss=lambda output: output.logits)


def test_batches_are_samples_one_after_the_other():
    model, inputs = ready("bert")
    halves = [{key: value[i : i + 1] for key, value in inputs.items()} for i in range(2)]
    whole, split = paths(model, inputs, keep_terms=True), paths(model, halves, keep_terms=True)
    assert_close(split.terms, whole.terms, **EXACT)
    pd.testing.assert_frame_equal(split.frame, whole.frame, rtol=1e-9)
    assert paths(model, [IDS, IDS[:, :5]]).metadata["tokens"] == IDS.shape[1]
    with pytest.raises(ValueError, match="batches of one shape"):
        paths(model, [IDS, IDS[:, :5]], keep_terms=True)


@pytest.mark.parametrize("name", ["bert", "llama", "torch", "xlnet", "mixtral", "albert"])
def test_nothing_is_left_behind(name: str):
    model, inputs = ready(name)
    model.train()
    next(iter(model.children())).eval()
    weights, state, random = copy.deepcopy(model.state_dict()), state_of(model), torch.get_rng_state()
    given = copy.deepcopy(inputs)
    paths(model, inputs, by_head=True)
    assert state_of(model) == state
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    pairs = zip(given.values(), inputs.values(), strict=True) if isinstance(given, dict) else [(given, inputs)]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_nothing_is_left_behind_after_a_refusal():
    model, inputs = ready("mamba")
    state = state_of(model)
    with pytest.raises(ValueError, match="not linear"):
        paths(model, inputs)
    assert state_of(model) == state


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_the_pass_itself_is_bitwise_the_same(name: str):
    model, inputs = ready(name)
    with torch.no_grad():
        expected = model(**inputs)[0]
    returned: list[Any] = []
    handle = model.register_forward_hook(lambda _m, _i, output: returned.append(output[0]))
    paths(model, inputs)
    handle.remove()
    assert torch.equal(returned[-1], expected)
    assert type(returned[-1]) is Tensor


def forgets_biases(_func, args, kwargs, _returned):
    x, weight = args[:2]
    return lambda: rules.terms_of(x).map(lambda values: values @ weight.T), ""


def norms_each_track(func, args, kwargs, _returned):
    return lambda: rules.terms_of(args[0]).map(lambda values: func(values, *args[1:], **kwargs)), ""


def mixes_heads_up(func, args, kwargs, returned):
    return rules.attention_rules.fused(func, (args[0].flip(1), *args[1:]), kwargs, returned)


def activates_each_track(func, args, kwargs, _returned):
    return lambda: rules.terms_of(args[0]).map(lambda values: func(values, **kwargs)), "gate"


@pytest.mark.parametrize(
    ("function", "mutant"),
    [
        ("linear", forgets_biases),
        ("layer_norm", norms_each_track),
        ("scaled_dot_product_attention", mixes_heads_up),
        ("gelu", activates_each_track),
    ],
)
def test_mutants_do_not_add_up_and_are_named(monkeypatch: pytest.MonkeyPatch, function: str, mutant):
    model, inputs = ready("bert")
    usual = rules.rule_for
    monkeypatch.setattr(rules, "rule_for", lambda name: mutant if name == function else usual(name))
    with pytest.raises(ValueError, match=rf"block 1 \(encoder.layer.0\): '{function}' does not add up"):
        paths(model, inputs)


class Own(nn.Module):
    """A block of no family."""

    def __init__(self, act):
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.mix(x, x, x)[0])


def own_model(act) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Own(act) for _ in range(3))).eval()


def test_models_of_no_family():
    x = torch.randn(2, 5, 8, generator=seeded(0))
    found = paths(own_model(torch.nn.functional.gelu), x, keep_terms=True, by_head=True)
    assert found.metadata["heads"] == [2, 2, 2]
    with pytest.raises(ValueError, match="'cumprod' is not linear in the tokens, or not known"):
        paths(own_model(lambda y: y.cumprod(-1)), x)
    with pytest.raises(ValueError, match="a product of tokens with tokens"):
        paths(own_model(lambda y: y @ y.mT @ y), x)

    def writes(y: Tensor) -> Tensor:
        y = y + 0
        y[:, 0] = 0
        return y

    with pytest.raises(ValueError, match="writes into a part of a tensor"):
        paths(own_model(writes), x)
    with pytest.raises(ValueError, match="writes tokens into a tensor without paths"):
        paths(own_model(lambda y: torch.zeros(2, 5, 8).add_(y)), x)
    with pytest.raises(ValueError, match="not finite"):
        paths(own_model(torch.nn.functional.gelu), x.masked_fill(x > 1, math.nan))


def test_bad_input_is_refused():
    model, inputs = ready("t5")
    with pytest.raises(ValueError, match=r"several parts \(encoder, decoder\): say which one with part="):
        paths(model, inputs)
    bert, texts = ready("bert", torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected a model in float32 or float64, .* got bfloat16"):
        paths(bert, texts)
    with pytest.raises(ValueError, match="at least one batch"):
        paths(bert, [])
    with pytest.raises(TypeError, match="unexpected option 'parts'"):
        paths(bert, texts, parts="encoder")
    broken, texts = ready("bert")
    broken.encoder.layer[1].output.dense.weight.data[0] = math.nan
    with pytest.raises(ValueError, match=r"block 2 .* not finite"):
        paths(broken, texts)


def test_kept_and_read_again(tmp_path: Path):
    model, inputs = ready("gpt2")
    found = paths(model, inputs, by_head=True, loss=True)
    found.save(tmp_path / "kept")
    again = PathShares.load(tmp_path / "kept")
    for name in ("frame", "blocks", "heads", "losses"):
        pd.testing.assert_frame_equal(getattr(found, name), getattr(again, name))
    assert str(again) == str(found)
    assert again.counts == dict(enumerate(path_counts(3, 4)))
    (tmp_path / "kept" / "heads.parquet").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"heads\.parquet is damaged: it is not what was written"):
        PathShares.load(tmp_path / "kept")
    with pytest.raises(ValueError, match="no path shares"):
        PathShares.load(tmp_path)


def test_looking_at_them():
    model, inputs = ready("gpt2")
    found = paths(model, inputs, by_head=True, loss=True)
    lines = str(found).splitlines()
    assert lines[0] == "GPT2LMHeadModel: 3 blocks, 125 paths, 2 samples"
    assert [line.split()[0] for line in lines[2:-1]] == ["0", "1", "2", "3", "constant"]
    assert found.by_head().shape == (3, 4)
    assert found.by_head(1).to_numpy().sum() == pytest.approx(found.summary().loc[1, "projection_share"])
    assert len(found.plot().axes) == 6  # four panels, two of them with a colour bar
    assert repr(found) == "<PathShares of GPT2LMHeadModel: 3 blocks>"
    with pytest.raises(ValueError, match="by_head=True"):
        paths(model, inputs).by_head()
    assert depthscope.paths is paths


def test_a_softmax_outside_of_attention_is_no_step_of_a_path():
    """A product by it mixes something, and it is not known what."""

    class Soft(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x @ x.mT, dim=-1) @ x

    model, inputs = ready("encoder")
    model.blocks[1].ffn = Soft()
    with pytest.raises(ValueError, match=r"block 2 .*a product of tokens with tokens"):
        paths(model, inputs)


@pytest.mark.parametrize("place", [0, 2, 5])
def test_the_track_that_is_left_over_is_that_track(place: int):
    generator = seeded(0)
    values, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 3, 4), (5, 4)))
    terms, whole = Terms(values, start=1), values.sum(dim=0) @ weight.T
    found = through_weights(terms, weight, whole, place)
    assert_close(found.values, values @ weight.T, **EXACT)
    assert found.start == 1
    with pytest.raises(ValueError, match="'linear' does not add up"):
        through_weights(terms, weight, whole + 0.01, place)


def test_tracks_of_several_lengths_add_up():
    values = torch.arange(24.0).reshape(4, 2, 3)
    a, b = Terms(values, start=0), Terms(values[:3] + 1, start=2)
    for x, y in ((a, b), (b, a)):
        total = rules.added(x, y)
        assert (total.start, total.end) == (0, 4)
        assert_close(total.whole(), a.whole() + b.whole())
        assert_close(total.values[3], values[3] + values[1] + 1)
    assert_close(values, torch.arange(24.0).reshape(4, 2, 3))  # not written into


def test_warnings_stay_away():
    model, inputs = ready("swin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not paths(model, inputs).frame.empty
