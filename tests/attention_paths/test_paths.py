"""`paths` against every path by itself, in every family, and that nothing is left behind."""

import copy
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import depthscope
from attention_paths import naive as oracle
from depthscope.attention_paths import CONSTANT, PathShares, attention_rules, paths, rules
from depthscope.attention_paths.path_tensor import Call, terms_of
from depthscope.attention_paths.terms import Terms, added
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
    for part in parts_of(model, inputs):
        found = paths(model, inputs, keep_terms=True, part=part)
        assert found.metadata["largest_error"] < 1e-10
        assert found.terms is not None
        assert found.terms.shape[0] == found.depth + 2
        sums = found.frame.groupby("sample")["projection_share"].sum()
        assert_close(torch.tensor(sums.to_numpy()), torch.ones(len(sums), dtype=torch.float64), **EXACT)
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


def test_padding_changes_nothing():
    model, inputs = ready("bert")
    other = {**inputs, "input_ids": torch.where(MASK.bool(), IDS, 7)}
    first, second = (paths(model, given) for given in (inputs, other))
    for name in ("frame", "blocks"):
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
    paths(model, inputs)
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


def forgets_biases(call: Call) -> Terms:
    x, weight = call.args[:2]
    return terms_of(x).map(lambda values: values @ weight.T)


def each_term_by_itself(call: Call) -> Terms:
    return terms_of(call.args[0]).map(lambda values: call.func(values, *call.args[1:], **call.kwargs))


def mixes_heads_up(call: Call) -> Terms:
    return attention_rules.fused(replace(call, args=(call.args[0].flip(1), *call.args[1:])))


@pytest.mark.parametrize(
    ("function", "mutant"),
    [
        ("linear", forgets_biases),
        ("layer_norm", each_term_by_itself),
        ("scaled_dot_product_attention", mixes_heads_up),
        ("gelu", each_term_by_itself),
    ],
)
def test_mutants_do_not_add_up(monkeypatch: pytest.MonkeyPatch, function: str, mutant):
    model, inputs = ready("bert")
    monkeypatch.setitem(rules.RULES, function, rules.RULES[function]._replace(terms=mutant))
    with pytest.raises(ValueError, match=r"block 1 \(encoder.layer.0\): its terms differ from its output"):
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
    found = paths(own_model(torch.nn.functional.gelu), x, keep_terms=True)
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
    found = paths(model, inputs)
    found.save(tmp_path / "kept")
    again = PathShares.load(tmp_path / "kept")
    for name in ("frame", "blocks"):
        pd.testing.assert_frame_equal(getattr(found, name), getattr(again, name))
    assert str(again) == str(found)
    assert again.counts == dict(enumerate(path_counts(3, 4)))
    (tmp_path / "kept" / "blocks.parquet").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"blocks\.parquet is damaged: it is not what was written"):
        PathShares.load(tmp_path / "kept")
    with pytest.raises(ValueError, match="no path shares"):
        PathShares.load(tmp_path)


def test_looking_at_them():
    model, inputs = ready("gpt2")
    found = paths(model, inputs)
    lines = str(found).splitlines()
    assert lines[0] == "GPT2LMHeadModel: 3 blocks, 125 paths, 2 samples"
    assert [line.split()[0] for line in lines[2:-1]] == ["0", "1", "2", "3", "constant"]
    assert len(found.plot().axes) == 3  # two panels, one of them with a colour bar
    assert repr(found) == "<PathShares of GPT2LMHeadModel: 3 blocks>"
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


def test_tracks_of_several_lengths_add_up():
    values = torch.arange(24.0).reshape(4, 2, 3)
    a, b = Terms(values, start=0), Terms(values[:3] + 1, start=2)
    for x, y in ((a, b), (b, a)):
        total = added(x, y)
        assert (total.start, total.end) == (0, 4)
        assert_close(total.whole(), a.whole() + b.whole())
        assert_close(total.values[3], values[3] + values[1] + 1)
    assert_close(values, torch.arange(24.0).reshape(4, 2, 3))  # not written into


def test_warnings_stay_away():
    model, inputs = ready("swin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not paths(model, inputs).frame.empty
