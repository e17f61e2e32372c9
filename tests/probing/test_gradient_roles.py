"""Gradients by role: they add up to the whole, are autograd's own of unfused layers, and vanish as planted."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from depthscope import probe
from depthscope.anatomy import Anatomy, anatomy_of
from depthscope.anatomy.roles import roles_of
from depthscope.anatomy.structure import Piece
from depthscope.hooks import undisturbed
from depthscope.inputs import batches
from depthscope.models import BlockConfig, Encoder
from depthscope.probing.gradients import gradient_norms
from depthscope.probing.roles import MEASURES, Roles
from samples import seeded
from zoo import KIN, TOKENS, ZOO, make

QUERIES_KEYS = {"query", "key", "q_proj", "k_proj", "q_lin", "k_lin", "query_proj", "key_proj", "q", "k"}
VALUES = {"value", "v_proj", "v_lin", "value_proj", "v"}
FUSED = ("c_attn", "Wqkv", "qkv_proj", "query_key_value", "kv_b_proj", "in_proj_weight", "qkv")
CROSS = ("crossattention", "encoder_attn", "EncDecAttention", "multihead_attn")
TAKEN_APART = [*ZOO, "blip-vision"]  # the one fused layout that has no line of its own in the zoo


def norms_of(model: nn.Module, inputs: Any, anatomy: Anatomy | None = None) -> dict[int, dict[str, float]]:
    """By block, the norms of gradients in float64 where the model takes it."""
    anatomy = anatomy or anatomy_of(model)
    with undisturbed(model):
        rows = gradient_norms(model, anatomy, next(batches(model, inputs)), None, 0, Roles(anatomy))
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.measure != "output_gradient":
            found.setdefault(row.block, {})[row.measure] = row.values[0]
    return found


@pytest.mark.parametrize("name", TAKEN_APART)
def test_roles_add_up_to_the_whole(name: str):
    model, inputs = make(name)
    specimen = (ZOO | KIN)[name]
    found = norms_of(model, inputs)
    if specimen.modules < specimen.blocks:
        assert found == {}  # one set of weights has one gradient
        return
    assert len(found) == specimen.blocks
    for block, norms in found.items():
        parts = [norms[measure] for measure in MEASURES.values() if measure in norms]
        assert math.hypot(*parts) == pytest.approx(norms["weight_gradient"], rel=1e-12)
        attends = specimen.attending is None or block in specimen.attending
        assert ("queries_keys_gradient" in norms) == ("values_output_gradient" in norms) == attends


@pytest.mark.parametrize("name", TAKEN_APART)
def test_roles_are_those_that_the_names_of_the_layers_say(name: str):
    """Of layers that are not fused: query and key by name, values and FFN too. Each number has one role."""
    model, _ = make(name)
    for block in anatomy_of(model).blocks:
        roles = roles_of(block)
        by_id = {id(p): role for role, pieces in roles.items() for piece in pieces for p in [piece.parameter]}
        names = dict(block.module.named_parameters())
        assert {id(p) for p in names.values()} == set(by_id)
        total = sum(part.numel() for pieces in roles.values() for piece in pieces for part in piece.of(piece.parameter))
        assert total == sum(p.numel() for p in names.values())
        for path, parameter in names.items():
            layers = path.split(".")
            if any(word in path for word in (*FUSED, *CROSS)) or "mamba" in path or "mixer" in path:
                continue
            if QUERIES_KEYS & set(layers):
                assert by_id[id(parameter)] == "queries_keys", path
            elif VALUES & set(layers):
                assert by_id[id(parameter)] == "values_output", path
            elif any("norm" in layer.lower() or layer.startswith("ln_") for layer in layers):
                assert by_id[id(parameter)] == "norms", path
            elif {"mlp", "fc1", "fc2", "intermediate", "ffn"} & set(layers):
                assert by_id[id(parameter)] == "ffn", path


class Apart(nn.Module):
    """A fused layer in three, whose outputs `join` brings into the order of the fused one: autograd does the rest."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None, join: Callable[..., Tensor]):
        super().__init__()
        self.weights = nn.ParameterList([weight.detach().clone() for weight in weights])  # (width, d)
        self.biases = nn.ParameterList([] if biases is None else [bias.detach().clone() for bias in biases])
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        made = [x @ weight.T for weight in self.weights]
        return self.join(*(m + b for m, b in zip(made, self.biases, strict=True)) if self.biases else made)


def side_by_side(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([q, k, v], dim=-1)


def group_by_group(groups: int) -> Callable[..., Tensor]:
    def join(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([part.unflatten(-1, (groups, -1)) for part in (q, k, v)], dim=-1).flatten(-2)

    return join


def apart(layer: Any, sizes: list[int], groups: int | None) -> Apart:
    """Head width 4 everywhere. `groups`: query, key and value stand group by group, as GPT-NeoX writes them."""
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T  # Conv1D
    if groups is None:
        biases = None if layer.bias is None else list(layer.bias.split(sizes))
        return Apart(list(weight.split(sizes)), biases, side_by_side)
    widths = [size // groups for size in sizes]

    def parts(values: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in values.unflatten(0, (groups, -1)).split(widths, dim=1)]

    biases = None if layer.bias is None else parts(layer.bias)
    return Apart(parts(weight), biases, group_by_group(groups))


LAYERS: dict[str, tuple[str, list[int], int | None]] = {  # by hand: the layer, widths of q, k, v, and groups
    "gpt2": ("attn.c_attn", [16, 16, 16], None),
    "modernbert": ("attn.Wqkv", [16, 16, 16], None),
    "blip-vision": ("self_attn.qkv", [16, 16, 16], None),
    "phi3": ("self_attn.qkv_proj", [16, 8, 8], None),
    "gpt-neox": ("attention.query_key_value", [16, 16, 16], 4),
    "bloom": ("self_attention.query_key_value", [16, 16, 16], 4),
    "falcon": ("self_attention.query_key_value", [16, 4, 4], 1),
    "falcon-new": ("self_attention.query_key_value", [16, 8, 8], 2),
    "falcon-one-by-one": ("self_attention.query_key_value", [16, 16, 16], 4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_slices_of_a_fused_layer_are_autograds_own_of_layers_apart(name: str):
    model, inputs = make(name)
    model.double()
    inputs = inputs.double() if isinstance(inputs, Tensor) else inputs
    found = norms_of(model, inputs)
    path, sizes, groups = LAYERS[name]
    anatomy = anatomy_of(model)  # of the fused layers, whose loss is the same
    changed, outputs = [], []
    for block in anatomy.blocks:
        parent, _, leaf = path.rpartition(".")
        output = block.context.module
        layer = getattr(block.module.get_submodule(parent), leaf)
        replacement = apart(layer, sizes, groups)
        setattr(block.module.get_submodule(parent), leaf, replacement)
        changed.append(replacement)
        outputs.append(list(output.parameters()))
    wanted = [p for layer, output in zip(changed, outputs, strict=True) for p in [*layer.parameters(), *output]]
    gradients = dict(zip(map(id, wanted), autograd(model, inputs, anatomy, wanted), strict=True))
    for number, (layer, output) in enumerate(zip(changed, outputs, strict=True), start=1):
        parts = [*layer.weights, *layer.biases]
        values = {id(p) for p in (parts[2::3])}
        expected = {
            "queries_keys_gradient": [p for p in parts if id(p) not in values],
            "values_output_gradient": [*(p for p in parts if id(p) in values), *output],
        }
        for measure, parameters in expected.items():
            norm = torch.cat([gradients[id(p)].flatten() for p in parameters]).norm().item()
            assert found[number][measure] == pytest.approx(norm, rel=1e-9)


def autograd(model: nn.Module, inputs: Any, anatomy: Anatomy, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    """Of the loss that a probe takes by default."""
    from depthscope.hooks import Listen, Machine
    from depthscope.inputs import call
    from depthscope.probing.gradients import _default_loss

    last: list[Any] = []
    with undisturbed(model), torch.enable_grad():
        keep = Listen({"output"}, lambda visit, _station, _tokens, source: last.append((source, visit.real)))
        with Machine(model, anatomy, keep):
            call(model, next(batches(model, inputs)))
        return torch.autograd.grad(_default_loss(*last[-1], anatomy.token_axis), parameters)


def test_pytorchs_own_attention_in_its_own_unfused_form():
    """nn.MultiheadAttention with kdim and vdim has three matrices: the same numbers, and the same gradients."""
    model, inputs = make("torch")
    model.double()
    inputs = {"src": inputs["src"].double(), "src_key_padding_mask": inputs["src_key_padding_mask"]}
    found, anatomy = norms_of(model, inputs), anatomy_of(model)
    for layer in model.layers:
        attention = layer.self_attn
        attention._qkv_same_embed_dim = False
        for name, part in zip("qkv", attention.in_proj_weight.detach().chunk(3), strict=True):
            setattr(attention, f"{name}_proj_weight", nn.Parameter(part.clone()))
        attention.in_proj_weight = None
    attention = model.layers[1].self_attn
    wanted = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight, attention.out_proj.weight]
    gradients = autograd(model, inputs, anatomy, [*wanted, attention.in_proj_bias, attention.out_proj.bias])
    q, k, v, o, bias, output_bias = gradients
    expected = [
        torch.cat([t.flatten() for t in ts]).norm() for ts in ((q, k, bias[:32]), (v, o, bias[32:], output_bias))
    ]
    assert found[2]["queries_keys_gradient"] == pytest.approx(expected[0].item(), rel=1e-9)
    assert found[2]["values_output_gradient"] == pytest.approx(expected[1].item(), rel=1e-9)


def test_latent_attention_cuts_its_layers_by_row():
    """DeepSeek: rows for keys, rows for values; what both are made from is other."""
    model, _ = make("deepseek")
    (block, *_) = anatomy_of(model).blocks
    attention, roles = block.module.self_attn, roles_of(block)
    for layer, cuts in (
        (attention.kv_b_proj, {"queries_keys": 4 * 4, "values_output": 4 * 3}),
        (attention.kv_a_proj_with_mqa, {"queries_keys": 2, "other": 6}),
    ):
        rows = torch.arange(layer.weight.shape[0]).unsqueeze(1).expand(layer.weight.shape).double()
        seen: list[float] = []
        for role, count in cuts.items():
            pieces = [piece for piece in roles[role] if piece.parameter is layer.weight]
            numbers = [int(n) for piece in pieces for part in piece.of(rows) for n in part.flatten(0, -2)[:, 0]]
            assert len(numbers) == count
            seen += numbers
        assert sorted(seen) == list(range(layer.weight.shape[0]))
    by_head = torch.arange(28).unflatten(0, (4, 7))  # 4 of a key, 3 of a value
    (cut,) = (piece for piece in roles["values_output"] if piece.parameter is attention.kv_b_proj.weight)
    assert cut.of(torch.arange(28))[0].tolist() == by_head[:, 4:].tolist()


# --- planted -------------------------------------------------------------------------------------------


def test_equal_tokens_teach_queries_and_keys_nothing():
    model = Encoder(3, BlockConfig(16, 4), generator=seeded(0)).double()
    equal = TOKENS[:, :1].double().expand(2, 7, 16)
    profile = probe(model, equal, gradients=True)
    queries_keys, values_output = (
        np.array(profile.curve(f"{role}_gradient")[1:]) for role in ("queries_keys", "values_output")
    )
    assert (values_output > 0.1).all()
    assert (queries_keys <= 1e-14 * values_output).all()  # a rounding of float64 at each of some ten sums


def test_a_weight_that_two_blocks_share_is_left_out_and_named():
    model = Encoder(3, BlockConfig(16, 4), generator=seeded(0))
    model.blocks[2].attention.query = model.blocks[0].attention.query
    profile = probe(model, TOKENS, gradients=True)
    (note,) = (note for note in profile.metadata["notes"] if "share" in note)
    assert "blocks.0.attention.query.weight" in note
    assert "blocks.2.attention.query.weight" in note
    one = model.blocks[0].attention
    rest = [*one.key.parameters()]
    gradients = autograd(model, TOKENS, anatomy_of(model), rest)
    expected = torch.cat([g.flatten() for g in gradients]).norm().item()
    assert profile.curve("queries_keys_gradient")[1] == pytest.approx(expected, rel=1e-5)


def test_blocks_of_one_module_say_so():
    model, inputs = make("albert")
    profile = probe(model, inputs, gradients=True)
    assert any("blocks share their weights" in note for note in profile.metadata["notes"])
    assert "queries_keys_gradient" not in profile.names()


def test_what_has_no_role_is_named():
    model, inputs = make("xlnet")
    profile = probe(model, inputs, gradients=True)
    (note,) = (note for note in profile.metadata["notes"] if "by role" in note)
    assert "rel_attn.r" in note
    assert all(norm > 0 for norm in profile.curve("other_gradient")[1:])


def test_cuts_that_leave_something_out_are_refused():
    from dataclasses import replace

    model, _ = make("gpt2")
    (block, *_) = anatomy_of(model).blocks
    made = block.projections()
    pieces = {"queries_keys": (Piece(block.module.attn.c_attn.weight, lambda w: (w[:, :8],)),)}
    wrong = replace(block, projections=lambda: replace(made, roles=pieces))
    with pytest.raises(ValueError, match="take 128 of the 768 numbers"):
        roles_of(wrong)


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, as people write them: it has no `weight` of its own."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_wrapped_layers_keep_their_roles():
    model, inputs = make("llama")
    model.requires_grad_(False)
    layers = model.layers
    for layer in layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)).to(model.dtype))
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj).to(model.dtype)
    profile = probe(model.eval(), inputs, gradients=True, loss=lambda output: output.last_hidden_state.pow(3).mean())
    model(**inputs).last_hidden_state.pow(3).mean().backward()
    for role, name in (
        ("queries_keys", "self_attn.q_proj"),
        ("values_output", "self_attn.v_proj"),
        ("ffn", "mlp.down_proj"),
    ):
        adapters = [layer.get_submodule(name) for layer in layers]
        expected = [math.hypot(*(float(p.grad.norm()) for p in (a.down.weight, a.up.weight))) for a in adapters]
        assert profile.curve(MEASURES[role], "output")[1:] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="expected a linear layer with a weight, got Adapted"):
        anatomy_of(model).blocks[0].projections()
