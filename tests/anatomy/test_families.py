"""Every family: its blocks, its stations, its projections, its causality."""

from collections.abc import Callable, Iterator

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close

from depthscope.anatomy import anatomy_of
from depthscope.hooks import Head, Listen, ListenToAttention, Machine, Visit, undisturbed
from depthscope.inputs import batches
from depthscope.stations import CROSS, TRUNK
from samples import seeded
from zoo import ANATOMIES, GROUPED, make

STATIONS = {*TRUNK, "attention_input", "attention_branch", "ffn_branch"}
SHOW_THEIR_BRANCH = sorted(
    name
    for name, specimen in ANATOMIES.items()
    if "attention_branch" not in specimen.hides and specimen.attending != ()
)


def attending(name: str) -> tuple[int, ...]:
    """The numbers of the blocks that have attention."""
    blocks = ANATOMIES[name].attending
    return tuple(range(1, ANATOMIES[name].blocks + 1)) if blocks is None else blocks


def run(
    name: str, dtype: torch.dtype = torch.float64, before: Callable[[nn.Module], object] = lambda _model: None
) -> tuple[nn.Module, dict, list[tuple[int, str, Tensor, Tensor | None]]]:
    """All stations of all blocks, (number, station) → tokens, and all attention matrices (batch, h, n, m)."""
    model, inputs = make(name)
    model = model.to(dtype)
    for number, (key, parameter) in enumerate(model.named_parameters()):
        if key.endswith("bias"):  # zero in a new model: none would be missed
            nn.init.normal_(parameter, std=0.3, generator=seeded(number))
    if isinstance(inputs, dict):
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    else:
        inputs = inputs.to(dtype)
    before(model)
    anatomy = anatomy_of(model)
    seen: dict[tuple[int, str], Tensor] = {}
    attention = []
    stations = {station for block in anatomy.blocks for station in block.spots}

    def keep_tokens(visit, station, x, _source):
        seen[visit.number, station] = x.clone()

    def keep_attention(visit, kind, heads, values):
        matrices = torch.stack([head.attention.dense() for head in heads], dim=1)
        attention.append((visit.number, kind, matrices, values))

    with undisturbed(model), Machine(model, anatomy, Listen(stations, keep_tokens), ListenToAttention(keep_attention)):
        for batch in batches(model, inputs):
            model(*batch.args, **batch.kwargs)
    return model, seen, attention


@pytest.mark.parametrize("name", ANATOMIES)
def test_blocks_placement_and_causality(name: str):
    model, _ = make(name)
    anatomy = anatomy_of(model)
    assert len(anatomy.blocks) == ANATOMIES[name].modules
    assert {block.placement for block in anatomy.blocks} == {ANATOMIES[name].placement}
    assert anatomy.causal is ANATOMIES[name].causal
    for block in anatomy.blocks:
        assert len(block.norms) == ANATOMIES[name].norms
        assert STATIONS - block.spots.keys() == ANATOMIES[name].hides & STATIONS


@pytest.mark.parametrize("name", ANATOMIES)
def test_stations_are_what_their_names_say(name: str):
    """The trunk adds up: input + branch = next station, and the norms lead from one to the other."""
    _, seen, _ = run(name)
    numbers = sorted({number for number, _ in seen})
    assert numbers == list(range(1, ANATOMIES[name].blocks + 1))
    post, parallel = ANATOMIES[name].placement == "post", ANATOMIES[name].placement == "parallel"
    for number in numbers:
        at = {station: x for (n, station), x in seen.items() if n == number}
        crossed = set(CROSS) if number in ANATOMIES[name].crosses else set()
        assert set(at) - crossed == STATIONS - ANATOMIES[name].hides
        assert crossed <= set(at)
        for x in at.values():
            assert x.shape[0] == 2
            assert x.shape == at["input"].shape
        if "attention_branch" in at:
            after = at["output"] - at["ffn_branch"] if parallel else at.get("after_attention", at["output"])
            assert_close(at["input"] + at["attention_branch"], after, rtol=0, atol=1e-12)
        if "ffn_branch" in at and not parallel:
            before_ffn = at["ffn_input"] if post else at.get("after_cross_attention", at["after_attention"])
            assert_close(before_ffn + at["ffn_branch"], at["after_ffn"], rtol=0, atol=1e-12)
        reads_the_trunk = ANATOMIES[name].placement in ("post", "branch")
        if name != "modernbert" or number > 1:  # its first block reads the embeddings, which are normed already
            assert torch.equal(at["attention_input"], at["input"]) == reads_the_trunk
        if "ffn_input" in at and not parallel:
            assert torch.equal(at["ffn_input"], at["after_attention"]) == (ANATOMIES[name].placement == "branch")
        if "after_ffn" in at:
            assert torch.equal(at["after_ffn"], at["output"]) != post
        if number not in ANATOMIES[name].starts:
            assert torch.equal(at["input"], seen[number - 1, "output"])
        if "cross_attention_branch" in at:
            trunk = at["cross_attention_input" if post else "after_attention"]
            assert_close(trunk + at["cross_attention_branch"], at["after_cross_attention"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ANATOMIES)
def test_additions_add_up(name: str):
    """The residual additions that a block names are sums: trunk + branch = result, and none is left out."""
    model, seen, _ = run(name)
    blocks = anatomy_of(model).blocks
    expected = (
        2 - len(ANATOMIES[name].hides & {"attention_branch", "ffn_branch"}) - (ANATOMIES[name].placement == "parallel")
    )
    for number in {number for number, _ in seen}:
        additions = blocks[(number - 1) % len(blocks)].additions
        assert len(additions) == expected + (number in ANATOMIES[name].crosses)
        for sum_ in additions:
            *terms, result = (seen[number, station] for station in sum_.stations)
            assert_close(sum(terms), result, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SHOW_THEIR_BRANCH)
def test_attention_acts_between_values_and_context(name: str):
    """What comes out of `values`, mixed by P head by head, goes into `context`."""
    caught: dict[str, Tensor] = {}

    def keep(spot: str, tokens: Tensor) -> None:
        caught.setdefault(spot, tokens)  # of the first application of a shared block

    first = attending(name)[0] - 1

    def hang(model: nn.Module) -> None:
        block = anatomy_of(model).blocks[first]
        if block.values is not None:
            block.values.module.register_forward_hook(lambda _m, _a, out: keep("values", out))
        if block.context is not None:
            block.context.module.register_forward_pre_hook(lambda _m, args: keep("context", args[0]))

    model, _, attention = run(name, before=hang)
    block = anatomy_of(model).blocks[first]
    assert (block.values is None) == ("values" in ANATOMIES[name].hides)
    assert (block.context is None) == ("context" in ANATOMIES[name].hides)
    assert block.ffn
    assert all(isinstance(module, nn.Module) for module in block.ffn)
    if "values" in ANATOMIES[name].hides:
        return
    p = attention[0][2].nan_to_num().to(caught["values"])  # (batch, h, n, n)
    width = block.projections().value.shape[-1]
    values = caught["values"].unflatten(-1, (-1, width)).transpose(1, 2)  # (batch, groups, n, v)
    values = values.repeat_interleave(p.shape[1] // values.shape[1], dim=1)
    context = (p @ values).transpose(1, 2).flatten(2)
    assert_close(context[0], caught["context"].reshape(context.shape)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SHOW_THEIR_BRANCH)
def test_projections_and_attention_rebuild_the_attention_branch(name: str):
    """Σ_h P_h (X W_V + b_V) W_O + b_O, with our P and our per-head weights, is the model's own branch.

    Where a norm stands behind attention, it is what that norm is given.
    """
    latents: list[Tensor] = []
    given: list[Tensor] = []

    def hang(model: nn.Module) -> None:
        for block in anatomy_of(model).blocks:
            if block.placement in ("sandwich", "branch"):
                behind = block.spots["attention_branch"].module
                behind.register_forward_pre_hook(lambda _m, args: given.append(args[0]))
            latent = block.projections().latent if block.projections else None
            if latent is not None:
                latent.module.register_forward_hook(lambda _m, _a, out: latents.append(out))

    model, seen, attention = run(name, before=hang)
    anatomy = anatomy_of(model)
    own = [item for item in attention if item[1] == "attention"]
    assert tuple(number for number, *_ in own) == attending(name)
    for number, _, p, _ in own:
        block = anatomy.blocks[(number - 1) % len(anatomy.blocks)]
        w = block.projections()
        x = (latents[number - 1] if latents else seen[number, "attention_input"]).unsqueeze(1)  # (batch, 1, n, d)
        values = x @ w.value + (0 if w.value_bias is None else w.value_bias.unsqueeze(1))  # (batch, h, n, v)
        heads = p.nan_to_num().to(values) @ values
        rebuilt = heads.transpose(1, 2).flatten(2) if w.output is None else (heads @ w.output).sum(dim=1)
        rebuilt = rebuilt + (0 if w.output_bias is None else w.output_bias)
        expected = given[number - 1] if given else seen[number, "attention_branch"]
        assert_close(rebuilt[0], expected[0], rtol=0, atol=1e-10)  # sequence 0 has no padding
        assert_close(rebuilt[1, :4], expected[1, :4], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "opt", "distilbert"])
def test_query_and_key_projections_give_the_attention(name: str):
    """softmax((XW_Q + b_Q)(XW_K + b_K)ᵀ/√d_k) is what is heard."""
    model, seen, attention = run(name)
    block, p = anatomy_of(model).blocks[0], attention[0][2]
    w, x = block.projections(), seen[1, "attention_input"][:1].unsqueeze(1)
    q = x @ w.query + (0 if w.query_bias is None else w.query_bias.unsqueeze(1))
    k = x @ w.key + (0 if w.key_bias is None else w.key_bias.unsqueeze(1))
    scores = q @ k.mT / w.query.shape[-1] ** 0.5
    n = x.shape[-2]
    if ANATOMIES[name].causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    assert_close(torch.softmax(scores, dim=-1), p[:1], rtol=0, atol=1e-10)


TURNED = ("llama", "qwen2", "mistral", "gemma", "starcoder2", "phi", "phi3", "gpt-neox", "falcon", "falcon-new")


@pytest.mark.parametrize("name", [*TURNED, "falcon-one-by-one"])
def test_query_and_key_projections_are_those_that_are_turned_by_position(name: str):
    """A rotation by position keeps the lengths of a token's query and key, and the angle between the two."""
    heard: list[tuple[Tensor, Tensor]] = []

    def keep(visit: Visit, _kind: str, heads: Iterator[Head], _values: Tensor | None) -> None:
        if visit.number == 1:
            heard.extend((head.attention.query, head.attention.key) for head in heads)  # type: ignore[attr-defined]

    def see(visit: Visit, _station: str, tokens: Tensor, _source: Tensor) -> None:
        if visit.number == 1:
            read.append(tokens.clone())

    read: list[Tensor] = []
    model, inputs = make(name)
    anatomy = anatomy_of(model.double())
    with undisturbed(model), Machine(model, anatomy, Listen({"attention_input"}, see), ListenToAttention(keep)):
        model(**inputs)
    w = anatomy.blocks[0].projections()
    for head, (query, key) in enumerate(heard):
        q = read[0] @ w.query[head] + (0 if w.query_bias is None else w.query_bias[head])
        k = read[0] @ w.key[head] + (0 if w.key_bias is None else w.key_bias[head])
        for ours, heard_here in ((q * q, query * query), (k * k, key * key), (q * k, query * key)):
            assert_close(ours.sum(dim=-1), heard_here.sum(dim=-1), rtol=0, atol=1e-6)  # cos² + sin² = 1 in float32


@pytest.mark.parametrize("name", [name for name, specimen in ANATOMIES.items() if specimen.crosses])
def test_cross_attention_is_named_as_such(name: str):
    _, _, attention = run(name)
    numbers = range(1, ANATOMIES[name].blocks + 1)
    kinds = {n: ("attention", "cross_attention") if n in ANATOMIES[name].crosses else ("attention",) for n in numbers}
    assert [(number, kind) for number, kind, _, _ in attention] == [(n, kind) for n in numbers for kind in kinds[n]]


class Odd(nn.Module):
    """A model of no known family."""

    def __init__(self, depth: int):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.middle = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)))
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](self.middle(self.embed(x)))


def test_unknown_models_have_their_repeated_blocks_found_or_named():
    found = anatomy_of(Odd(3))
    assert [block.name for block in found.blocks] == ["middle.0", "middle.1", "middle.2"]
    assert "unknown family" in found.notes[0]
    named = anatomy_of(Odd(3), "middle.*.0")
    assert [block.name for block in named.blocks] == ["middle.0.0", "middle.1.0", "middle.2.0"]


@pytest.mark.parametrize(
    ("model", "blocks", "message"),
    [
        (nn.Linear(3, 3), None, "no repeated blocks in Linear.*no submodules"),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), None, r"looked for.*0 \(Linear\), 1 \(ReLU\)"),
        (Odd(3), "layers.*", "no module is named 'layers.*'; lists of modules in this model: 'middle'"),
    ],
)
def test_no_blocks_is_an_error_that_says_what_was_looked_at(model: nn.Module, blocks: str | None, message: str):
    with pytest.raises(ValueError, match=message):
        anatomy_of(model, blocks)


def test_doge_multiplies_its_trunk_and_shows_what_is_certain():
    """Its branches, and no station between them: what a norm reads there is a copy of the trunk."""
    model = hf.DogeForCausalLM(hf.DogeConfig(**GROUPED))
    (block, *_) = anatomy_of(model).blocks
    assert block.placement is None
    assert set(block.spots) == {"input", "attention_input", "attention_branch", "ffn_branch", "output"}
    assert block.projections is not None
    assert_close(block.projections().output.flatten(0, 1), block.module.self_attn.o_proj.weight.T)
