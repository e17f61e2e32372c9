"""FeatScale: Y = SA + s⊙DC[SA] + t⊙HC[SA], against the matrices written out, in every family that shows the branch."""

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
from depthscope.remedies import FeatScale, applied
from depthscope.remedies.feat_scale import feat_scaled
from oracles import uniform_matrix
from samples import seeded
from zoo import doubled, run

pytestmark = pytest.mark.filterwarnings("ignore:the remedy goes into")  # said of models with several towers
SHOWN = [name for name, s in zoo.ZOO.items() if "attention_branch" not in s.hides and s.placement != "mixer"]
S, T = torch.randn(2, 16, generator=seeded(5), dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_the_formula_with_its_matrices(causal: bool):
    x = torch.randn(2, 7, 16, generator=seeded(0), dtype=torch.float64) + 1
    uniform = uniform_matrix(7, causal)
    low, high = uniform @ x, (torch.eye(7, dtype=torch.float64) - uniform) @ x
    expected = x + low @ S.diag() + high @ T.diag()
    assert_close(feat_scaled(x, uniform @ x, S, T), expected, rtol=0, atol=1e-13)
    assert not torch.allclose(feat_scaled(x, uniform @ x, T, S), expected)  # which is which matters
    assert torch.equal(feat_scaled(x, low, 0.0, 0.0), x)
    assert_close(feat_scaled(x, low, 0.5, 0.5), 1.5 * x, rtol=0, atol=1e-13)


def branches(model: nn.Module) -> tuple[Machine, dict[int, Any]]:
    found: dict[int, Any] = {}

    def keep(visit: Any, station: str, tokens: Tensor, _source: Tensor) -> None:
        found[visit.number] = (tokens.clone(), visit.real, visit.block)

    return Machine(model, anatomy_of(model), Listen({"attention_branch"}, keep)), found


@pytest.mark.parametrize("name", SHOWN)
def test_the_branch_of_every_block_has_the_formula(name: str):
    specimen = zoo.ZOO[name]
    model, inputs = zoo.make(name)
    model.double().eval()
    attends = [number for number in range(1, specimen.modules + 1) if specimen.attending in (None, (number,))]
    chosen = None if specimen.attending is None else tuple(attends)
    first, before = branches(model)
    with undisturbed(model), first:  # hangs before the remedy, and so sees what it is given
        depthscope.apply(model, FeatScale(blocks=chosen))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "feat_scale" in key:
                    parameter.copy_(S if key.endswith("_s") else T)
        second, after = branches(model)
        with second:
            run(model, doubled(inputs))
    for number in attends:
        given, real, block = before[number]
        causal = bool(specimen.causal or block.part in specimen.causal_parts)
        mean = uniform_matrix(given.shape[1], causal, real) @ given
        expected = given + S * mean + T * (given - mean)
        if real is not None:
            expected = torch.where(real.unsqueeze(-1), expected, given)
        assert_close(after[number][0], expected, rtol=0, atol=1e-9)
        assert not torch.allclose(expected, given, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in SHOWN])
def test_where_there_is_no_branch_it_is_refused_by_name(name: str):
    model, _ = zoo.make(name)
    with pytest.raises(ValueError, match="feat-scale") as refused:
        depthscope.apply(model, FeatScale())
    assert "\n" not in str(refused.value)
    assert not list(hooks_in(model))


def test_a_hybrid_has_it_where_it_attends():
    model, _ = zoo.make("jamba")
    with pytest.raises(ValueError, match="has no attention for feat-scale; blocks= chooses others"):
        depthscope.apply(model, FeatScale())
    depthscope.apply(model, FeatScale(blocks=(2,)))
    assert [entry.block for entry in applied(model)] == ["model.layers.1"]


@pytest.mark.parametrize("name", [name for name in SHOWN if zoo.ZOO[name].attending is None])
def test_at_the_start_nothing_changes_and_everything_learns(name: str):
    model, inputs = zoo.make(name)
    model.eval()
    reference, keys = run(model, inputs), list(model.state_dict())
    depthscope.apply(model, FeatScale())
    assert torch.equal(run(model, inputs), reference)
    run(model, inputs).square().sum().backward()
    own = [key for key in model.state_dict() if key not in keys]
    assert {key.rsplit(".", 1)[-1] for key in own} == {"feat_scale_s", "feat_scale_t"}
    assert all(model.get_parameter(key).shape == (16,) for key in own)
    assert all(model.get_parameter(key).grad is not None for key in own)
    assert all((model.get_parameter(key).grad != 0).any() for key in own if key.endswith("_s"))
    with torch.no_grad():
        for key in own:
            model.get_parameter(key).copy_(S if key.endswith("_s") else T)
    assert not torch.allclose(run(model, inputs), reference, atol=1e-3)
    depthscope.remove(model)
    assert torch.equal(run(model, inputs), reference)
    assert list(model.state_dict()) == keys
    assert not list(hooks_in(model))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal: bool):
    """With respect to the branch, s and t, by finite differences; the mean as the hook computes it."""
    from depthscope.models.token_means import Full
    from depthscope.remedies.means import Uniform

    def scaled(x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return feat_scaled(x, (Uniform() if causal else Full()).mean(x), s, t)

    inputs = [torch.randn(shape, generator=seeded(i), dtype=torch.float64) for i, shape in enumerate([(2, 5, 3), 3, 3])]
    assert torch.autograd.gradcheck(scaled, [x.requires_grad_() for x in inputs])


def test_pytorch_encoders_are_causal_by_the_call():
    model, inputs = zoo.make("torch")
    model.eval()
    depthscope.apply(model, FeatScale(0.8, -0.5))
    x, later = inputs["src"], nn.Transformer.generate_square_subsequent_mask(7)
    changed = x.clone()
    changed[:, 5:] += 1
    with torch.no_grad():
        assert torch.equal(model(x, mask=later)[:, :5], model(changed, mask=later)[:, :5])
    depthscope.apply(depthscope.remove(model), FeatScale(0.8, mixing="full"))
    with pytest.raises(ValueError, match="src_mask or tgt_mask, which may be causal"):
        model(x, mask=later)
