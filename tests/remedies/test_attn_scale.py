"""AttnScale: the fused form is Â V with the n × n matrix written out, in every family that shows its attention."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import depthscope
import zoo
from depthscope.anatomy import anatomy_of
from depthscope.hooks.staying import hooks_in
from depthscope.models import BlockConfig, Encoder
from depthscope.remedies import AttnScale, applied
from depthscope.remedies.attn_scale import scaled_context
from oracles import uniform_matrix
from samples import seeded
from zoo import doubled, run

OMEGA = torch.tensor([0.5, -0.3, 1.0, 0.0], dtype=torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore:the remedy goes into")  # said of models with several towers
SHOWN = [
    name
    for name, specimen in zoo.ZOO.items()
    if "context" not in specimen.hides and specimen.attending is None and name != "xlnet"
]
HIDDEN = [name for name in zoo.ZOO if name not in SHOWN]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_the_affine_form_is_the_matrix(causal: bool, groups: int):
    """Â_h V_h = (11ᵀ/n + (1 + ω_h)(A_h − 11ᵀ/n)) V_h head by head."""
    n, width = 7, 3
    scores = torch.randn(2, 4, n, n, generator=seeded(0), dtype=torch.float64)
    values = torch.randn(2, groups, n, width, generator=seeded(1), dtype=torch.float64)
    uniform = uniform_matrix(n, causal)
    attention = scores.masked_fill(uniform == 0, -torch.inf).softmax(dim=-1)
    by_head = values.repeat_interleave(4 // groups, dim=1)
    scaled = uniform + (1 + OMEGA)[:, None, None] * (attention - uniform)
    expected = (scaled @ by_head).transpose(1, 2).flatten(2)
    context = (attention @ by_head).transpose(1, 2).flatten(2)
    mean = (uniform @ values).transpose(1, 2).flatten(2)
    assert_close(scaled_context(context, mean, OMEGA), expected, rtol=0, atol=1e-13)
    assert not torch.allclose(scaled_context(context, 0 * mean, OMEGA), expected)  # the mean of V matters
    assert torch.equal(scaled_context(context, mean, torch.zeros(4)), context)


def heard(model: nn.Module, inputs: Any) -> dict[tuple[str, str], Tensor]:
    """Values and context of every block, the context as the output projection reads it, behind the remedy."""
    found: dict[tuple[str, str], Tensor] = {}
    handles = []
    for block in anatomy_of(model).blocks:
        cut = None
        spot = block.values
        if block.fused_values is not None:
            spot, cut = block.fused_values.spot, block.fused_values.cut

        def keep_values(_m: Any, _args: Any, out: Tensor, name: str = block.name, cut: Any = cut) -> None:
            found[name, "values"] = out if cut is None else cut(out)

        def keep_context(_m: Any, args: Any, name: str = block.name) -> None:
            found[name, "context"] = args[0].clone()

        handles.append(spot.module.register_forward_hook(keep_values))
        handles.append(block.context.module.register_forward_pre_hook(keep_context))
    run(model, inputs)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", SHOWN)
def test_the_first_block_of_every_family_has_the_formula(name: str):
    """Each block with the same input: only one block has the remedy, so that its values and attention stay the same."""
    model, inputs = zoo.make(name)
    specimen = zoo.ZOO[name]
    model.double().eval()
    anatomy = anatomy_of(model)
    shared = len(anatomy.blocks) < specimen.blocks
    first = anatomy.blocks[0]
    if shared:
        model.config.num_hidden_layers = 1  # ALBERT: run once
    before = heard(model, doubled(inputs))
    depthscope.apply(model, AttnScale(blocks=None if shared else (1,)))
    with torch.no_grad():
        first.module.attn_scale_omega.copy_(OMEGA)
    after = heard(model, doubled(inputs))
    values, context = before[first.name, "values"], before[first.name, "context"]
    mask = specimen.mask_of(1)
    real = None if mask is None else mask.bool()
    causal = bool(specimen.causal or first.part in specimen.causal_parts)
    uniform = uniform_matrix(context.shape[1], causal, real)
    expected = scaled_context(context, uniform @ values, OMEGA)
    if real is not None:
        expected = torch.where(real.unsqueeze(-1), expected, context)
    assert_close(after[first.name, "context"], expected, rtol=0, atol=1e-10)
    assert not torch.allclose(expected, context, atol=1e-3)


@pytest.mark.parametrize("name", HIDDEN)
def test_where_attention_cannot_be_reached_it_is_refused_by_name(name: str):
    model, _ = zoo.make(name)
    with pytest.raises(ValueError, match="attn-scale cannot be put in there") as refused:
        depthscope.apply(model, AttnScale())
    assert "\n" not in str(refused.value)
    assert not list(hooks_in(model))


@pytest.mark.parametrize("name", SHOWN)
def test_at_the_start_nothing_changes_and_everything_learns(name: str):
    model, inputs = zoo.make(name)
    model.eval()
    reference, keys = run(model, inputs), list(model.state_dict())
    depthscope.apply(model, AttnScale())
    assert torch.equal(run(model, inputs), reference)
    run(model, inputs).square().sum().backward()
    own = [key for key in model.state_dict() if key not in keys]
    used = [model.get_parameter(key).grad for key in own]
    assert own
    assert all(key.endswith(".attn_scale_omega") for key in own)
    assert all(gradient is not None for gradient in used)
    if name != "clip":  # whose text is read at its first token here: nothing comes before it
        assert all((gradient != 0).all() for gradient in used)
    with torch.no_grad():
        for key in own:
            model.get_parameter(key).fill_(0.5)
    assert not torch.allclose(run(model, inputs), reference, atol=1e-3)
    depthscope.remove(model)
    assert torch.equal(run(model, inputs), reference)
    assert list(model.state_dict()) == keys
    assert not list(hooks_in(model))


@pytest.mark.parametrize("name", ["encoder", "causal-lm", "gpt2"])
def test_gradients(name: str):
    """Against finite differences: with respect to ω, and through the mean to the weights of the values."""
    model, inputs = zoo.make(name)
    model.double().eval()
    depthscope.apply(model, AttnScale(0.3, blocks=(2,)))
    block = anatomy_of(model).blocks[1]
    values = block.fused_values.spot if block.fused_values else block.values
    for parameter in (block.module.attn_scale_omega, values.module.weight):

        def loss() -> Tensor:
            return run(model, doubled(inputs)).sin().sum()

        (gradient,) = torch.autograd.grad(loss(), parameter)
        direction = torch.randn(parameter.shape, generator=seeded(3), dtype=torch.float64)
        step, there_and_back = 1e-5, []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step * direction)
                there_and_back.append(loss())
                parameter.sub_(sign * step * direction)
        numeric = (there_and_back[0] - there_and_back[1]) / (2 * step)
        assert_close((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-8)  # O(step²) and rounding over step


def test_a_fixed_omega_adds_no_keys_and_is_listed():
    model, inputs = zoo.make("bert")
    keys = list(model.state_dict())
    reference = run(model.eval(), inputs)
    depthscope.apply(model, AttnScale(0.5, learnable=False))
    assert list(model.state_dict()) == keys
    fixed = run(model, inputs)
    assert not torch.allclose(fixed, reference, atol=1e-3)
    assert [entry.values["omega"] for entry in applied(model)] == [0.5] * 3
    assert [entry.station for entry in applied(model)] == ["context"] * 3
    depthscope.apply(depthscope.remove(model), AttnScale(0.5))
    assert torch.equal(run(model, inputs), fixed)
    with pytest.raises(ValueError, match="already at the context"):
        depthscope.apply(model, AttnScale())


def test_values_that_are_computed_anew_from_a_cache_are_refused():
    """DeepSeek keeps narrow keys and values, and makes the values of all tokens of them in each call."""
    model, _ = zoo.make("deepseek")
    depthscope.apply(model.eval(), AttnScale(0.8))
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with pytest.raises(ValueError, match="with use_cache=False"):
        model.generate(zoo.IDS, use_cache=True, **options)
    assert model.generate(zoo.IDS, use_cache=False, **options).shape == (2, 10)


def test_it_sharpens():
    """ω > 0 amplifies what is not the mean: the tokens of a deep encoder stay less alike."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Encoder(6, BlockConfig(32, 4))
    x = torch.randn(2, 16, 32, generator=seeded(1))

    def similarity() -> float:
        return depthscope.probe(model, x).curve("token_similarity")[-1]

    plain = similarity()
    depthscope.apply(model, AttnScale(2.0, learnable=False))
    sharp = similarity()
    depthscope.apply(depthscope.remove(model), AttnScale(-1.0, learnable=False))
    assert sharp < plain < similarity()  # ω = −1: every token gets the mean
