"""Projections per head are the model's own linear layers, cut up: heads, groups, biases; and no part of a graph."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import depthscope
from depthscope.anatomy import anatomy_of
from depthscope.anatomy.projections import fused_projections, fused_values, linear_projections
from depthscope.anatomy.structure import Projections
from samples import seeded
from zoo import ZOO, make

WIDTH, HEADS = 12, 4
X = torch.randn(2, 5, WIDTH, generator=seeded(0), dtype=torch.float64)


def linear(outputs: int, seed: int) -> nn.Linear:
    """Weights and biases drawn: none can stand for another."""
    layer = nn.Linear(WIDTH, outputs).double()
    for number, parameter in enumerate(layer.parameters()):
        nn.init.normal_(parameter, generator=seeded(10 * seed + number))
    return layer


def by_head(tokens: Tensor, heads: int) -> Tensor:
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)  # (batch, h, n, k)


def projected(weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    return X.unsqueeze(1) @ weight + bias.unsqueeze(1)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_separate_layers(groups: int):
    width = WIDTH // HEADS * groups
    query, key, value, output = linear(WIDTH, 1), linear(width, 2), linear(width, 3), linear(WIDTH, 4)
    found = linear_projections(query, key, value, output, HEADS, groups)
    assert_close(projected(found.query, found.query_bias), by_head(query(X), HEADS))
    for name, layer in (("key", key), ("value", value)):
        expected = by_head(layer(X), groups).repeat_interleave(HEADS // groups, dim=1)
        assert_close(projected(getattr(found, name), getattr(found, f"{name}_bias")), expected)
    assert found.output is not None
    assert_close((by_head(X, HEADS) @ found.output).sum(dim=1) + found.output_bias, output(X))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_layer_for_all_three(groups: int, columns: bool):
    """All queries, keys and values one after the other, or group by group."""
    width = WIDTH // HEADS
    layer, output = linear((HEADS + 2 * groups) * width, 1), linear(WIDTH, 2)
    made = layer(X).unflatten(-1, (-1, width)).transpose(1, 2)  # (batch, h + 2g, n, k)
    grouped = made.unflatten(1, (groups, -1))  # (batch, g, h/g + 2, n, k)
    by_group = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    weights = [weight.T if columns else weight for weight in (layer.weight, output.weight)]
    for order, expected in (("stacked", made.split([HEADS, groups, groups], dim=1)), ("interleaved", by_group)):
        found = fused_projections(
            weights[0], layer.bias, weights[1], output.bias, HEADS, groups, order, columns=columns
        )
        assert_close(projected(found.query, found.query_bias), expected[0])
        for name, part in zip(("key", "value"), expected[1:], strict=True):
            repeated = part.repeat_interleave(HEADS // groups, dim=1)
            assert_close(projected(getattr(found, name), getattr(found, f"{name}_bias")), repeated)
        assert_close((by_head(X, HEADS) @ found.output).sum(dim=1) + found.output_bias, output(X))
        values = fused_values(layer(X), order, HEADS, groups)
        assert_close(values, expected[2].transpose(1, 2).flatten(-2))
        assert all(part.numel() for pieces in found.roles.values() for p in pieces for part in p.of(p.parameter))


@pytest.mark.parametrize("name", ZOO)
def test_projections_are_no_part_of_a_graph(name: str):
    model, _ = make(name)
    made = [block.projections() for block in anatomy_of(model).blocks if block.projections is not None]
    assert made or "attention_branch" in ZOO[name].hides or ZOO[name].attending == ()
    for projections in made:
        assert isinstance(projections, Projections)
        tensors = [tensor for tensor in vars(projections).values() if isinstance(tensor, Tensor)]
        assert len(tensors) >= (2 if projections.latent else 3)
        assert not any(tensor.requires_grad for tensor in tensors)


class Adapted(nn.Module):
    """As PEFT wraps a layer: its `weight` is that of the layer inside, and LoRA or DoRA is added in each call."""

    def __init__(self, base_layer: nn.Module, *, turned: bool, dora: bool):
        super().__init__()
        self.base_layer, self.fan_in_fan_out, self.merged, self.disable_adapters = base_layer, turned, False, False
        out, width = self.whole.shape
        self.lora_A, self.lora_B = (
            nn.ModuleDict({"mine": nn.Linear(a, b, bias=False), "other": nn.Linear(a, b, bias=False)})
            for a, b in ((width, 2), (2, out))
        )
        self.active_adapters, self.scaling = ["mine"], {"mine": 3.0, "other": 5.0}
        self.lora_magnitude_vector = nn.ModuleDict()
        if dora:
            self.lora_magnitude_vector["mine"] = nn.Module()
            self.lora_magnitude_vector["mine"].weight = nn.Parameter(1 + torch.rand(out, generator=seeded(5)))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]

    @property
    def whole(self) -> Tensor:
        return self.weight.T if self.fan_in_fan_out else self.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.whole
        if not self.disable_adapters:
            weight = weight + 3 * self.lora_B["mine"].weight @ self.lora_A["mine"].weight
            for magnitude in self.lora_magnitude_vector.values():
                weight = magnitude.weight.unsqueeze(1) * F.normalize(weight, dim=1)
        return F.linear(x, weight, self.bias)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("name", "layers"), [("llama", ("v_proj", "o_proj")), ("gpt2", ("c_attn", "c_proj"))], ids=["llama", "gpt2"]
)
def test_the_weight_that_is_read_is_the_one_that_is_in_force(name: str, layers: tuple[str, ...], dora: bool):
    model, inputs = make(name)
    for attention in [block.attention for block in anatomy_of(model).blocks]:
        assert attention is not None
        for layer in layers:
            setattr(attention, layer, Adapted(getattr(attention, layer), turned=name == "gpt2", dora=dora))
    block, seen = anatomy_of(model).blocks[1], {}
    assert block.attention is not None
    read, last = (getattr(block.attention, layer) for layer in layers)
    hooks = [layer.register_forward_hook(lambda m, a, out: seen.update({m: (a[0], out)})) for layer in (read, last)]
    with torch.no_grad():
        model(**inputs)
        for hook in hooks:
            hook.remove()
        assert block.projections is not None
        shown = block.projections()
        assert shown.output is not None
        (x, given), (context, branch) = seen[read], seen[last]
        values = x.unsqueeze(1) @ shown.value + (0 if shown.value_bias is None else shown.value_bias.unsqueeze(1))
        heads, groups = len(shown.value), 2 if name == "llama" else 4
        expected = by_head(given[..., -given.shape[-1] // (1 if name == "llama" else 3) :], groups)
        assert_close(values, expected.repeat_interleave(heads // groups, dim=1), rtol=1e-4, atol=1e-5)
        summed = (by_head(context, heads) @ shown.output).sum(dim=1)
        assert_close(summed + (0 if shown.output_bias is None else shown.output_bias), branch, rtol=1e-4, atol=1e-5)
    assert "values_output_gradient" in depthscope.probe(model, inputs, gradients=True).names()
    with_adapters = depthscope.spectra(model, whole=False).by_block["spectral_radius"]
    last.disable_adapters = True
    assert depthscope.spectra(model, whole=False).by_block["spectral_radius"][2] != with_adapters[2]


def test_an_adapter_of_another_kind_is_refused():
    model, _ = make("llama")
    attention = anatomy_of(model).blocks[0].attention
    assert attention is not None
    attention.v_proj = Adapted(attention.v_proj, turned=False, dora=False)
    attention.v_proj.lora_A = None
    with pytest.raises(ValueError, match="merge the adapter"):
        depthscope.spectra(model)
