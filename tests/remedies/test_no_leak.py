"""No remedy shows a token the future, in causal models that nobody here wrote an anatomy for, and in wrapped ones."""

import warnings
from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import depthscope
import zoo
from depthscope.anatomy import anatomy_of
from depthscope.discovery import is_causal
from depthscope.hooks import undisturbed
from depthscope.inputs import batches
from depthscope.remedies import (
    ContraNorm,
    DeEscalate,
    MVSplit,
    PairNorm,
    ResidualWeight,
    applied,
)

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # DeBERTa, of transformers
TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = TEXT | {"num_key_value_heads": 2}
BART = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2}
IMAGE = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
SEEN = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(98))  # what a vision tower sees, 4 patches
HEARD = torch.randn(3, 8, 14, generator=torch.Generator().manual_seed(97))
READ = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(99))  # what an encoder reads


class Wrapper(nn.Module):
    """Hides the configuration of what it wraps, and names its argument in another way."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, numbers: Tensor) -> Tensor:
        return self.inner(numbers)[0]


class Noisy(nn.Module):
    """A causal model whose dropout is always on."""

    def __init__(self):
        super().__init__()
        self.inner = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT))

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(input_ids)[0], 0.3, training=True)


def bert_decoder(**more: object) -> nn.Module:
    return hf.BertLMHeadModel(hf.BertConfig(**TEXT, is_decoder=True, **more))


def broken() -> nn.Module:
    model = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=4))
    model.transformer.h[1].mlp.dense_h_to_4h.bias.data[0] = torch.nan
    return model


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4, **EXPERTS)),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**GROUPED, num_experts=4, moe_intermediate_size=16, head_dim=4, **EXPERTS)
    ),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
    "mbart": lambda: hf.MBartForConditionalGeneration(hf.MBartConfig(**BART)),
    "marian": lambda: hf.MarianMTModel(hf.MarianConfig(**BART)),
    "pegasus": lambda: hf.PegasusForConditionalGeneration(hf.PegasusConfig(**BART)),
    "bert to bert": lambda: hf.EncoderDecoderModel(
        encoder=hf.BertModel(hf.BertConfig(**TEXT)), decoder=bert_decoder(add_cross_attention=True)
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**BART, num_mel_bins=8, max_source_positions=7, max_target_positions=32)
    ),
    "vision to text": lambda: hf.VisionEncoderDecoderModel(
        encoder=hf.ViTModel(hf.ViTConfig(**IMAGE)), decoder=bert_decoder(add_cross_attention=True)
    ),
    "vision to gpt2": lambda: hf.VisionEncoderDecoderModel(
        encoder=hf.ViTModel(hf.ViTConfig(**IMAGE)),
        decoder=hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32, add_cross_attention=True)
        ),
    ),
    "blip": lambda: hf.BlipForConditionalGeneration(hf.BlipConfig(text_config=TEXT, vision_config=IMAGE)),
    "clip": lambda: hf.CLIPModel(hf.CLIPConfig(text_config=TEXT | {"eos_token_id": 49}, vision_config=IMAGE)),
    "llava": lambda: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**IMAGE),
            text_config=hf.LlamaConfig(**GROUPED),
            image_token_id=4,
            vision_feature_layer=-1,
        )
    ),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=4)),
    "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**TEXT)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=4)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, head_dim=4)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED)),
    "a wrapped decoder": lambda: Wrapper(bert_decoder()),
}
CAUSAL |= {name: s.build for name, s in zoo.ZOO.items() if name not in CAUSAL and s.causal and s.inputs is zoo.text}
MIXTURES = ("mixtral", "qwen3-moe")  # which regroup their sums in some draws only
BIDIRECTIONAL: dict[str, Callable[[], nn.Module]] = {
    "deberta": lambda: hf.DebertaV2Model(hf.DebertaV2Config(**TEXT)),
    "modernbert": lambda: hf.ModernBertModel(hf.ModernBertConfig(**TEXT, cls_token_id=1, sep_token_id=2)),
    "electra": lambda: hf.ElectraModel(hf.ElectraConfig(**TEXT, embedding_size=16)),
}


def build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model


def arguments(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """What the model is called with; of an encoder-decoder, `ids` are the decoder's."""
    if isinstance(model, Wrapper):
        return {"numbers": ids}
    if isinstance(model, hf.WhisperForConditionalGeneration):
        return {"input_features": HEARD, "decoder_input_ids": ids}
    if isinstance(model, hf.VisionEncoderDecoderModel):
        return {"pixel_values": SEEN, "decoder_input_ids": ids}
    if isinstance(model, hf.CLIPModel | hf.BlipForConditionalGeneration):
        return {"pixel_values": SEEN, "input_ids": ids}
    if isinstance(model, hf.LlavaForConditionalGeneration):
        return {"pixel_values": SEEN, "input_ids": torch.cat([torch.full((3, 4), 4), ids], dim=1)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {"input_ids": READ, "decoder_input_ids": ids}
    return {"input_ids": ids}


def tokens_of(output: object) -> Tensor:
    """(batch, n, …) of the causal part; CLIP's are those of its text tower."""
    if isinstance(output, hf.models.blip.modeling_blip.BlipForConditionalGenerationModelOutput):
        return output.logits
    if isinstance(output, hf.models.clip.modeling_clip.CLIPOutput):
        return output.text_model_output.last_hidden_state
    return output if isinstance(output, Tensor) else output[0]


def change_of_earlier_tokens(model: nn.Module, ids: Tensor) -> float:
    """By how much the outputs before the last position change with the last token, over the largest output."""
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 7) % 40 + 5
    with torch.no_grad():
        before, after = (model(**arguments(model, i)) for i in (ids, changed))
    before, after = (tokens_of(y) for y in (before, after))
    return float((before - after)[:, :-1].abs().max() / before.abs().max())


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_stays_causal(name: str):
    for seed in range(10 if name in MIXTURES else 1):
        model = build(CAUSAL[name], seed)
        ids = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(seed))
        plain = change_of_earlier_tokens(model, ids)
        assert plain < 1e-6  # the model itself is causal, but for the rounding of regrouped experts
        for inputs in (None, arguments(model, ids)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "cannot tell", without inputs
                depthscope.apply(model, DeEscalate(0.5), inputs=inputs)
            assert applied(model)
            assert change_of_earlier_tokens(model, ids) < 1e-5
            depthscope.remove(model)


REMEDIES = (
    PairNorm(),
    ContraNorm(),
    MVSplit(0.5, 0.3),
    ResidualWeight(0.5, "feature"),
)
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon-mamba", "jamba")  # in some blocks at least
# Models of every kind that nobody here wrote an anatomy for, and wrapped ones; the others are for `make test-all`.
KINDS = ("mixtral", "marian", "whisper", "bert to bert", "vision to gpt2", "blip", "clip", "llava", "gpt-neox",
         "bloom", "a wrapped decoder", "jamba")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in KINDS else pytest.mark.long) for n in CAUSAL])
def test_the_remedies_of_other_papers_stay_causal(name: str):
    """Every one that a family does not refuse. Those of the trunk are refused by none, and those that scale attention
    only where there is none or its branch is hidden."""
    model = build(CAUSAL[name], 0)
    ids = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    before = change_of_earlier_tokens(model, ids)
    with torch.no_grad():
        plain = tokens_of(model(**arguments(model, ids)))
    put_in = set()
    for remedy in REMEDIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "cannot tell", without inputs
            try:
                depthscope.apply(model, remedy)
            except ValueError:  # refused; tests/remedies/test_published_remedies.py has the reasons
                continue
        put_in.add(remedy.name)
        with torch.no_grad():
            assert not torch.allclose(tokens_of(model(**arguments(model, ids))), plain, atol=1e-3), remedy
        assert max(before, change_of_earlier_tokens(model, ids)) < 1e-5, remedy
        depthscope.remove(model)
    assert {"pair-norm", "contra-norm"} <= put_in


@pytest.mark.parametrize("make", [Noisy, broken], ids=["always dropping out", "a weight that is nan"])
def test_doubt_counts_as_causal(make: Callable[[], nn.Module]):
    model = build(make, 0) if make is Noisy else make().eval()
    ids = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    with undisturbed(model):
        assert is_causal(model, anatomy_of(model), next(batches(model, {"input_ids": ids})))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_a_bidirectional_model_is_seen_to_be_one(name: str, size: int):
    for seed in range(3):
        model = build(BIDIRECTIONAL[name], seed)
        ids = torch.randint(5, 50, (size, 9), generator=torch.Generator().manual_seed(seed))
        with undisturbed(model):
            assert is_causal(model, anatomy_of(model), next(batches(model, {"input_ids": ids}))) is False


def test_an_encoder_and_a_decoder_of_one_family_are_two_parts():
    anatomy = anatomy_of(build(CAUSAL["bert to bert"], 0))
    parts = [(block.part, block.causal) for block in anatomy.blocks]
    assert parts == [("encoder", False)] * 2 + [("decoder", True)] * 2
    assert anatomy.causal is None
    wrapped = anatomy_of(build(CAUSAL["a wrapped decoder"], 0))
    assert wrapped.causal is True
    assert {block.part for block in wrapped.blocks} == {""}


def test_what_the_user_says_wins():
    model = build(BIDIRECTIONAL["electra"], 0)
    depthscope.apply(model, DeEscalate(0.5), causal=True)
    assert mixings(model) == {"": {"causal"}}


def mixings(model: nn.Module) -> dict[str, set[str]]:
    """Part → the kinds of mean that its remedies take."""
    found: dict[str, set[str]] = {}
    for _, hook in depthscope.hooks.staying.hooks_in(model):
        if hook.remedy is not None:
            found.setdefault(hook.part, set()).add(hook.mean.kind)
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clip", {"vision": {"full"}, "text": {"causal"}}),
        ("llava", {"vision": {"full"}, "language": {"causal"}}),
        ("bart", {"encoder": {"full"}, "decoder": {"causal"}}),
        ("vision to text", {"encoder": {"full"}, "decoder": {"causal"}}),
    ],
)
def test_each_tower_has_the_mean_that_its_causality_allows(name: str, expected: dict[str, set[str]]):
    model = build(CAUSAL[name], 0)
    depthscope.apply(model, DeEscalate(0.5))
    assert mixings(model) == expected
    assert {item.part for item in applied(model)} == set(expected)


def test_siglip_reads_text_in_both_directions():
    model = build(lambda: hf.SiglipModel(hf.SiglipConfig(text_config=TEXT, vision_config=IMAGE)), 0)
    depthscope.apply(model, DeEscalate(0.5))
    assert mixings(model) == {"vision": {"full"}, "text": {"full"}}


def test_numbers_and_paths_choose_a_tower():
    for options in ({"blocks": "model.language_model.layers.*"}, {}):
        model = build(CAUSAL["llava"], 0)
        depthscope.apply(model, DeEscalate(0.5, blocks=None if options else (3, 4)), **options)
        assert [item.block for item in applied(model)] == [f"model.language_model.layers.{i}" for i in (0, 1)]
        assert set(next(iter(mixings(model).values()))) == {"causal"}


def test_nobody_can_unsay_that_a_tower_is_causal():
    model = build(CAUSAL["llava"], 0)
    with pytest.raises(ValueError, match="causal=False, but language is causal"):
        depthscope.apply(model, DeEscalate(0.5), causal=False)
    assert not applied(model)


@pytest.mark.parametrize("hints", [{}, {"is_causal": False}], ids=["as it is", "told to look both ways"])
def test_a_decoder_that_is_told_to_look_both_ways_is_tried(hints: dict[str, bool]):
    """Embedding models are made of decoders; what their configuration says is not believed, but tried."""
    model = build(lambda: hf.Qwen3Model(hf.Qwen3Config(**GROUPED, head_dim=4, **hints)), 0)
    ids = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    assert anatomy_of(model).causal is (None if hints else True)
    assert depthscope.probe(model, {"input_ids": ids}).metadata["causal"] is not bool(hints)
    depthscope.apply(model, DeEscalate(0.5), inputs={"input_ids": ids})
    assert mixings(model) == {"": {"full" if hints else "causal"}}
