"""Transformer-XL against its equations, its memory, what a token may see, its parameters and initial weights."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import depthscope
from depthscope.measures import token_similarity
from depthscope.memory import count_parameters
from depthscope.models.token_means import Ema, Full, Prefix
from depthscope.remedies import DeEscalate
from depthscope.stations import BLOCK
from depthscope_lab.models import CarriedMean, TransformerXL, TransformerXLConfig
from depthscope_lab.models.transformer_xl import Context, Memory, Prediction
from naive_transformer_xl import NaiveStream, log_probability
from samples import seeded

SMALL = TransformerXLConfig(13, 2, 8, 2, 12, cutoffs=(5, 9), dropout=0.0)
VARIANTS = {
    "post": SMALL,
    "pre": replace(SMALL, placement="pre", final_norm=False),
    "pre-final-norm": replace(SMALL, placement="pre", final_norm=True),
    "prefix": replace(SMALL, carried_mean=CarriedMean()),
    "prefix-shrunk": replace(SMALL, carried_mean=CarriedMean(0.9, Prefix(shrink=0.5))),
    "ema": replace(SMALL, carried_mean=CarriedMean(mean=Ema(0.7))),
    "leaking": replace(SMALL, carried_mean=CarriedMean(mean=Full())),
}
MEANS = {"prefix": Prefix(), "ema": Ema()}
CAUSAL = [name for name in VARIANTS if name != "leaking"]
CONTEXTS = [Context(4), Context(0), Context(100), Context(3, clamp=2), Context(3, same_length=True)]


def make(name: str, dtype: torch.dtype = torch.float64) -> TransformerXL:
    """Weights so large that every part of a block matters."""
    model = TransformerXL(VARIANTS[name], seeded(0)).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.3, std=0.4, generator=seeded(parameter.numel()))
    return model.requires_grad_(False)


def words(n: int, rows: int = 2) -> Tensor:
    return torch.randint(13, (rows, n), generator=seeded(3))


def stream(model: TransformerXL, ids: Tensor, lengths: list[int], context: Context) -> Tensor:
    """What the softmax reads for all tokens, read in segments of these lengths."""
    memory, seen = None, []
    for segment in ids.split(lengths, dim=1):
        prediction = model(segment, memory=memory, context=context)
        memory = prediction.memory
        seen.append(prediction.hidden)
    return torch.cat(seen, dim=1)


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_the_equations(name: str, context: Context):
    """Three segments of different lengths with memory, both rows, and the losses."""
    model, ids, lengths = make(name), words(9), [4, 2, 3]
    hidden = stream(model, ids, lengths, context)
    targets = words(9).flip(1)
    losses = model.softmax(hidden, targets)
    for row in range(2):
        naive, expected = NaiveStream(model, context), []
        for segment in ids[row].split(lengths):
            expected += naive.read(segment.tolist())
        assert_close(hidden[row], torch.stack(expected), rtol=0, atol=1e-10)
        by_hand = [-log_probability(model, x, int(w)) for x, w in zip(expected, targets[row], strict=True)]
        assert_close(losses[row], torch.tensor(by_hand, dtype=torch.float64), rtol=0, atol=1e-10)


def test_all_words_together_have_probability_one():
    model = make("post")
    hidden = model(words(6)).hidden
    losses = torch.stack([model.softmax(hidden, torch.full((2, 6), word)) for word in range(13)])
    assert_close((-losses).exp().sum(dim=0), torch.ones(2, 6, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CAUSAL)
def test_segments_with_memory_are_one_long_segment_if_nothing_is_forgotten(name: str):
    model, ids = make(name), words(12)
    whole = stream(model, ids, [12], Context(12))
    for lengths in ([6, 6], [1] * 12, [2, 7, 3]):
        assert_close(stream(model, ids, lengths, Context(12)), whole, rtol=0, atol=1e-12)
    # What is forgotten matters.
    assert not torch.allclose(stream(model, ids, [6, 6], Context(2)), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CAUSAL)
def test_with_same_length_any_segments_give_the_same(name: str):
    """Each token sees the last four, so a memory of four is never too short, at any depth."""
    model, ids, context = make(name), words(12), Context(4, clamp=2, same_length=True)
    whole = stream(model, ids, [12], context)
    for lengths in ([6, 6], [1] * 12, [2, 7, 3]):
        assert_close(stream(model, ids, lengths, context), whole, rtol=0, atol=1e-12)


def test_a_leaking_mean_depends_on_how_the_stream_is_cut():
    model, ids = make("leaking"), words(12)
    whole = stream(model, ids, [12], Context(12))
    assert not torch.allclose(stream(model, ids, [6, 6], Context(12)), whole, rtol=0, atol=1e-6)


def see_later_words(model: TransformerXL, context: Context) -> bool:
    """Whether another last word changes anything before it, in a first and in a second segment."""
    ids = words(10)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 13
    memory = model(ids, context=context).memory
    found = False
    for before in (None, memory):
        first, second = (model(x, memory=before, context=context).hidden for x in (ids, changed))
        assert not torch.equal(first[:, -1], second[:, -1])
        found |= not torch.equal(first[:, :-1], second[:, :-1])
    return found


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_no_token_sees_the_future_except_under_the_name_that_says_so(name: str, context: Context):
    assert see_later_words(make(name), context) == (name == "leaking")


def test_parameter_counts_are_the_papers():
    with torch.device("meta"):
        base = TransformerXL(TransformerXLConfig())
        deep = TransformerXL(TransformerXLConfig(depth=60, ffn_width=820))
    assert count_parameters(base) == 151_107_538
    assert count_parameters(deep) == 200_987_338
    assert base.softmax.cutoffs == (20_000, 40_000, 200_000, 267_735)


def test_the_initial_weights_are_the_authors():
    """N(0, 0.02²) but for the norms' gains, N(1, 0.02²), and biases, 0. Spread over ≥ 6 000 entries: ±2 % is 3σ."""
    model = TransformerXL(TransformerXLConfig(2000, 2, 80, 4, 90), seeded(0))
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    assert len(biases) >= 2 * 4  # two norms and two linear layers of the FFN in each block
    assert all((p == 0).all() for p in biases)
    gains = torch.cat([p.flatten() for name, p in named.items() if "norm" in name and name.endswith("weight")])
    assert abs(gains.mean() - 1) < 0.004
    assert_close(gains.std().item(), 0.02, rtol=0.15, atol=0)  # 320 entries: 3σ is 12 %
    weights = {name: p for name, p in named.items() if p.ndim == 2 and p.numel() >= 6000}
    assert len(weights) == 1 + 2 * 7
    for name, p in weights.items():
        assert_close(p.std().item(), 0.02, rtol=0.03, atol=0, msg=name)
        assert abs(p.mean()) < 0.001
    for p in (model.u, model.v):
        assert 0.01 < p.std() < 0.03  # 80 entries
    again, other = TransformerXL(model.config, seeded(0)), TransformerXL(model.config, seeded(1))
    assert torch.equal(again.softmax.weight, model.softmax.weight)
    assert not torch.equal(other.softmax.weight, model.softmax.weight)


def test_sixty_blocks_do_not_collapse_as_the_authors_initialise_them_and_de_escalated_ones_keep_no_mean():
    """Yu & Zhang's 60 blocks in their width: unlike a ViT of that depth, t_sim stays near 0.6 (post) and 0.7 (pre)."""
    config = TransformerXLConfig(1000, 60, ffn_width=820, dropout=0.0)
    ids = torch.randint(1000, (2, 64), generator=seeded(1))
    bounds = {
        (0.5, 0.7): config,
        (0.6, 0.8): replace(config, placement="pre", final_norm=False),
        (0.0, 0.05): replace(config, carried_mean=CarriedMean()),
    }
    for (low, high), variant in bounds.items():
        with torch.no_grad():
            similarity = token_similarity(TransformerXL(variant, seeded(0)).eval()(ids).hidden)
        assert (similarity > low).all()
        assert (similarity < high).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_right_and_do_not_reach_the_memory(name: str):
    model = make(name).requires_grad_(True)
    ids, memory = words(5), make(name)(words(5)).memory
    assert not any(tensor.requires_grad for tensor in model(ids, memory=memory).memory.tensors().values())
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(*parameters: Tensor) -> Tensor:
        of = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(model, of, (ids, words(5).flip(1), memory)).losses.sum()

    direction = [torch.randn(p.shape, generator=seeded(p.numel()), dtype=p.dtype) for p in values]
    gradient = torch.autograd.grad(loss(*values), values)
    slope = sum((g * d).sum() for g, d in zip(gradient, direction, strict=True))
    with torch.no_grad():
        plus, minus = (loss(*(p + e * d for p, d in zip(values, direction, strict=True))) for e in (1e-6, -1e-6))
    assert_close(slope, (plus - minus) / 2e-6, rtol=1e-6, atol=1e-6)  # central differences: 1e-12 of truncation


@pytest.mark.parametrize(("shrink", "left"), [(None, 1.0), (1.0, 0.5)])
def test_the_first_token_of_a_stream_is_not_erased(shrink: float | None, left: float):
    """By itself a complete mean would leave nothing of it; the first token of a later segment is not special."""
    model = TransformerXL(replace(SMALL, carried_mean=CarriedMean(mean=Prefix(shrink=shrink))), seeded(0)).eval()
    seen: dict[str, Tensor] = {}
    model.blocks[0].norm1.register_forward_hook(lambda _m, _i, out: seen.update(normed=out))
    model.blocks[0].stations["ffn_input"].register_forward_hook(lambda _m, _i, out: seen.update(mended=out))
    memory = model(words(3)).memory
    assert_close(seen["mended"][:, 0], left * seen["normed"][:, 0], rtol=0, atol=1e-6)
    model(words(3), memory=memory)
    mean = (memory.total[0] + seen["normed"][:, 0]) / (4 + (shrink or 0))
    assert_close(seen["mended"][:, 0], seen["normed"][:, 0] - mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", MEANS)
def test_a_segment_is_de_escalated_as_by_the_remedy_of_that_name(kind: str):
    model, ids = TransformerXL(SMALL, seeded(0)).double().eval(), words(7)
    built_in = TransformerXL(replace(SMALL, carried_mean=CarriedMean(0.8, MEANS[kind])), seeded(0)).double()
    depthscope.apply(model, DeEscalate(0.8, at="ffn_input", mixing=kind))
    assert_close(model(ids).hidden, built_in.eval()(ids).hidden, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["post", "pre"])
def test_every_station_is_passed_and_can_change_the_trunk(name: str):
    model, ids = make(name), words(5)
    plain = model(ids).hidden
    for station in BLOCK:
        hook = model.blocks[1].stations[station].register_forward_hook(lambda _m, _i, x: x + torch.randn_like(x))
        assert not torch.equal(model(ids).hidden, plain), station
        hook.remove()
    assert torch.equal(model(ids).hidden, plain)
    assert not any("stations" in key for key in model.state_dict())


@pytest.mark.parametrize("name", ["post", "prefix"])
def test_a_memory_survives_a_checkpoint(name: str):
    model, ids = make(name), words(5)
    memory = model(ids).memory
    restored = Memory.from_tensors({key: tensor.clone() for key, tensor in memory.tensors().items()})
    assert memory.tensors().keys() == ({"hidden", "total", "weight"} if name == "prefix" else {"hidden"})
    assert torch.equal(model(ids, memory=restored).hidden, model(ids, memory=memory).hidden)
    assert not torch.equal(model(ids, memory=restored).hidden, model(ids).hidden)


def test_a_memory_keeps_what_the_context_says_and_no_more():
    model, ids = make("post"), words(5)
    memory = model(ids, context=Context(3)).memory
    assert memory.hidden.shape == (2, 2, 3, 8)
    assert_close(memory.hidden[0], model.softmax.embed(ids[:, 2:]) * math.sqrt(8), rtol=0, atol=1e-12)
    assert model(ids, memory=memory, context=Context(7)).memory.hidden.shape[2] == 7
    assert model(ids, memory=memory, context=Context(0)).memory.hidden.shape[2] == 0
    assert torch.equal(model(ids, memory=memory, context=Context(0)).hidden, model(ids, context=Context(0)).hidden)


def test_dropout_is_on_in_training_only():
    model = TransformerXL(replace(SMALL, dropout=0.5), seeded(0))
    ids = words(5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(model(ids).hidden, model(ids).hidden)
    assert torch.equal(model.eval()(ids).hidden, model(ids).hidden)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_runs_on_the_meta_device(name: str):
    with torch.device("meta"):
        assert TransformerXL(VARIANTS[name])(torch.zeros(2, 5, dtype=torch.int64)).hidden.shape == (2, 5, 8)


def test_mixed_precision_keeps_the_sums_wide():
    """bfloat16 has 3 digits; the sums of 40 tokens in it would be off by more than 0.01."""
    model, ids = TransformerXL(VARIANTS["prefix"], seeded(0)), words(40)
    exact = model(ids).memory.total
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(ids, ids)
    assert mixed.memory.total.dtype == torch.float32
    assert_close(mixed.memory.total[0], exact[0], rtol=0, atol=0.01)
    mixed.losses.mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_half_precision_streams_keep_their_sums_wide():
    model = make("prefix", torch.bfloat16)
    prediction: Prediction = model(words(5), words(5))
    assert prediction.hidden.dtype == torch.bfloat16
    assert prediction.memory.total.dtype == torch.float32
    assert prediction.losses.isfinite().all()


def test_it_can_be_copied_and_pickled():
    model, ids = make("prefix"), words(4)
    assert torch.equal(copy.deepcopy(model)(ids).hidden, model(ids).hidden)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids).hidden, model(ids).hidden)


def train(name: str, epochs: list[Tensor], lr: float) -> tuple[TransformerXL, float]:
    """Segments of four with a memory of eight; the mean loss over the second half of the last epoch."""
    config = replace(VARIANTS[name], vocabulary=8, width=32, ffn_width=64, cutoffs=(4,))
    model = TransformerXL(config, seeded(0))
    optimiser = torch.optim.Adam(model.parameters(), lr=lr)
    for ids in epochs:
        memory, losses = None, []
        for start in range(0, 112, 4):
            inputs, targets = ids[:, start : start + 4], ids[:, start + 1 : start + 5]
            prediction = model(inputs, targets, memory, Context(8))
            memory = prediction.memory
            optimiser.zero_grad()
            prediction.losses.mean().backward()
            optimiser.step()
            losses.append(prediction.losses.mean().item())
    return model, sum(losses[14:]) / 14


def periodic(seed: int) -> Tensor:
    """16 rows of 120 words, each word what stood six before it."""
    return torch.stack([torch.randperm(8, generator=seeded(seed + row))[:6] for row in range(16)]).repeat(1, 20)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_learns_and_every_parameter_takes_part(name: str):
    model, loss = train(name, [periodic(0)] * 6, lr=3e-3)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert loss < 0.5 * math.log(8)


def test_it_learns_to_use_its_memory():
    """New words in every epoch. Segments of four can rule out four of eight words without memory: ln 4 at best."""
    _, loss = train("pre", [periodic(100 * epoch) for epoch in range(14)], lr=1e-2)
    assert loss < 0.75 * math.log(4)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: replace(SMALL, depth=0), "at least 1 block, got 0"),
        (lambda: replace(SMALL, width=7), "even width .*got 7"),
        (lambda: TransformerXL(replace(SMALL, heads=3)), "width 8 and 3 heads"),
        (lambda: replace(SMALL, placement="mid"), "'mid'"),
        (lambda: replace(SMALL, final_norm=True), "normed already"),
        (lambda: replace(SMALL, placement="pre", carried_mean=CarriedMean()), "expected post-norm"),
        (lambda: TransformerXL(replace(SMALL, cutoffs=(9, 5))), r"got \(9, 5\)"),
        (lambda: TransformerXL(replace(SMALL, cutoffs=(13,))), "vocabulary of 13 words"),
        (lambda: CarriedMean(mean="mean"), "'mean'"),
        (lambda: Ema(decay=1), "got 1; a decay of 1 is"),
        (lambda: Prefix(shrink=0), "above 0.*got 0"),
        (lambda: Context(0, same_length=True), "at least 1 tokens, got 0"),
        (lambda: Context(-1), "at least 0 tokens, got -1"),
        (lambda: Context(clamp=-1), "got -1"),
        (lambda: Memory.from_tensors({"total": torch.zeros(1)}), r"got \['total'\]"),
        (lambda: make("post")(words(3), memory=make("post")(words(3, rows=1)).memory), "2 rows.*begin a stream"),
        (lambda: make("prefix")(words(3), memory=make("post")(words(3)).memory), "hidden, total, weight"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make_it, message: str):
    with pytest.raises(ValueError, match=message):
        make_it()
