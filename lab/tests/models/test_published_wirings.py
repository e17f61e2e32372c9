"""The wirings of other papers, each against its formula written out: in float64, block by block."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import depthscope
from depthscope.anatomy import anatomy_of
from depthscope.hooks import Listen, Machine, undisturbed
from depthscope.models import WIRINGS, BlockConfig, CausalLM, Encoder
from depthscope.remedies import DeEscalate
from depthscope_lab import models as lab
from depthscope_lab.models import TransformerXL, TransformerXLConfig
from depthscope_lab.models.normed_wirings import NormedLinear
from depthscope_lab.models.weighted_wirings import admin_weight, deep_norm_constants, layer_scale_start
from samples import seeded

DEPTH, WIDTH, HEADS = 5, 16, 4
X = torch.randn(2, 6, WIDTH, generator=seeded(0), dtype=torch.float64)
PUBLISHED = [wiring.name for wiring in lab.PUBLISHED]
ONE_STREAM = [name for name in PUBLISHED if not WIRINGS[name].second_stream]


def encoder(name: str, depth: int = DEPTH, **options: Any) -> Encoder:
    """In float64, and all that a wiring adds moved away from where it starts, so that it can be seen."""
    model = Encoder(depth, BlockConfig(WIDTH, HEADS, placement=name, **options), generator=seeded(1)).double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=seeded(len(key)), dtype=torch.float64) / 3)
    return model


def layer_norm(x: Tensor, norm: nn.Module) -> Tensor:
    """The definition, with its ε."""
    centred = x - x.mean(-1, keepdim=True)
    found = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    return found if norm.bias is None else found + norm.bias


def attend(block: Any, x: Tensor, norms: bool = False) -> Tensor:
    """Multi-head attention with its matrices."""
    a = block.attention
    q, k, v = (x @ p.weight.T + p.bias for p in (a.query, a.key, a.value))
    if norms:
        q, k, v = (layer_norm(y, p.norm) for y, p in zip((q, k, v), (a.query, a.key, a.value), strict=True))
    heads = []
    for one in torch.arange(WIDTH).chunk(HEADS):
        scores = q[..., one] @ k[..., one].mT / math.sqrt(WIDTH // HEADS)
        heads.append(scores.softmax(-1) @ v[..., one])
    return torch.cat(heads, -1) @ a.output.weight.T + a.output.bias


def ffn(block: Any, x: Tensor) -> Tensor:
    one, _, two = block.ffn
    return (x @ one.weight.T + one.bias).relu() @ two.weight.T + two.bias


def post(b: Any, x: Tensor) -> Tensor:
    h = layer_norm(x + attend(b, x), b.norm1)
    return layer_norm(h + ffn(b, h), b.norm2)


def pre(b: Any, x: Tensor) -> Tensor:
    x = x + attend(b, layer_norm(x, b.norm1))
    return x + ffn(b, layer_norm(x, b.norm2))


def sandwich(b: Any, x: Tensor) -> Tensor:
    x = x + layer_norm(attend(b, layer_norm(x, b.norm1)), b.norm3)
    return x + layer_norm(ffn(b, layer_norm(x, b.norm2)), b.norm4)


def peri(b: Any, x: Tensor) -> Tensor:
    return sandwich(b, layer_norm(x, b.entrance_norm) if b.number == 1 else x)


def res_post(b: Any, x: Tensor) -> Tensor:
    x = x + layer_norm(attend(b, x), b.norm1)
    return x + layer_norm(ffn(b, x), b.norm2)


def rezero(b: Any, x: Tensor) -> Tensor:
    x = x + b.weight * attend(b, x)
    return x + b.weight * ffn(b, x)


def layer_scale(b: Any, x: Tensor) -> Tensor:
    x = x + attend(b, layer_norm(x, b.norm1)) @ b.gain1.diag()
    return x + ffn(b, layer_norm(x, b.norm2)) @ b.gain2.diag()


def deep_norm(b: Any, x: Tensor) -> Tensor:
    alpha = (2 * DEPTH) ** 0.25
    h = layer_norm(alpha * x + attend(b, x), b.norm1)
    return layer_norm(alpha * h + ffn(b, h), b.norm2)


def admin(b: Any, x: Tensor) -> Tensor:
    h = layer_norm(x @ b.omega1.diag() + attend(b, x), b.norm1)
    return layer_norm(h @ b.omega2.diag() + ffn(b, h), b.norm2)


def b2t(b: Any, x: Tensor) -> Tensor:
    h = layer_norm(x + attend(b, x), b.norm1)
    return layer_norm(x + h + ffn(b, h), b.norm2)


def keel(b: Any, x: Tensor) -> Tensor:
    alpha = 2 * DEPTH
    h = alpha * x + attend(b, layer_norm(x, b.norm1))
    h = h if b.number == 1 else layer_norm(h, b.norm3)
    return layer_norm(alpha * h + ffn(b, layer_norm(h, b.norm2)), b.norm4)


def mix_ln(b: Any, x: Tensor) -> Tensor:
    return post(b, x) if b.number <= DEPTH / 4 else pre(b, x)


def hybrid_norm(b: Any, x: Tensor) -> Tensor:
    if b.number == 1:
        return pre(b, x)
    z = layer_norm(x + attend(b, x, norms=True), b.norm2)
    return z + ffn(b, z)


def ln_scaling(b: Any, x: Tensor) -> Tensor:
    x = x + attend(b, layer_norm(x, b.norm1) / math.sqrt(b.number))
    return x + ffn(b, layer_norm(x, b.norm2) / math.sqrt(b.number))


def sqrt_depth(b: Any, x: Tensor) -> Tensor:
    h = layer_norm(x + attend(b, x) / math.sqrt(DEPTH), b.norm1)
    return layer_norm(h + ffn(b, h) / math.sqrt(DEPTH), b.norm2)


FORMULAS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sandwich": sandwich,
    "peri": peri,
    "res-post": res_post,
    "rezero": rezero,
    "layer-scale": layer_scale,
    "deep-norm": deep_norm,
    "admin": admin,
    "b2t": b2t,
    "keel": keel,
    "mix-ln": mix_ln,
    "hybrid-norm": hybrid_norm,
    "ln-scaling": ln_scaling,
    "sqrt-depth": sqrt_depth,
}


def test_every_wiring_has_its_formula_here():
    assert set(FORMULAS) | {"resi-dual"} == set(PUBLISHED)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_written_out(name: str):
    model = encoder(name)
    x = X
    for block in model.blocks:
        x = FORMULAS[name](block, x)
    if WIRINGS[name].final_norm:
        x = layer_norm(x, model.final_norm)
    assert_close(model(X), x, rtol=0, atol=1e-11)
    other = {"post": pre, "pre": post}.get(str(WIRINGS[name].placement), post)  # the test can fail
    assert not torch.allclose(model.blocks[1](X), other(encoder("post").blocks[1], X), atol=1e-3)


def test_residual_carries_a_second_stream():
    """x ← LN(x + F), y ← y + F, out = x + LN(y)."""
    model = encoder("resi-dual")
    x, y = X, X
    for b in model.blocks:
        f = attend(b, x)
        x, y = layer_norm(x + f, b.norm1), y + f
        f = ffn(b, x)
        x, y = layer_norm(x + f, b.norm2), y + f
    assert_close(model(X), x + layer_norm(y, model.final_norm), rtol=0, atol=1e-11)
    alone, beside = model.blocks[0](X)
    assert_close(alone, post(model.blocks[0], X), rtol=0, atol=1e-11)
    assert not torch.equal(alone, beside)
    with pytest.raises(ValueError, match="expected a wiring with one stream, got 'resi-dual'"):
        TransformerXLConfig(placement="resi-dual")


def test_the_constants_of_the_papers():
    assert deep_norm_constants(60) == pytest.approx((120**0.25, 480**-0.25))
    assert admin_weight(60) == pytest.approx(math.sqrt(121 / math.log(121) - 1))
    assert [layer_scale_start(depth) for depth in (18, 19, 24, 25)] == [0.1, 1e-5, 1e-5, 1e-6]
    started = Encoder(30, BlockConfig(WIDTH, HEADS, placement="layer-scale"))
    assert (started.blocks[3].gain2 == 1e-6).all()
    assert (Encoder(60, BlockConfig(8, 2, placement="admin")).blocks[0].omega1 == admin_weight(60)).all()
    assert Encoder(1, BlockConfig(WIDTH, HEADS, placement="rezero"))(X.float()).equal(X.float())


def test_deep_norm_scales_values_output_and_ffn_by_beta():
    plain, scaled = (
        Encoder(DEPTH, BlockConfig(WIDTH, HEADS, placement=name), generator=seeded(1)).blocks[2].state_dict()
        for name in ("post", "deep-norm")
    )
    _, beta = deep_norm_constants(DEPTH)
    for key, value in plain.items():
        touched = key.endswith("weight") and any(part in key for part in ("value", "output", "ffn"))
        assert torch.equal(scaled[key], beta * value if touched else value), key


@pytest.mark.parametrize("name", PUBLISHED)
def test_gradients_reach_every_parameter(name: str):
    model = encoder(name)
    model(X).sin().sum().backward()
    without = [key for key, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    keys = "attention.key.bias"  # a bias of the keys adds the same to all scores of a row: softmax does not see it
    assert [key for key in without if not key.endswith(keys)] == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_stations_are_where_the_anatomy_says(name: str):
    """Additions add up, norms are those that are called, and measuring leaves no trace."""
    model = encoder(name).eval()
    anatomy = anatomy_of(model)
    seen: dict[tuple[int, str], Tensor] = {}
    wanted = {station for block in anatomy.blocks for a in block.additions for station in a.stations}

    def keep(visit: Any, station: str, tokens: Tensor, _source: Tensor) -> None:
        seen[visit.number, station] = tokens.clone()

    expected = model(X)
    with undisturbed(model), Machine(model, anatomy, Listen(wanted | {"output"}, keep)):
        assert torch.equal(model(X), expected)
    for number, block in enumerate(anatomy.blocks, start=1):
        for addition in block.additions:
            trunk, branch, result = (seen[number, station] for station in addition.stations)
            assert_close(trunk + branch, result, rtol=0, atol=1e-12)
        called = [norm for norm in block.module.modules() if isinstance(norm, nn.LayerNorm)]
        inside = [norm for norm in called if norm is not getattr(block.module, "entrance_norm", None)]
        normed = 3 if isinstance(block.attention.value, NormedLinear) else 0
        assert len(block.norms) == len(inside) - normed
    profile = depthscope.probe(model, X)
    assert len(profile.curve("token_similarity")) == DEPTH + 1
    depthscope.apply(model, DeEscalate(0.5))
    assert not torch.equal(model(X), expected)
    assert torch.equal(depthscope.remove(model)(X), expected)


@pytest.mark.parametrize("name", PUBLISHED)
def test_copies_and_state_dicts(name: str):
    model = encoder(name)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), model(X))
    fresh = Encoder(DEPTH, BlockConfig(WIDTH, HEADS, placement=name)).double()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(X), model(X))
    again = Encoder(2, BlockConfig(WIDTH, HEADS, placement=name), generator=seeded(4)).state_dict()
    for key, value in Encoder(2, BlockConfig(WIDTH, HEADS, placement=name), generator=seeded(4)).state_dict().items():
        assert torch.equal(again[key], value), key  # the generator decides alone


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_wiring_sees_later_tokens_in_a_language_model(name: str):
    model = CausalLM(3, BlockConfig(WIDTH, HEADS, placement=name), vocabulary=20, generator=seeded(2)).double()
    ids = torch.randint(0, 20, (2, 6), generator=seeded(3))
    changed = ids.clone()
    changed[:, 4:] = (ids[:, 4:] + 7) % 20
    assert torch.equal(model(ids)[:, :4], model(changed)[:, :4])
    assert not torch.equal(model(ids)[:, 4:], model(changed)[:, 4:])


@pytest.mark.parametrize("name", ONE_STREAM)
def test_transformer_xl_takes_them_too(name: str):
    model = TransformerXL(TransformerXLConfig(13, 4, WIDTH, HEADS, 24, cutoffs=(5,), placement=name), seeded(1)).eval()
    ids = torch.arange(6).reshape(2, 3)
    first = model(ids)
    second = model(ids, targets=ids, memory=first.memory)
    assert second.losses.isfinite().all()
    second.losses.sum().backward()


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_alpha_of_the_configuration_is_honoured(name: str):
    """With α = 0 no token sees another."""
    model = encoder(name, alpha=0.0)
    changed = X.clone()
    changed[:, -1] += 1
    assert torch.equal(model(changed)[:, :-1], model(X)[:, :-1])
    assert not torch.equal(encoder(name)(changed)[:, :-1], encoder(name)(X)[:, :-1])
