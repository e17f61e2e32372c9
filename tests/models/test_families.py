"""Families by name: base shapes as published, weights as their library draws them, impossible shapes refused."""

import pytest
import torch
import transformers
from torch import nn

from depthscope.memory import available_memory, count_parameters, require_memory
from depthscope.models import families
from depthscope.models.families import FAMILIES, EncoderFamily, HuggingFaceFamily, Shape, build_family

HUGGING_FACE = {name: family for name, family in FAMILIES.items() if isinstance(family, HuggingFaceFamily)}
SMALL = {"depth": 2, "width": 32, "heads": 4}


def batch_for(model: nn.Module) -> dict[str, torch.Tensor]:
    dtype = next(model.parameters()).dtype
    reads = getattr(model, "main_input_name", "x")
    if reads == "input_ids":
        ids = torch.arange(10, 20).repeat(2, 1)
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    return {reads: torch.zeros(2, 5, 32, dtype=dtype) if reads == "x" else torch.zeros(1, 3, 224, 224, dtype=dtype)}


def estimate(monkeypatch: pytest.MonkeyPatch, **asked) -> int:
    """The size that the memory check sees; nothing is built."""

    class Seen(Exception):
        pass

    def stop(parameters: int, _dtype: torch.dtype, **_about) -> None:
        raise Seen(parameters)

    with monkeypatch.context() as patch:
        patch.setattr(families, "require_memory", stop)
        with pytest.raises(Seen) as seen:
            build_family(**asked)
    return seen.value.args[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs_in_a_small_shape(name: str):
    model = build_family(name, **SMALL)
    assert not model.training
    with torch.no_grad():
        output = model(**batch_for(model))
    tokens = output if isinstance(output, torch.Tensor) else output.last_hidden_state
    assert tokens.shape[-1] == 32
    assert tokens.isfinite().all()


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        # sizes of the published base models, without their heads
        ("bert", 109.5),
        ("roberta", 124.6),
        ("albert", 11.7),
        ("distilbert", 66.4),
        ("mpnet", 109.5),
        ("xlnet", 116.7),
        ("gpt2", 124.4),
        ("opt", 125.2),
        ("t5", 222.9),
        ("vit", 86.4),
        ("electra", 108.9),
        ("modernbert", 149.0),
        ("deberta", 183.8),
        ("bart", 139.4),
        ("dinov2", 85.7),  # published with 518 × 518 pixels, whose positions are 0.9 million more
        # ours: 12 × (4 × 768² + 3 × 768 × 2048) + 32000 × 768 + norms; 12 × (4 × 512² + 2 × 512 × 2048) + …
        ("llama", 109.5),
        ("encoder", 37.8),
    ],
)
def test_base_shapes_are_the_published_ones(name: str, millions: float, monkeypatch: pytest.MonkeyPatch):
    assert estimate(monkeypatch, name=name) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_estimate_is_exact(name: str, monkeypatch: pytest.MonkeyPatch):
    asked = {"name": name, "depth": 5, "width": 32, "heads": 4}
    assert estimate(monkeypatch, **asked) == count_parameters(build_family(**asked))


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_built_as_the_library_builds_it(name: str):
    """Drawing once, after the meta device, must give what the constructor gives: same buffers, same deviations."""
    ours = build_family(name, **SMALL)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        theirs = getattr(transformers, type(ours).__name__)(ours.config)
    for (key, buffer), (other, expected) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert key == other
        assert torch.equal(buffer, expected), key
    for (key, weight), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert weight.shape == expected.shape
        if weight.numel() >= 1024:  # the deviation of 1024 draws is known to 1/√2048 = 2 %; twice, with five sigmas
            assert weight.std().item() == pytest.approx(expected.std().item(), rel=0.16), key


def test_the_ffn_and_the_heads_follow_the_width():
    config = build_family("bert", 1, 128).config
    assert (config.intermediate_size, config.num_attention_heads) == (512, 2)
    config = build_family("gemma", 1, 48).config
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (384, 12, 12)
    assert config.head_dim == 4


def test_weights_are_a_function_of_the_seed_and_leave_the_random_state():
    for name in ("bert", "encoder"):
        before = torch.get_rng_state()
        first, second, other = (build_family(name, **SMALL, seed=seed).state_dict() for seed in (3, 3, 4))
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["bert", "xlnet", "gemma", "encoder"])
def test_dtype(name: str):
    model = build_family(name, **SMALL, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        output = model(**batch_for(model))
    assert (output if isinstance(output, torch.Tensor) else output.last_hidden_state).dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name, family in HUGGING_FACE.items() if family.causal])
def test_language_models_have_a_loss(name: str):
    model = build_family(name, **SMALL, language_model=True)
    ids = torch.arange(10, 20).repeat(2, 1)
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss > 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"name": "bret"}, "did you mean 'bert'.*expected one of bert, roberta"),
        ({"name": "???"}, r"unknown family '\?\?\?': expected one of"),
        ({"name": "bert", "depth": 0}, "at least 1 block, got 0"),
        ({"name": "encoder", "depth": -1}, "at least 1 block, got -1"),
        ({"name": "bert", "width": 100, "heads": 7}, "width 100 and 7 heads"),
        ({"name": "bert", "width": 100}, "width 100 and 12 heads"),
        ({"name": "bert", "width": 0}, "width 0"),
        ({"name": "llama", "width": 36}, "even width for 'llama'.*got 3: width 36 and 12 heads"),
        ({"name": "bert", "language_model": True}, r"causal language model \(gpt2, opt.*got 'bert'"),
        ({"name": "encoder", "language_model": True}, "got 'encoder'"),
        ({"name": "bert", "depth": 10**9}, r"GB needed, .* GB available"),
        ({"name": "encoder", "width": 2**20}, r"GB needed, .* GB available"),
    ],
)
def test_impossible_models_are_refused(asked: dict, message: str):
    with pytest.raises(ValueError, match=message):
        build_family(**asked)


def test_memory_counts_the_dtype():
    parameters = available_memory() // 4  # in float32 exactly what there is, and nothing to spare
    with pytest.raises(ValueError, match=r"float32: .* GB needed"):
        require_memory(parameters, torch.float32)
    require_memory(parameters // 2, torch.bfloat16)


def test_memory_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path):
    from depthscope import memory

    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    assert available_memory() > 1e8


def test_a_family_can_be_added_and_is_then_built_by_its_name():
    family = EncoderFamily("narrow-encoder", Shape(2, 16, 2, 32))
    FAMILIES.register(family)
    try:
        model = build_family("narrow-encoder", seed=1)
        assert model.blocks[1].config.width == 16
        same = EncoderFamily().draw(Shape(2, 16, 2, 32), False, torch.float32, seed=1)
        assert torch.equal(model.blocks[1].ffn[0].weight, same.blocks[1].ffn[0].weight)
        with pytest.raises(ValueError, match="'narrow-encoder' exists twice"):
            FAMILIES.register(EncoderFamily("narrow-encoder"))
    finally:
        FAMILIES.unregister("narrow-encoder")
