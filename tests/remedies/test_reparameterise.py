"""H = VΛV⁻¹: the spectrum stays in its interval, also after training; what was there comes back, or is baked in."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close

import depthscope
import zoo
from depthscope.anatomy import anatomy_of
from depthscope.hooks.staying import hooks_in
from depthscope.inputs import batches
from depthscope.models import BlockConfig, Encoder
from depthscope.remedies import Reparameterise, applied, restore
from depthscope.remedies.reparameterise import Clipped
from samples import seeded
from zoo import run

SQUARE = ["encoder", "encoder-pre", "causal-lm", "transformer-xl", "bert", "roberta", "albert", "distilbert", "vit",
          "deit", "opt", "t5-encoder", "t5", "bart", "deberta", "clip", "gptj"]  # fmt: skip
KINDS = ("encoder-pre", "bert", "albert", "opt", "t5", "clip", "gptj")  # the others are for `make test-all`


def products(model: nn.Module) -> list[Tensor]:
    """H_h of each block, (h, d, d) in float64, from the projections that the anatomy shows."""
    shown = [block.projections() for block in anatomy_of(model).blocks]
    return [p.value.double() @ p.output.double() for p in shown]


def assert_in(values: Tensor, low: float, high: float, precision: float) -> None:
    assert values.imag.abs().max() < precision
    assert low - precision < values.real.min()
    assert values.real.max() < high + precision


def trained(model: nn.Module, inputs: Any, steps: int = 5, lr: float = 0.01) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        run(model, inputs).square().mean().backward()
        optimiser.step()


@pytest.mark.parametrize("interval", ["sharpen", "smooth", (-0.5, 0.25)])
def test_the_spectrum_is_in_the_interval_before_and_after_training(interval: Any):
    model, inputs = zoo.make("bert")
    model.double().eval()
    remedy = Reparameterise(interval)
    depthscope.apply(model, remedy)
    low, high = remedy.bounds
    before = run(model, inputs)
    for training in (False, True):
        if training:
            trained(model, inputs)
            assert not torch.allclose(run(model, inputs), before)
        for entry, heads in zip(applied(model), products(model), strict=True):
            whole = torch.linalg.eigvals(heads.sum(dim=0))
            own = torch.tensor(entry.values["eigenvalues"], dtype=torch.float64)
            assert_in(whole, low, high, 1e-6)  # ties split by the square root of rounding
            assert_close(whole.real.sort().values, own.sort().values, rtol=0, atol=1e-6)
            assert own.min() >= low
            assert own.max() <= high
            for head, share in zip(heads, own.unflatten(0, (4, 4)), strict=True):
                values = torch.linalg.eigvals(head)  # the share of this head, and twelve zeros
                expected = torch.cat([share, torch.zeros(12, dtype=torch.float64)]).sort().values
                assert_close(values.real.sort().values, expected, rtol=0, atol=1e-6)
            assert training or entry.values["condition"] == pytest.approx(1, abs=1e-9)  # V begins orthogonal


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in KINDS else pytest.mark.long) for n in SQUARE])
def test_families_measure_and_train_what_they_compute(name: str):
    """`spectra` reads the weights of this moment, also right after a step; V and Λ learn, in every block."""
    model, inputs = zoo.make(name)
    model.eval()
    keys = list(model.state_dict())
    reference = run(model, inputs)
    depthscope.apply(model, Reparameterise("sharpen"))
    assert set(model.state_dict()) > set(keys)
    trained(model, inputs, steps=2)
    for parameter_name, parameter in model.named_parameters():
        if "reparameterised" in parameter_name and name != "clip":
            assert parameter.grad is not None
            assert (parameter.grad != 0).any()
    found = depthscope.spectra(model).frame
    assert found["real"].between(-1 - 1e-4, 1e-4).all()
    assert found["imag"].abs().max() < 1e-2  # zeros of a head that are split by the root of float32's rounding
    changed = run(model, inputs)
    assert torch.equal(run(copy.deepcopy(model), inputs), changed)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(loaded, inputs), changed)
    fresh, _ = zoo.make(name)
    fresh.eval()
    before = fresh.state_dict()
    kept = {key: value.clone() for key, value in before.items()}
    depthscope.remove(depthscope.apply(fresh, Reparameterise()))
    assert list(fresh.state_dict()) == keys
    assert all(torch.equal(value, kept[key]) for key, value in fresh.state_dict().items())
    assert torch.equal(run(fresh, inputs), reference)


def test_remove_gives_back_what_was_there_and_the_parameters_themselves():
    model, inputs = zoo.make("bert")
    model.eval()
    attention = model.encoder.layer[0].attention
    layers = (attention.self.value, attention.output.dense)
    weights = [(layer.weight, layer.weight.clone(), layer.bias.clone(), type(layer)) for layer in layers]
    depthscope.apply(model, Reparameterise("smooth"))
    trained(model, inputs)
    assert not isinstance(attention.output.dense.weight, nn.Parameter)
    depthscope.remove(model)
    for layer, (parameter, weight, bias, kind) in zip(layers, weights, strict=True):
        assert layer.weight is parameter
        assert torch.equal(parameter, weight)
        assert torch.equal(layer.bias, bias)
        assert type(layer) is kind
        assert "form" not in vars(layer)


def test_gradients():
    """With respect to V and Λ, against finite differences."""
    model, inputs = zoo.make("causal-lm")
    depthscope.apply(model.double().eval(), Reparameterise((-1.5, 0.5)))
    block = model.encoder.blocks[1] if hasattr(model, "encoder") else anatomy_of(model).blocks[1].module

    def loss() -> Tensor:
        return run(model, inputs).sin().sum()

    for parameter in (block.attention.value.weight, block.reparameterised_eigenvalues):
        (gradient,) = torch.autograd.grad(loss(), parameter)
        direction = torch.randn(parameter.shape, generator=seeded(3), dtype=torch.float64)
        step, ends = 1e-6, []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step * direction)
                ends.append(loss())
                parameter.sub_(sign * step * direction)
        assert_close((gradient * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-1, 0), st.floats(0, 1))
def test_a_clipped_eigenvalue_is_at_rest_only_where_its_bound_is_best(at: float, best: float, low: float, high: float):
    """Least squares in an interval: beyond a bound there is a gradient exactly if the best point is not that bound. A
    plain clip, the mutant, has none there."""

    def slope(clip: Any) -> float:
        x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad((clip(x, low, high) - best).square() / 2, x)
        return gradient.item()

    expected = max(high - best, 0.0) if at > high else min(low - best, 0.0) if at < low else at - best
    assert slope(Clipped.apply) == pytest.approx(expected)
    assert at == pytest.approx(min(max(at, low), high)) or slope(torch.clamp) == 0


def test_eigenvalues_that_were_carried_over_a_bound_come_back():
    model, inputs = zoo.make("bert")
    depthscope.apply(model.eval(), Reparameterise("sharpen"))
    eigenvalues = model.encoder.layer[0].reparameterised_eigenvalues
    with torch.no_grad():
        eigenvalues.fill_(0.01)
    assert set(applied(model)[0].values["eigenvalues"]) == {0.0}
    optimiser = torch.optim.Adam([eigenvalues], lr=0.01)
    for _ in range(10):
        optimiser.zero_grad()
        run(model, inputs).sin().sum().backward()
        optimiser.step()
    back = torch.tensor(applied(model)[0].values["eigenvalues"])
    assert 0 < (back < 0).sum() < 16  # those whose gradient leads inwards, and only those


@pytest.mark.parametrize("name", ["bert"])
def test_gradients_move_with_their_weights(name: str):
    model, inputs = zoo.make(name)
    run(model, inputs).sum().backward()
    expected = {
        key: parameter.grad.double() for key, parameter in model.named_parameters() if parameter.grad is not None
    }
    depthscope.remove(depthscope.apply(model, Reparameterise()).double())
    found = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert {gradient.dtype for gradient in found.values()} == {torch.float64}
    assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())


@pytest.mark.parametrize("name", ["bert"])
def test_what_is_frozen_meanwhile_stays_frozen(name: str):
    model, _ = zoo.make(name)
    for learns in (False, True):
        depthscope.apply(model, Reparameterise())
        depthscope.remove(model.requires_grad_(learns))
        assert all(parameter.requires_grad == learns for parameter in model.parameters())


@pytest.mark.parametrize("name", ["bert"])
def test_saved_models_come_back_with_and_without_it(name: str, tmp_path):
    model, inputs = zoo.make(name)
    model.eval()
    depthscope.apply(model, Reparameterise("sharpen"))
    trained(model, inputs)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    assert_close(run(plain, inputs), expected, rtol=1e-5, atol=1e-5)  # what is saved are the weights in force
    loaded = restore(type(model).from_pretrained(tmp_path).eval(), tmp_path)
    assert torch.equal(run(loaded, inputs), expected)
    assert [e.values["eigenvalues"] for e in applied(loaded)] == [e.values["eigenvalues"] for e in applied(model)]


def test_training_goes_on_where_it_stopped(tmp_path):
    """A state_dict and the optimiser's, into a model that was built and treated anew."""

    def build() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model, inputs = zoo.make("vit")
        depthscope.apply(model.eval(), Reparameterise("smooth"))
        return model, inputs, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: nn.Module, inputs: Any, optimiser: torch.optim.Optimizer) -> None:
        optimiser.zero_grad()
        run(model, inputs).square().mean().backward()
        optimiser.step()

    first, inputs, optimiser = build()
    step(first, inputs, optimiser)
    torch.save((first.state_dict(), optimiser.state_dict()), tmp_path / "state.pt")
    step(first, inputs, optimiser)
    second, _, again = build()
    weights, state = torch.load(tmp_path / "state.pt")
    assert second.load_state_dict(weights) == ([], [])  # nothing missing, nothing too much
    again.load_state_dict(state)
    step(second, inputs, again)
    assert torch.equal(run(first, inputs), run(second, inputs))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*function.Function'> should not be:DeprecationWarning")  # Dynamo makes one itself
@pytest.mark.parametrize("name", ["encoder", "bert"])
def test_compiles_without_graph_breaks(name: str):
    model, inputs = zoo.make(name)
    depthscope.apply(zoo.shortened(model.eval()), Reparameterise())
    batch = next(batches(model, inputs))
    eager = run(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(*batch.args, **batch.kwargs)
    compiled = compiled if isinstance(compiled, Tensor) else compiled[0]
    assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    compiled.sum().backward()


def test_half_precision_and_autocast():
    model, inputs = zoo.make("bert")
    depthscope.apply(model.eval(), Reparameterise())
    exact = run(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(run(model, inputs).float(), exact, rtol=0.1, atol=0.1)  # 8 bits, over three blocks
    model.bfloat16()
    assert run(model, inputs).dtype == torch.bfloat16


def test_a_singular_v_is_named_and_its_condition_is_shown():
    model, inputs = zoo.make("encoder")
    depthscope.apply(model.eval(), Reparameterise())
    vectors = model.blocks[1].attention.value.weight
    with torch.no_grad():
        vectors[0] = vectors[1] + 1e-6 * vectors[0]
    assert applied(model)[1].values["condition"] > 1e5 > 10 > applied(model)[0].values["condition"]
    with torch.no_grad():
        vectors.zero_()
    with pytest.raises(ValueError, match=r"'blocks.1': V of H = VΛV⁻¹ is singular"):
        run(model, inputs)
    assert applied(model)[1].values["condition"] == torch.inf
    with torch.no_grad():
        vectors.fill_(torch.nan)  # training has diverged, and somebody looks
    assert np.isnan(applied(model)[1].values["condition"])


def test_what_cannot_be_done_is_refused_in_one_line():
    def refused(name: str, message: str, change: Any = None, **options: Any) -> None:
        model, _ = zoo.make(name)
        if change is not None:
            change(model)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message) as error:
            depthscope.apply(model, Reparameterise(**options))
        assert "\n" not in str(error.value)
        assert not list(hooks_in(model))
        assert all(torch.equal(value, before[key]) or value.isnan().any() for key, value in model.state_dict().items())

    refused("llama", "no grouped queries")
    refused("qwen3", "needs a square V")
    refused("gpt-neox", "separate layers, each nn.Linear")
    refused("torch", "does not show the layers of W_V and W_O")
    refused("mamba", "does not show the layers of W_V and W_O")

    def tied(model: nn.Module) -> None:
        model.encoder.layer[0].attention.self.key.weight = model.encoder.layer[0].attention.self.value.weight

    def pruned(model: nn.Module) -> None:
        prune.l1_unstructured(model.encoder.layer[1].attention.self.value, "weight", 0.5)

    refused("bert", "shares a weight of its attention with 'encoder.layer.0.attention.self.key'", tied)
    refused("bert", r"'encoder.layer.1' \(BertLayer\) has a W_V or W_O that is computed and no parameter", pruned)
    plain = Encoder(1, BlockConfig(8, 1, output_projection=False))
    with pytest.raises(ValueError, match="reparameterise needs separate layers"):
        depthscope.apply(plain, Reparameterise())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": "sharp"}, "interval='sharpen', 'smooth' or"),
        ({"interval": (1, 0)}, "low ≤ high, got"),
        ({"interval": (0, float("inf"))}, "finite numbers"),
        ({"interval": 3}, "or \\(low, high\\), got 3"),
        ({"seed": 0.5}, "seed to be a whole number"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Reparameterise(**options)


def test_transformers_is_not_imported_for_it():
    code = "import sys, depthscope.remedies; assert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
