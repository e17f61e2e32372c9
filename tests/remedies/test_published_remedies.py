"""PairNorm, ContraNorm, MV-Split, learned weights: formulas written out, the equivalences between them, gradients, what
is learned, saving and removing."""

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close

import depthscope
import zoo
from depthscope.anatomy import anatomy_of
from depthscope.hooks import Listen, Machine, undisturbed
from depthscope.hooks.staying import hooks_in
from depthscope.models import BlockConfig, Encoder
from depthscope.models.token_means import Full
from depthscope.remedies import (
    ContraNorm,
    DeEscalate,
    MVSplit,
    PairNorm,
    ResidualWeight,
    applied,
    contra_norm,
    deescalate,
    pair_norm,
    restore,
)
from depthscope.remedies.branches import split_branch
from depthscope.remedies.change import Uniform
from depthscope.remedies.remedy import Remedy
from oracles import uniform_matrix
from samples import seeded
from zoo import doubled, run

X = torch.randn(2, 7, 16, generator=seeded(0), dtype=torch.float64) + 1
REAL = zoo.MASK.bool()
EYE = torch.eye(7, dtype=torch.float64)
REMEDIES: dict[str, Remedy] = {
    "pair-norm": PairNorm(),
    "contra-norm": ContraNorm(),
    "mv-split": MVSplit(0.7, 0.3),
    "per block": ResidualWeight(0.5, "block"),
    "per feature": ResidualWeight(0.5, "feature"),
}


def pair_norm_oracle(x: Tensor, causal: bool, real: Tensor | None = None) -> Tensor:
    """Row by row."""
    found = x.clone()
    for b in range(len(x)):
        rows = [i for i in range(x.shape[1]) if real is None or real[b, i]]
        centred = {}
        for place, i in enumerate(rows):
            seen = rows[: place + 1] if causal else rows
            alone = causal and place == 0
            centred[i] = x[b, i] - (0 if alone else x[b, seen].mean(dim=0))
        for place, i in enumerate(rows):
            seen = rows[: place + 1] if causal else rows
            squares = torch.stack([centred[j] for j in seen]).square().mean()
            found[b, i] = centred[i] / (squares + 1e-6).sqrt()
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("real", [None, REAL], ids=["all real", "padded"])
def test_pair_norm_is_its_formula(causal: bool, real: Tensor | None):
    found = pair_norm(X, mask=real, mixing="prefix" if causal else "full")
    assert_close(found, pair_norm_oracle(X, causal, real), rtol=0, atol=1e-12)
    assert not torch.allclose(found, pair_norm_oracle(X, not causal, real), atol=1e-2)


def test_pair_norm_is_complete_de_escalation_and_a_rescale():
    found, centred = pair_norm(X, 2.0), deescalate(X, 1.0)
    ratio = found.norm(dim=(-2, -1)) / centred.norm(dim=(-2, -1))
    assert_close(found, centred * ratio[:, None, None], rtol=0, atol=1e-12)
    assert_close(found.square().mean(dim=(-2, -1)), torch.full((2,), 4.0, dtype=torch.float64), rtol=1e-5, atol=0)
    assert (pair_norm(torch.ones(1, 5, 4)) == 0).all()  # tokens that are equal


def contra_norm_oracle(x: Tensor, s: float, t: float, causal: bool, real: Tensor | None = None) -> Tensor:
    unit = x / x.norm(dim=-1, keepdim=True)
    seen = uniform_matrix(7, causal, real) > 0
    seen = seen.expand(2, 7, 7) | (EYE > 0)
    matrix = (unit @ unit.mT / t).masked_fill(~seen, -torch.inf).softmax(-1)
    changed = (1 + s) * x - s * matrix @ x
    return changed if real is None else torch.where(real[..., None], changed, x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("real", [None, REAL, REAL.flip(1)], ids=["all real", "right", "left"])
def test_contra_norm_is_its_formula(causal: bool, real: Tensor | None):
    found = contra_norm(X, 0.7, real, temperature=0.5, causal=causal)
    assert_close(found, contra_norm_oracle(X, 0.7, 0.5, causal, real), rtol=0, atol=1e-12)
    assert not torch.allclose(found, contra_norm_oracle(X, 0.7, 0.5, not causal, real), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_contra_norm_of_zeros_and_of_padding_is_finite(dtype: torch.dtype):
    """A token of zeros has no direction, and no gradient by it; padding is set to zeros. In float16 0/0 was nan."""
    x = X.to(dtype)
    assert contra_norm(x, 1.0, REAL).isfinite().all()
    x[0, 1] = 0
    x.requires_grad_()
    found = contra_norm(x, 1.0)
    found.float().square().sum().backward()
    assert found.isfinite().all()
    assert x.grad is not None
    assert x.grad.abs().max() < 100


def test_contra_norm_near_collapse_is_de_escalation():
    """S is uniform where tokens are nearly equal, and where T is large: (1 + s)(I − τ11ᵀ/n)X with τ = s/(1 + s)."""
    close = 1 + 1e-6 * torch.randn(1, 7, 16, generator=seeded(1), dtype=torch.float64)
    for tokens, temperature in ((X, 1e12), (close, 1.0)):
        found = contra_norm(tokens, 0.5, temperature=temperature)
        expected = 1.5 * deescalate(tokens, 0.5 / 1.5)
        assert_close(found, expected, rtol=0, atol=1e-10)
    assert torch.equal(contra_norm(torch.ones(1, 3, 4)), torch.ones(1, 3, 4))


@pytest.mark.parametrize("causal", [False, True])
def test_mv_split_is_its_matrices(causal: bool):
    uniform = uniform_matrix(7, causal)
    branch, beta, alpha = X.flip(1), *torch.randn(2, 16, generator=seeded(5), dtype=torch.float64)
    expected = ((EYE - uniform) @ branch) @ beta.diag() + (uniform @ (branch - X)) @ alpha.diag()
    assert_close(split_branch(branch, uniform @ branch, uniform @ X, beta, alpha), expected, rtol=0, atol=1e-13)


def test_gradients_of_the_formulas():
    """Against finite differences."""
    small = torch.randn(1, 4, 3, generator=seeded(6), dtype=torch.float64, requires_grad=True)
    vector = torch.randn(3, generator=seeded(7), dtype=torch.float64, requires_grad=True)
    for mixing in ("full", "prefix"):
        causal = mixing == "prefix"
        assert torch.autograd.gradcheck(lambda x, m=mixing: pair_norm(x, mixing=m), small)
        assert torch.autograd.gradcheck(lambda x, c=causal: contra_norm(x, causal=c), small)

        def split(x: Tensor, beta: Tensor, causal: bool = causal) -> Tensor:
            mean = (Uniform() if causal else Full()).mean(x)
            return split_branch(x.flip(1), mean, mean, beta, 0.5 * beta)

        assert torch.autograd.gradcheck(split, (small, vector))


def encoder(causal: bool = False) -> Encoder:
    return Encoder(3, BlockConfig(16, 4, causal=causal), generator=seeded(1)).double()


@pytest.mark.parametrize("name", ["encoder", "bert", "gpt2", "causal-lm"])
def test_mv_split_on_the_branches_of_every_block(name: str):
    model, inputs = zoo.make(name)
    model.double().eval()
    before, after = {}, {}

    def keeping(found: dict) -> Any:
        def keep(visit: Any, station: str, tokens: Tensor, _source: Tensor) -> None:
            found[visit.number, station] = (tokens.clone(), visit.real, visit.block)

        stations = {s for block in anatomy_of(model).blocks for a in block.additions for s in a.stations}
        return Machine(model, anatomy_of(model), Listen(stations, keep))

    first = keeping(before)
    with undisturbed(model), first:
        depthscope.apply(model, MVSplit(0.7, 0.3))
        second = keeping(after)
        with second:
            run(model, doubled(inputs))
    for block in anatomy_of(model).blocks[:1]:
        for addition in block.additions:
            given, real, _ = before[1, addition.branch]
            trunk = after[1, addition.trunk][0]
            uniform = uniform_matrix(given.shape[1], bool(zoo.ZOO[name].causal), real)
            expected = 0.7 * (given - uniform @ given) + 0.3 * uniform @ (given - trunk)
            if real is not None:
                expected = torch.where(real.unsqueeze(-1), expected, given)
            assert_close(after[1, addition.branch][0], expected, rtol=0, atol=1e-10)


def test_mv_split_starts_at_one_over_the_root_of_the_depth_and_refuses_parallel_branches():
    model = depthscope.apply(encoder(), MVSplit())
    assert_close(model.blocks[0].mv_split_beta_ffn_branch, torch.full((16,), 3**-0.5, dtype=torch.float64))
    parallel, _ = zoo.make("gpt-neox")
    for refused in (parallel, zoo.make("xlnet")[0]):
        with pytest.raises(ValueError, match="mv-split cannot be put in"):
            depthscope.apply(refused, MVSplit())
        assert not list(hooks_in(refused))


@pytest.mark.parametrize("name", ["pre", "post"])
def test_learned_weights_are_those_of_rezero_and_layer_scale(name: str):
    """x + a·F and x + g⊙F: with the model's own norms."""
    model = Encoder(2, BlockConfig(16, 4, placement=name), generator=seeded(1)).double()
    plain = model(X)
    depthscope.apply(model, ResidualWeight(1.0, "feature"))
    assert torch.equal(model(X), plain)
    gain = torch.randn(16, generator=seeded(2), dtype=torch.float64)
    for block in model.blocks:
        block.residual_weight_ffn_branch.data.copy_(gain)
    found = model(X)
    depthscope.remove(model)
    for block in model.blocks:
        block.stations["ffn_branch"].register_forward_hook(lambda _m, _a, y: y @ gain.diag())
    assert_close(model(X), found, rtol=0, atol=1e-12)
    zero = Encoder(2, BlockConfig(16, 4, placement="pre"), final_norm=False).double()
    depthscope.apply(zero, ResidualWeight(0.0, "block"))
    assert torch.equal(zero(X), X)
    zero(X).sin().sum().backward()
    assert all(block.residual_weight.grad != 0 for block in zero.blocks)
    assert applied(zero)[0].values == {"alpha": 0.0}


@pytest.mark.parametrize("remedy", REMEDIES.values(), ids=list(REMEDIES))
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_copies_pickles_gradients_saving_and_removing(name: str, remedy: Remedy, tmp_path):
    model, inputs = zoo.make(name)
    model.eval()
    reference, keys = run(model, inputs), list(model.state_dict())
    depthscope.apply(model, remedy)
    with torch.no_grad():  # as after some training
        for key in set(model.state_dict()) - set(keys):
            model.get_parameter(key).add_(0.1 * torch.randn(model.get_parameter(key).shape, generator=seeded(1)))
    changed = run(model, inputs)
    assert not torch.allclose(changed, reference, atol=1e-4)
    changed.square().sum().backward()
    own = [key for key in model.state_dict() if key not in keys]
    assert bool(own) == remedy.learns
    assert all(model.get_parameter(key).grad is not None for key in own)
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    with pytest.raises(ValueError, match="is already at the"):
        depthscope.apply(model, remedy)
    model.save_pretrained(tmp_path)
    loaded = restore(type(model).from_pretrained(tmp_path).eval(), tmp_path)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(run(twin, inputs), changed)
    depthscope.remove(model)
    assert torch.equal(run(model, inputs), reference)
    assert list(model.state_dict()) == keys
    assert not list(hooks_in(model))


def test_stacked_with_de_escalation():
    model = encoder()
    depthscope.apply(model, PairNorm(at="input"), ResidualWeight(0.5, "block"), DeEscalate(0.5))
    assert len(applied(model)) == 3 + 6 + 3
    assert model(X).isfinite().all()


@pytest.mark.parametrize(
    ("listening", "changing"),
    [
        (MVSplit(0.5, 0.7, learnable=False), DeEscalate(0.6, at="input")),
        (MVSplit(0.5, 0.7, learnable=False), DeEscalate(0.6, at="after_attention")),
    ],
    ids=["input", "after attention"],
)
@pytest.mark.parametrize("name", ["ours", "gpt2"])
def test_what_a_remedy_hears_is_what_all_the_others_have_made_of_it(name: str, listening: Remedy, changing: Remedy):
    """Whichever was put in first."""
    torch.manual_seed(0)
    if name == "ours":
        model: nn.Module = Encoder(3, BlockConfig(16, 4, placement="pre")).double().eval()
    else:
        model = hf.GPT2Model(hf.GPT2Config(n_layer=3, n_embd=16, n_head=4, vocab_size=9, n_positions=8)).double().eval()
    call = {} if name == "ours" else {"inputs_embeds": X}
    found = []
    for order in ((listening, changing), (changing, listening)):
        for remedy in order:
            depthscope.apply(model, remedy)
        found.append(model(X) if name == "ours" else model(**call).last_hidden_state)
        depthscope.remove(model)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "remedies",
    [
        (MVSplit(beta=0.7, alpha=0.4), DeEscalate(0.5)),
        (PairNorm(), DeEscalate(0.5)),  # of what leaves the block
    ],
    ids=lambda some: "+".join(remedy.name for remedy in some),
)
def test_two_remedies_at_one_place_keep_their_means_apart_in_a_cache(remedies):
    model, inputs = zoo.make("llama")
    depthscope.apply(model.eval(), *remedies)
    ids = inputs["input_ids"]
    with torch.no_grad():
        whole = model(input_ids=ids)
        begun = model(input_ids=ids[:, :3], use_cache=True)
        rest = model(input_ids=ids[:, 3:], past_key_values=begun.past_key_values, use_cache=True)
    assert_close(rest[0], whole[0][:, 3:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("alpha", ["0.1", None, True, torch.tensor(0.5), float("nan"), float("inf"), -1])
def test_a_branch_weight_that_is_no_number_is_refused(alpha):
    with pytest.raises(ValueError, match="expected alpha"):
        ResidualWeight(alpha)
