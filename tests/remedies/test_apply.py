"""Remedies in every family: the tokens are what the definition says, and nothing else changes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import depthscope
import zoo
from depthscope.anatomy import anatomy_of
from depthscope.hooks import Listen, Machine, undisturbed
from depthscope.hooks.staying import hooks_in
from depthscope.models import BlockConfig, VisionTransformer
from depthscope.remedies import DeEscalate, LearnableTau, ResidualWeight, applied, deescalate
from samples import seeded
from zoo import doubled, run

STATIONS = ["input", "after_attention", "ffn_input", "output"]


def tokens_at(model: nn.Module, stations: set[str], **options: Any) -> tuple[Machine, dict[tuple[int, str], Any]]:
    found: dict[tuple[int, str], Any] = {}

    def keep(visit: Any, station: str, tokens: Tensor, _source: Tensor) -> None:
        found[visit.number, station] = (tokens.clone(), visit.real, visit.block)

    return Machine(model, anatomy_of(model), Listen(stations, keep)), found


@pytest.mark.parametrize("name", zoo.ZOO)
def test_tokens_at_the_stations_are_deescalated_on_the_trunk(name: str):
    specimen, (model, inputs) = zoo.ZOO[name], zoo.make(name)
    model.double().eval()
    watched = {*STATIONS, "after_cross_attention", "ffn_branch", "after_ffn"}
    for at in STATIONS:
        remedy = DeEscalate(tau=0.7, at=at)
        if any(remedy.stations_in(block)[0] not in block.spots for block in anatomy_of(model).blocks):
            with pytest.raises(
                ValueError, match=f"does not show its {at}; stations that can be changed: input, output$"
            ):
                depthscope.apply(model, remedy)
            assert specimen.placement in ("parallel", "mixer")
            continue
        listening, before = tokens_at(model, watched)
        with undisturbed(model), listening:  # hangs before the remedy, and so sees what it is given
            depthscope.apply(model, remedy)
            second, after = tokens_at(model, watched)
            with second:
                run(model, doubled(inputs))
        depthscope.remove(model)
        changed = 0
        for (number, station), (given, mask, block) in before.items():
            if (station,) != remedy.stations_in(block):
                continue
            causal = block.part in specimen.causal_parts or specimen.causal
            expected = deescalate(given, 0.7, mask, mixing="prefix" if causal else "full")
            assert_close(after[number, station][0], expected, rtol=0, atol=1e-10)
            changed += 1
            if block.placement != "post" and station.startswith("after_") and (number, "ffn_branch") in after:
                last = "after_cross_attention" if (number, "after_cross_attention") in after else station
                total = after[number, last][0] + after[number, "ffn_branch"][0]
                assert_close(after[number, "output"][0], total, rtol=0, atol=1e-10)  # the trunk itself has changed
        assert changed >= 3


WEIGHED = [name for name, s in zoo.ZOO.items() if s.placement != "post" and "attention_branch" not in s.hides]


@pytest.mark.parametrize("name", WEIGHED)
def test_a_residual_weight_is_on_what_is_really_added(name: str):
    """Behind norms that stand behind the branches: with α = 0 no block adds anything to what it is given."""
    model, inputs = zoo.make(name)
    model.double().eval()
    depthscope.apply(model, ResidualWeight(0.0))
    listening, seen = tokens_at(model, {"input", "output"})
    with undisturbed(model), listening:
        run(model, doubled(inputs))
    for number in range(1, zoo.ZOO[name].blocks + 1):
        assert torch.equal(seen[number, "output"][0], seen[number, "input"][0])


@pytest.mark.parametrize("name", zoo.ZOO)
def test_copies_pickles_and_removal(name: str):
    model, inputs = zoo.make(name)
    model.eval()
    reference, keys = run(model, inputs), list(model.state_dict())
    config = copy.deepcopy(getattr(model, "config", None))
    has_ffn_input = zoo.ZOO[name].placement not in ("parallel", "mixer")
    remedies = [DeEscalate(0.5), DeEscalate(0.3, at="ffn_input" if has_ffn_input else "input")]
    if "attention_branch" not in zoo.ZOO[name].hides:
        remedies.append(ResidualWeight(0.5))
    assert depthscope.apply(model, *remedies) is model
    assert list(model.state_dict()) == keys
    changed = run(model, inputs)
    assert not torch.allclose(changed, reference, atol=1e-3)
    assert torch.equal(run(copy.deepcopy(model), inputs), changed)
    loaded = pickle.loads(pickle.dumps(model)) if zoo.ZOO[name].pickles else copy.deepcopy(model)
    assert torch.equal(run(loaded, inputs), changed)
    for treated in (model, loaded):
        depthscope.remove(treated)
        assert torch.equal(run(treated, inputs), reference)
        assert list(treated.state_dict()) == keys
        assert not list(hooks_in(treated))
    if config is not None:
        assert vars(model.config) == vars(config)


@pytest.mark.parametrize("name", ["encoder", "torch", "bert", "t5"])
def test_a_copy_is_independent_of_the_original(name: str):
    model, inputs = zoo.make(name)
    model.eval()
    depthscope.apply(model, DeEscalate(LearnableTau(0.5)))
    twin = copy.deepcopy(model)
    before = run(twin, inputs)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "deescalation" in key:
                parameter.fill_(3.0)
    assert torch.equal(run(twin, inputs), before)
    assert not torch.equal(run(model, inputs), before)


@pytest.mark.parametrize("name", ["torch", "qwen2", "gpt2", "t5", "encoder"])
def test_a_tau_per_feature_is_as_wide_as_a_token(name: str):
    model, inputs = zoo.make(name)
    depthscope.apply(model, DeEscalate(LearnableTau(0.3, per_feature=True)))
    run(model, inputs).sum().backward()
    widths = {parameter.shape for key, parameter in model.named_parameters() if "deescalation" in key}
    assert widths == {(16,)}


@pytest.mark.parametrize("per_feature", [False, True])
def test_a_learnable_tau_adds_its_own_keys_and_learns(per_feature: bool):
    model, inputs = zoo.make("bert")
    keys = set(model.state_dict())
    depthscope.apply(model, DeEscalate(LearnableTau(0.3, per_feature), blocks=(1, 3)))
    own = set(model.state_dict()) - keys
    assert own == {f"encoder.layer.{i}.deescalation_output_logit" for i in (0, 2)}
    run(model, inputs).square().sum().backward()
    for key in own:
        parameter = model.get_parameter(key)
        assert parameter.shape == ((16,) if per_feature else ())
        assert parameter.grad is not None
        assert (parameter.grad != 0).all()
    taus = torch.tensor([entry.values["tau"] for entry in applied(model)])
    assert_close(taus, torch.full_like(taus, 0.3))
    depthscope.remove(model)
    assert set(model.state_dict()) == keys


def test_every_kth_block_and_chosen_ones():
    model, _ = zoo.make("encoder")
    depthscope.apply(model, DeEscalate(every=2), DeEscalate(at="input", blocks=(1, 3)))
    assert [(entry.block, entry.station) for entry in applied(model)] == [
        ("blocks.0", "input"),
        ("blocks.1", "output"),
        ("blocks.2", "input"),
    ]
    albert, _ = zoo.make("albert")
    with pytest.raises(ValueError, match="share their weights"):
        depthscope.apply(albert, DeEscalate(every=2))
    with pytest.raises(ValueError, match="from 1 to 3"):
        depthscope.apply(model, DeEscalate(at="ffn_input", blocks=(4,)))


def test_the_same_twice_is_an_error_and_leaves_the_model_as_it_was():
    model, inputs = zoo.make("gpt2")
    depthscope.apply(model.eval(), DeEscalate(0.5), ResidualWeight(0.5))
    before, count = run(model, inputs), len(list(hooks_in(model)))
    for remedy in (DeEscalate(0.1), ResidualWeight(0.1)):
        with pytest.raises(ValueError, match="already at the"):
            depthscope.apply(model, DeEscalate(LearnableTau(), at="input"), remedy)
        assert len(list(hooks_in(model))) == count
        assert not any("deescalation" in key for key in model.state_dict())
        assert torch.equal(run(model, inputs), before)
    # In pre-norm, what the FFN's norm is given is one place with two names.
    depthscope.apply(model, DeEscalate(0.5, at="ffn_input"))
    with pytest.raises(ValueError, match="already at the after_attention"):
        depthscope.apply(model, DeEscalate(0.5, at="after_attention"))


def test_residual_weight_scales_what_the_branches_add():
    model, inputs = zoo.make("bert")
    model.double().eval()
    taps, plain = tokens_at(model, {"attention_branch", "ffn_branch", "input"})
    with undisturbed(model), taps:
        depthscope.apply(model, ResidualWeight(0.25))
        second, weighted = tokens_at(model, {"attention_branch", "ffn_branch", "after_attention", "input"})
        with second:
            run(model, inputs)
    for number in (1, 2, 3):
        for branch in ("attention_branch", "ffn_branch"):
            assert_close(weighted[number, branch][0], 0.25 * plain[number, branch][0], rtol=0, atol=1e-12)
        trunk = weighted[number, "input"][0] + weighted[number, "attention_branch"][0]
        assert_close(weighted[number, "after_attention"][0], trunk, rtol=0, atol=1e-12)


def test_residual_weight_reaches_the_cross_attention_of_a_decoder():
    """With a weight of 0 on every branch the trunk carries the decoder's input to its end."""
    model, inputs = zoo.make("t5")
    model.double().eval()
    depthscope.apply(model, ResidualWeight(0.0))
    taps, seen = tokens_at(model, {"input", "output"})
    with undisturbed(model), taps:
        run(model, inputs)
    assert torch.equal(seen[6, "output"][0], seen[4, "input"][0])
    assert not torch.equal(seen[4, "input"][0], seen[1, "input"][0])


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, on import of the compiler
def test_what_cannot_work_is_refused():
    encoder, _ = zoo.make("encoder")
    pooled = VisionTransformer(2, BlockConfig(16, 4), image_size=8, pool="mean")
    with pytest.raises(ValueError, match="mean pooling"):
        depthscope.apply(pooled, DeEscalate(1.0))
    for possible in (DeEscalate(0.9), DeEscalate(1.0, blocks=(1,)), DeEscalate(1.0, at="ffn_input")):
        depthscope.remove(depthscope.apply(pooled, possible))
    with pytest.raises(ValueError, match="apply first, compile after"):
        depthscope.apply(torch.compile(encoder), DeEscalate())
    encoder.compile()
    with pytest.raises(ValueError, match="apply first, compile after"):
        depthscope.apply(encoder, DeEscalate())
    xlnet, _ = zoo.make("xlnet")
    with pytest.raises(ValueError, match="attention_branch"):
        depthscope.apply(xlnet, ResidualWeight(0.5))
    for bad, message in (
        ({"tau": 1.5}, r"tau in \[0, 1\], got 1.5"),
        ({"tau": "auto"}, "LearnableTau"),
        ({"at": "after_ffn"}, "ffn_input, output, got 'after_ffn'"),
        ({"mixing": "mean"}, "got 'mean'"),
        ({"blocks": ()}, "numbers from 1"),
        ({"every": 0}, "at least 1"),
        ({"every": 1.5}, "whole number"),
        ({"tau": torch.tensor(5.0)}, "got 5.0"),
        ({"leave_alone": (-1,)}, "numbers of tokens from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            DeEscalate(**bad)
    with pytest.raises(ValueError, match="both excluded"):
        LearnableTau(1.0)
    with pytest.raises(ValueError, match=r"or LearnableTau\(…\), got 'recommended'"):
        DeEscalate("recommended")


def test_arguments_of_the_wrong_kind_are_refused():
    model, _ = zoo.make("encoder")
    for wrong in (DeEscalate, 0.5):
        with pytest.raises(ValueError, match="expected remedies"):
            depthscope.apply(model, wrong)
    with pytest.raises(ValueError, match="at most 3, the model's depth"):
        depthscope.apply(model, DeEscalate(every=99))
    assert DeEscalate(torch.tensor(0.5)).tau == 0.5


def test_masks_of_unknown_names_are_told_of_and_the_token_axis_can_be_given():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Mix(), Mix()])

        def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
            return self.layers[1](self.layers[0](x))

    model, x = Wrapped(), torch.randn(5, 2, 8, generator=seeded(0))  # (n, batch, d)
    depthscope.apply(model, DeEscalate(0.5), causal=False, token_axis=0)
    changed = x.clone()
    changed[:, 1] += 1
    assert torch.equal(model(x)[:, 0], model(changed)[:, 0])
    with pytest.warns(UserWarning, match="pad_mask: not understood"):
        model(x, pad_mask=torch.ones(2, 5))


def test_named_blocks_of_a_known_family_keep_its_anatomy():
    model, inputs = zoo.make("torch-tokens-first")
    model.eval()
    depthscope.apply(model, DeEscalate(0.5), blocks="layers.*")
    named = run(model, inputs)
    depthscope.apply(depthscope.remove(model), DeEscalate(0.5))
    assert torch.equal(run(model, inputs), named)


def test_a_model_of_no_family_is_treated_as_causal_unless_configured_or_found_out():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x.mean(dim=1, keepdim=True))

    model, x = nn.Sequential(Mix(), Mix()), torch.randn(2, 5, 8, generator=seeded(0))
    with pytest.warns(UserWarning, match="cannot tell whether"):
        depthscope.apply(model, DeEscalate())
    depthscope.remove(model)
    with pytest.raises(ValueError, match="may be causal"):
        depthscope.apply(model, DeEscalate(mixing="full"))
    for options in ({"causal": False}, {"inputs": x}):
        depthscope.apply(model, DeEscalate(), **options)
        assert_close(model(x).mean(dim=1), torch.zeros(2, 8), rtol=0, atol=1e-6)
        depthscope.remove(model)


def test_pytorch_encoders_are_causal_by_the_call():
    model, inputs = zoo.make("torch")
    model.eval()
    x = inputs["src"]
    depthscope.apply(model, DeEscalate())
    assert_close(model(x).mean(dim=1), torch.zeros(2, 16), rtol=0, atol=1e-6)
    later = nn.Transformer.generate_square_subsequent_mask(7)
    changed = x.clone()
    changed[:, 5:] += 1
    with torch.no_grad():
        assert torch.equal(model(x, mask=later)[:, :5], model(changed, mask=later)[:, :5])
    depthscope.remove(model)
    depthscope.apply(model, DeEscalate(mixing="full"))
    with pytest.raises(ValueError, match="src_mask"):
        model(x, mask=later)


@pytest.mark.parametrize("axis", [0, 1])
def test_pytorch_decoders_are_causal_by_the_call(axis: int):
    """Whichever axis the tokens stand on: no sample sees another, and none of its tokens a later one."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 4, 24, batch_first=axis == 1)
    model = nn.TransformerDecoder(layer, 3).eval()
    depthscope.apply(model, DeEscalate(0.5))
    x, memory = zoo.TOKENS, zoo.TOKENS.flip(1)
    later = nn.Transformer.generate_square_subsequent_mask(7)

    def outputs(tokens: Tensor, **masks: Tensor) -> Tensor:
        with torch.no_grad():
            given = [y if axis == 1 else y.transpose(0, 1) for y in (tokens, memory)]
            found = model(*given, **masks)
        return found if axis == 1 else found.transpose(0, 1)

    changed = x.clone()
    changed[0, 5:] += 1
    before, after = outputs(x, tgt_mask=later), outputs(changed, tgt_mask=later)
    assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert_close(before[1], after[1], rtol=0, atol=1e-6)
    assert not torch.allclose(outputs(x)[0, :5], outputs(changed)[0, :5], atol=1e-3)  # nothing is hidden
    depthscope.remove(model)
    depthscope.apply(model, DeEscalate(0.5, mixing="full"))
    with pytest.raises(ValueError, match="tgt_mask"):
        outputs(x, tgt_mask=later)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fused_path_of_pytorch_is_switched_off_and_on_again():
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    inputs = {"src": zoo.TOKENS, "src_key_padding_mask": zoo.MASK == 0}
    with torch.no_grad():
        fused = model(**inputs)
        depthscope.apply(model, DeEscalate())
        inside = zoo.MASK.bool().unsqueeze(-1)
        total = torch.where(inside, model(**inputs), 0.0).sum(dim=1)
        assert_close(total, torch.zeros(2, 16), rtol=0, atol=1e-5)
        assert not model.use_nested_tensor
        depthscope.remove(model)
        assert model.use_nested_tensor
        assert torch.equal(model(**inputs), fused)


class Plain(nn.Module):
    """A block of no known family, of which nobody knows whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_where_causality_is_not_known_the_prefix_mean_is_taken():
    model = nn.Sequential(*(Plain() for _ in range(3)))
    with pytest.warns(UserWarning, match="cannot tell whether this model is causal: the prefix mean is used"):
        depthscope.apply(model, DeEscalate(0.5))
    expected = zoo.TOKENS
    for block in model:
        expected = deescalate(block.linear(expected), 0.5, mixing="prefix")
    assert_close(model(zoo.TOKENS), expected)
    depthscope.apply(depthscope.remove(model), DeEscalate(0.5), causal=False)
    assert not torch.allclose(model(zoo.TOKENS), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "torch"])
def test_remove_leaves_nothing_in_any_store_of_hooks(name: str):
    model, inputs = zoo.make(name)
    depthscope.apply(model, DeEscalate(0.5), ResidualWeight(0.5))
    run(model, inputs)
    depthscope.remove(model)
    left = [(key, store) for module in model.modules() for key, store in vars(module).items() if "hooks" in key]
    assert left
    assert [key for key, store in left if store] == []
