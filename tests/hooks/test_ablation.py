"""A model without its skips, FFNs or norms: equal to a forward pass written by hand, in every family, without trace."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.anatomy import anatomy_of
from depthscope.hooks import Ablation, Listen, Machine, open_ablation, undisturbed
from depthscope.hooks.ablation import choose_parts, in_words, removed_skips
from depthscope.models import BlockConfig, Encoder, pre_norm
from depthscope.probing import ablate
from samples import seeded
from traces import hooks_of, state_of
from zoo import ANATOMIES, IDS, MASK, TOKENS, ZOO, make, run

MANY = [
    ("skips",),
    ("attention_skip",),
    ("ffn_skip",),
    ("ffn",),
    ("ffn_step",),
    ("norms",),
    ("skips", "ffn"),
    ("attention_skip", "ffn_step"),
    ("skips", "norms"),
    ("skips", "ffn", "norms"),
]
EXACT = 1e-10  # float64: some hundred roundings


def close(found: Tensor, expected: Tensor) -> None:
    found, expected = found.detach(), expected.detach()
    assert float((found - expected).abs().max()) <= EXACT * float(expected.abs().max())


def plan(parts: tuple[str, ...]) -> tuple[bool, bool, bool, bool, bool]:
    """Whether attention's skip, the FFN's skip, the FFN, the norm behind it and the norms are there."""
    no_ffn = "ffn" in parts or "ffn_step" in parts
    attention_skip = not {"skips", "attention_skip"} & {*parts}
    ffn_skip = no_ffn or not {"skips", "ffn_skip"} & {*parts}
    return attention_skip, ffn_skip, not no_ffn, "ffn_step" not in parts, "norms" not in parts


def post_by_hand(
    x: Tensor,
    parts: tuple[str, ...],
    attend: Callable[[Tensor], Tensor],
    ffn: Callable[[Tensor], Tensor],
    norms: tuple[nn.Module, nn.Module],
) -> Tensor:
    attention_skip, ffn_skip, has_ffn, has_last_norm, has_norms = plan(parts)
    y = attend(x) + (x if attention_skip else 0)
    y = norms[0](y) if has_norms else y
    z = (ffn(y) if has_ffn else 0) + (y if ffn_skip else 0)
    return norms[1](z) if has_norms and has_last_norm else z


def pre_by_hand(
    x: Tensor,
    parts: tuple[str, ...],
    attend: Callable[[Tensor], Tensor],
    ffn: Callable[[Tensor], Tensor],
    norms: tuple[nn.Module, nn.Module],
) -> Tensor:
    attention_skip, ffn_skip, has_ffn, _, has_norms = plan(parts)
    y = attend(norms[0](x) if has_norms else x) + (x if attention_skip else 0)
    return (ffn(norms[1](y) if has_norms else y) if has_ffn else 0) + (y if ffn_skip else 0)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, hidden: Tensor) -> Tensor:
    """softmax(QKᵀ/√k + hidden)V by head, from (batch, n, d)."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v).transpose(1, 2).flatten(-2)


PADDING = (MASK == 0)[:, None, None, :]
LATER = torch.ones(7, 7, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("parts", MANY, ids="+".join)
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_our_blocks_equal_a_pass_by_hand(placement: str, parts: tuple[str, ...]):
    config = BlockConfig(16, 4, placement=placement) if placement == "post" else BlockConfig(16, 4, placement=pre_norm)
    model = Encoder(3, config, generator=seeded(3)).double()
    x = expected = TOKENS.double()
    for block in model.blocks:
        attention = block.attention

        def attend(y: Tensor, attention: Any = attention) -> Tensor:
            q, k, v = attention.query(y), attention.key(y), attention.value(y)
            return attention.output(plain_attention(q, k, v, 4, PADDING))

        by_hand = post_by_hand if placement == "post" else pre_by_hand
        expected = by_hand(expected, parts, attend, block.ffn, (block.norm1, block.norm2))
    with ablate(model, *parts):
        found = model(x, MASK)
    close(found[MASK == 1], model.final_norm(expected)[MASK == 1])


@pytest.mark.parametrize("parts", MANY, ids="+".join)
def test_bert_equals_a_pass_by_hand(parts: tuple[str, ...]):
    model: Any = make("bert")[0].double().eval()
    expected = model.embeddings(IDS)
    for layer in model.encoder.layer:
        own, out = layer.attention.self, layer.attention.output

        def attend(y: Tensor, own: Any = own, out: Any = out) -> Tensor:
            return out.dense(plain_attention(own.query(y), own.key(y), own.value(y), 4, PADDING))

        def ffn(y: Tensor, layer: Any = layer) -> Tensor:
            return layer.output.dense(F.gelu(layer.intermediate.dense(y)))

        expected = post_by_hand(expected, parts, attend, ffn, (out.LayerNorm, layer.output.LayerNorm))
    with ablate(model, *parts):
        found = model(IDS, MASK).last_hidden_state
    close(found[MASK == 1], expected[MASK == 1])


@pytest.mark.parametrize("parts", MANY, ids="+".join)
def test_gpt2_equals_a_pass_by_hand(parts: tuple[str, ...]):
    model: Any = make("gpt2")[0].double().eval().transformer
    expected = model.wte(IDS) + model.wpe(torch.arange(7))
    for layer in model.h:

        def attend(y: Tensor, attention: Any = layer.attn) -> Tensor:
            q, k, v = attention.c_attn(y).chunk(3, dim=-1)
            return attention.c_proj(plain_attention(q, k, v, 4, LATER))

        expected = pre_by_hand(expected, parts, attend, layer.mlp, (layer.ln_1, layer.ln_2))
    with ablate(model, *parts):
        found = model(IDS).last_hidden_state
    close(found, model.ln_f(expected))


@pytest.mark.parametrize("parts", MANY, ids="+".join)
def test_llama_equals_a_pass_by_hand(parts: tuple[str, ...]):
    model: Any = make("llama")[0].double().eval()
    expected = model.embed_tokens(IDS)
    places = torch.arange(7)[None]
    turns = model.rotary_emb(expected, places)
    for layer in model.layers:

        def attend(y: Tensor, attention: Any = layer.self_attn) -> Tensor:
            def turned(z: Tensor) -> Tensor:
                z = z.unflatten(-1, (-1, 4))  # (batch, n, heads, 4)
                half = torch.cat([-z[..., 2:], z[..., :2]], dim=-1)
                return (z * turns[0][:, :, None] + half * turns[1][:, :, None]).flatten(-2)

            def repeated(z: Tensor) -> Tensor:
                return z.unflatten(-1, (2, 4)).repeat_interleave(2, dim=-2).flatten(-2)

            q, k, v = attention.q_proj(y), attention.k_proj(y), attention.v_proj(y)
            mixed = plain_attention(turned(q), repeated(turned(k)), repeated(v), 4, LATER)
            return attention.o_proj(mixed)

        norms = layer.input_layernorm, layer.post_attention_layernorm
        expected = pre_by_hand(expected, parts, attend, layer.mlp, norms)
    with ablate(model, *parts):
        found = model(IDS).last_hidden_state
    close(found, model.norm(expected))


def test_albert_as_the_authors_did_it():
    """Dong et al. replaced its two linear layers by nothing: the activation, the skip and the norm were left."""
    model: Any = make("albert")[0].double().eval()
    authors = copy.deepcopy(model)
    layer = authors.encoder.albert_layer_groups[0].albert_layers[0]
    layer.ffn, layer.ffn_output = nn.Identity(), nn.Identity()
    with ablate(model, "ffn_linears"):
        close(model(IDS).last_hidden_state, authors(IDS).last_hidden_state)


def test_xlnet_as_the_authors_did_it():
    """Its own switch for the skip, which nothing else sets, and the FFN module gone."""
    model: Any = make("xlnet")[0].double().eval()
    authors = copy.deepcopy(model)
    for layer in authors.layer:
        whole = layer.rel_attn.post_attention
        layer.rel_attn.post_attention = lambda h, vec, whole=whole: whole(h, vec, residual=False)
        layer.ff = nn.Identity()
    with ablate(model, "attention_skip", "ffn_step"):
        close(model(IDS).last_hidden_state, authors(IDS).last_hidden_state)


def allowed(name: str, parts: tuple[str, ...]) -> bool:
    """Whether a family can be without these parts, known by hand."""
    specimen = ANATOMIES[name]
    if specimen.placement == "mixer":
        return {*parts} <= {"skips", "norms"}
    if specimen.placement == "parallel":
        return not {*parts} & {"attention_skip", "ffn_skip", "cross_attention_skip"}
    return True


@pytest.mark.parametrize("name", ZOO)
def test_every_family_has_the_sums_without_their_parts(name: str):
    """What a second listener hears inside the changed pass: branch alone, trunk alone, or the sum as it was."""
    model, inputs = make(name)
    model = model.double().eval()
    anatomy = anatomy_of(model)
    checked = 0
    for parts in (("skips",), ("ffn",), ("skips", "norms"), ("skips", "ffn")):
        if not allowed(name, parts):
            with pytest.raises(ValueError, match="no FFN"):
                Ablation(model, anatomy, parts)
            continue
        heard: dict[str, Tensor] = {}

        def hear(_visit: Any, station: str, tokens: Tensor, _source: Tensor, heard: Any = heard) -> None:
            heard[station] = tokens.clone()  # Falcon adds in place

        def judge(visit: Any, heard: Any = heard, parts: Any = parts) -> None:
            nonlocal checked
            for each in visit.block.additions:
                trunk, branch, total = (heard[station] for station in (each.trunk, each.branch, each.result))
                gone = "ffn" in parts and each.branch == "ffn_branch"
                expected = trunk if gone else branch if "skips" in parts else trunk + branch
                if each.beside is not None:
                    both = branch if "ffn" in parts else branch + heard[each.beside]
                    expected = both if "skips" in parts else trunk + both
                close(total, expected)
                checked += 1
            heard.clear()

        stations = {station for block in anatomy.blocks for station in block.spots}
        listener = Machine(model, anatomy, Listen(stations, hear), on_block_end=judge)
        with undisturbed(model), Ablation(model, anatomy, parts), listener:
            run(model, as_double(inputs))
    shows = not ANATOMIES[name].hides >= {"attention_branch", "ffn_branch"}
    assert checked > 0 or not shows


def as_double(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    return {name: as_double(value) for name, value in inputs.items()}


@pytest.mark.parametrize("name", ZOO)
def test_it_changes_the_model_and_leaves_no_trace(name: str):
    model, inputs = make(name)
    model.eval()
    model.requires_grad_(False)
    parts = ("skips", "norms")
    before, weights = run(model, inputs), copy.deepcopy(model.state_dict())
    state = state_of(model)
    with ablate(model, *parts):
        changed = run(model, inputs)
        surgery = open_ablation(model)
        assert surgery is not None
        assert surgery.parts == parts
    assert state_of(model) == state
    assert not torch.equal(changed, before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(run(model, inputs), before)
    assert open_ablation(model) is None


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("name", ZOO)
def test_nothing_is_left_after_an_exception(name: str):
    model, inputs = make(name)
    last = anatomy_of(model).blocks[-1].module

    def fail(_module: nn.Module, _args: Any) -> None:
        raise Broken

    state = state_of(model)
    handle = last.register_forward_pre_hook(fail)
    with pytest.raises(Broken), ablate(model, "skips", "norms"):
        run(model, inputs)
    handle.remove()
    assert state_of(model) == state


def test_gradients_pass():
    model, _ = make("bert")
    with ablate(model, "skips", "ffn"):
        model(IDS, MASK).last_hidden_state.square().sum().backward()
    gradient = model.encoder.layer[0].attention.self.value.weight.grad
    assert gradient is not None
    assert float(gradient.abs().max()) > 0
    assert model.encoder.layer[0].output.dense.weight.grad is None or not bool(
        model.encoder.layer[0].output.dense.weight.grad.any()
    )


def test_a_branch_far_below_the_trunk_is_exact():
    """Taken as sum − trunk, a branch of 1e-20 of the trunk would be nothing but rounding."""
    model: Any = make("llama")[0].double().eval()
    ends = []
    for factor in (1.0, 1e-20):
        for layer in model.layers:
            layer.self_attn.o_proj.weight.data *= factor
        outputs: list[Tensor] = []
        hear = Listen({"output"}, lambda _v, _s, tokens, _t, outputs=outputs: outputs.append(tokens))
        with torch.no_grad(), ablate(model, "skips", "ffn"), Machine(model, anatomy_of(model), hear):
            model(IDS)
        ends.append(outputs[0])
    close(1e20 * ends[1], ends[0])


def test_a_branch_that_is_weighted_is_taken_as_a_difference():
    model = Encoder(2, BlockConfig(16, 4, alpha=0.5), generator=seeded(1)).double()
    surgery = Ablation(model, anatomy_of(model), ("attention_skip",))
    heard: dict[str, Tensor] = {}
    with (
        surgery,
        Machine(
            model,
            anatomy_of(model),
            Listen({"attention_branch", "after_attention"}, lambda _v, s, t, _s: heard.__setitem__(s, t)),
        ),
    ):
        model(TOKENS.double())
    close(heard["after_attention"], 0.5 * heard["attention_branch"])
    assert surgery.by_difference == {"attention_branch"}
    assert "taken as a difference" in " ".join(surgery.notes)


def test_the_mutant_that_keeps_a_skip_is_seen():
    model: Any = make("bert")[0].double().eval()
    with ablate(model, "attention_skip"):
        half = model(IDS, MASK).last_hidden_state
    with ablate(model, "skips"):
        whole = model(IDS, MASK).last_hidden_state
    assert float((half - whole).detach().abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("skip", "did you mean 'skips'"),
        (" , ", "at least one of"),
        ("ffn,ffn_step", "two readings"),
        ("ffn,ffn_skip", "nothing is left"),
    ],
)
def test_names_that_do_not_fit_are_refused(asked: str, why: str):
    with pytest.raises(ValueError, match=why):
        choose_parts(asked)


def test_names():
    assert choose_parts("ffn, skips") == ("skips", "ffn")
    assert removed_skips(("skips", "ffn")) == {"attention_skip", "cross_attention_skip"}
    assert removed_skips(("ffn_skip",)) == {"ffn_skip"}
    assert in_words(("skips", "ffn", "norms")) == "skips, FFNs and norms"


class Strange(nn.Module):
    """Blocks of no known structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("name", "parts", "why"),
    [
        ("gptj", ("attention_skip",), "share one skip: say skips"),
        ("mamba", ("ffn",), "no FFN"),
        ("mixtral", ("ffn_linears",), "linear layers and activations alone"),
        ("bert", ("cross_attention_skip",), "attends to an encoder"),
    ],
)
def test_what_a_family_does_not_have_is_refused(name: str, parts: tuple[str, ...], why: str):
    model, _ = make(name)
    hooks = hooks_of(model)
    with pytest.raises(ValueError, match=why), ablate(model, *parts):
        pass
    assert hooks_of(model) == hooks


def test_an_unknown_block_is_refused():
    cut = ablate(Strange(), "skips", blocks="layers.*", inputs=TOKENS)
    with pytest.raises(ValueError, match="adds its branches to the trunk is not known"), cut:
        pass


def test_a_station_that_is_not_shown_is_named():
    from dataclasses import replace

    model, _ = make("bert")
    anatomy = anatomy_of(model)
    hidden = tuple(
        replace(block, spots={s: spot for s, spot in block.spots.items() if s != "after_ffn"})
        for block in anatomy.blocks
    )
    with pytest.raises(ValueError, match=r"'encoder.layer.0' does not show its after_ffn"):
        Ablation(model, replace(anatomy, blocks=hidden), ("ffn_skip",))


def test_twice_is_refused():
    model, _ = make("bert")
    with ablate(model, "skips"), pytest.raises(ValueError, match="without its skips already"), ablate(model, "ffn"):
        pass


def test_no_remedy_is_measured_or_put_in_meanwhile():
    from depthscope.remedies import DeEscalate, apply, recommend

    model, inputs = make("bert")
    with ablate(model, "skips"):
        for put_in in (lambda: apply(model, DeEscalate(0.5)), lambda: recommend(model, inputs)):
            with pytest.raises(ValueError, match="without its skips now"):
                put_in()


def test_a_model_with_remedies_is_refused():
    from depthscope.remedies import DeEscalate, apply

    model, _ = make("bert")
    apply(model, DeEscalate(0.5))
    with pytest.raises(ValueError, match="has remedies"), ablate(model, "skips"):
        pass
