"""A causal mean sees its tokens from the first one on, or says that it does not: decoding with caches of any kind."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close

import depthscope
import zoo
from depthscope.remedies import ContraNorm, DeEscalate, MVSplit, PairNorm, Remedy

ONE = "is given one token after earlier calls, and nothing says how many stand before it: give whole sequences"
pytestmark = pytest.mark.filterwarnings("ignore:cannot tell whether", "ignore:what the remedy covers")
LATER = "do not begin at 0, and no cache that is known: give whole sequences"
RECURRENT = ("mamba", "mamba2", "falcon-mamba")  # their states do not say how many tokens they have seen
GENERATE: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
MIXED = {key: value for key, value in zoo.TEXT.items() if key != "num_hidden_layers"}
MINIMAX = zoo.GROUPED | {"head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4}
REFORMER = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attention_head_size": 8,
    "feed_forward_size": 24,
    "attn_layers": ["local", "lsh"],
    "is_decoder": True,
    "axial_pos_embds": False,
    "max_position_embeddings": 64,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "num_buckets": 2,
    "hash_seed": 0,
}
BOTH = {"input_ids": zoo.IDS, "decoder_input_ids": zoo.IDS}
PROPHETNET = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 2,
    "num_decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "num_buckets": 8,
    "relative_max_distance": 16,
    "decoder_start_token_id": 0,
}
NEMOTRON = MIXED | {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "mtp_layers_block_type": [],
    "num_key_value_heads": 2,
    "head_dim": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 4,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}


def made(build: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model


def llama() -> Any:
    return made(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**zoo.GROUPED)))


def minimax() -> nn.Module:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return hf.MiniMaxForCausalLM(hf.MiniMaxConfig(**MINIMAX, layer_types=kinds))


def recurrent_gemma() -> nn.Module:
    return hf.RecurrentGemmaForCausalLM(hf.RecurrentGemmaConfig(**zoo.TEXT, lru_width=16, attention_window_size=32))


# --- caches of transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (minimax, LATER),
        (recurrent_gemma, LATER),
        (lambda: hf.ReformerModelWithLMHead(hf.ReformerConfig(**REFORMER)), ONE),
    ],
    ids=["MiniMax", "RecurrentGemma", "Reformer"],
)
def test_a_cache_that_does_not_count_its_tokens_is_refused(build: Callable[[], nn.Module], why: str):
    model = made(build)
    inputs = zoo.IDS if "Reformer" in type(model).__name__ else None  # its blocks must be seen to be found
    depthscope.apply(model, DeEscalate(0.9), inputs=inputs)
    with pytest.raises(ValueError, match=why):
        model.generate(zoo.IDS, use_cache=True, **GENERATE)
    whole = model.generate(zoo.IDS, use_cache=False, **GENERATE)
    with torch.no_grad():
        assert torch.equal(model(whole[:, :-1], use_cache=False).logits[:, -1].argmax(dim=-1), whole[:, -1])


def test_a_cache_that_says_0_of_the_tokens_that_it_holds_is_refused():
    model = made(minimax)
    depthscope.apply(model, DeEscalate(0.9))
    with torch.no_grad():
        cache = model(zoo.IDS, use_cache=True).past_key_values
        assert cache.get_seq_length() == 0
        with pytest.raises(ValueError, match=r"holds 0 tokens, of which the remedy saw 7.*use_cache=False"):
            model(zoo.IDS[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("remedy", [DeEscalate(0.5), PairNorm(), MVSplit(0.5, 0.3), ContraNorm()], ids=lambda r: r.name)
def test_a_block_that_is_used_twice_keeps_no_past_apart_in_a_cache(remedy: Remedy):
    model = llama()
    model.model.layers[2] = model.model.layers[1]
    depthscope.apply(model, remedy)
    changed = torch.cat([zoo.IDS[:, :4], zoo.IDS[:, 4:] - 1], dim=1)
    with torch.no_grad():
        one, other = (model(ids, use_cache=False).logits for ids in (zoo.IDS, changed))
        assert torch.equal(one[:, :4], other[:, :4])  # without a cache nothing is mixed up
        with pytest.raises(ValueError, match=r"'model\.layers\.1' runs twice in one call of the model"):
            model(zoo.IDS, use_cache=True)


OTHERS = (DeEscalate(0.5, at="input"), PairNorm(), MVSplit(0.5, 0.3), ContraNorm())
# One remedy in every causal family, and the others in the long tests.
MIXING = [DeEscalate(0.9), *(pytest.param(remedy, marks=pytest.mark.long) for remedy in OTHERS)]


@pytest.mark.parametrize("name", [name for name, specimen in zoo.ZOO.items() if specimen.causal])
@pytest.mark.parametrize("remedy", MIXING, ids=lambda remedy: remedy.name)
def test_every_causal_family_decodes_as_it_reads_or_is_refused(remedy: Remedy, name: str):
    model = made(zoo.ZOO[name].build)
    names = inspect.signature(model.forward).parameters
    if "use_cache" not in names:
        pytest.skip("it takes no cache")
    takes = "past_key_values" if "past_key_values" in names else "cache_params"
    try:
        depthscope.apply(model, remedy)
    except ValueError as error:
        pytest.skip(str(error))

    def pieces() -> Tensor:
        found = model(zoo.IDS[:, :4], use_cache=True)
        read = [found[0]]
        for place in range(4, 7):
            cache = {takes: found[takes]}
            found = model(zoo.IDS[:, place : place + 1], use_cache=True, **cache)
            read.append(found[0])
        return torch.cat(read, dim=1)

    with torch.no_grad():
        if name in RECURRENT:
            with pytest.raises(ValueError, match="with use_cache=False"):
                pieces()
        else:
            whole = model(zoo.IDS, use_cache=False)[0]
            if isinstance(remedy, ContraNorm):  # it needs the tokens themselves
                with pytest.raises(ValueError, match="with use_cache=False"):
                    pieces()
            else:
                assert_close(pieces(), whole, rtol=1e-4, atol=1e-4)


# --- one token, and places ------------------------------------------------------------------------------------


def test_sequences_of_one_token_are_allowed_where_nothing_can_stand_before_them():
    model = depthscope.apply(llama(), DeEscalate(0.9))
    one = zoo.IDS[:, :1]
    with torch.no_grad():
        expected = model(one).logits  # the first call ever
        model(zoo.IDS)
        for known in (
            {},  # the model makes an empty cache
            {"use_cache": False},
            {"past_key_values": hf.DynamicCache()},
            {"position_ids": torch.zeros(2, 1, dtype=torch.long)},
        ):
            assert_close(model(one, **known).logits, expected)
    assert model.generate(one, **GENERATE).shape == (2, 4)  # it brings an empty cache


def test_a_decoder_may_be_given_its_first_token_alone():
    model = made(zoo.ZOO["t5"].build)
    depthscope.apply(model, DeEscalate(0.9))
    with torch.no_grad():
        whole = model(input_ids=zoo.IDS, decoder_input_ids=zoo.IDS)[0]
        assert_close(model(input_ids=zoo.IDS, decoder_input_ids=zoo.IDS[:, :1])[0], whole[:, :1])


def test_places_that_do_not_begin_at_0_are_refused():
    model = depthscope.apply(llama(), DeEscalate(0.9))
    places = torch.arange(7).expand(2, 7)
    padded = (zoo.MASK.flip(1).cumsum(dim=-1) - 1).clamp(min=0)
    model(zoo.IDS, position_ids=places)
    model(zoo.IDS, position_ids=padded, attention_mask=zoo.MASK.flip(1))
    with pytest.raises(ValueError, match=f"position_ids that {LATER}"):
        model(zoo.IDS, position_ids=places + 3)


# --- caches of other libraries --------------------------------------------------------------------------------


class Layer(nn.Module):
    """Pre-norm, with a running sum for attention, which it may keep (litgpt's `set_kv_cache`, mambapy's `step`)."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.norm, self.kept = nn.Linear(16, 16), nn.LayerNorm(16), False
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return self.step(x, x)[0]
        sums = self.mixer(self.norm(x)).cumsum(dim=1)
        if self.kept:
            sums = sums if self.past is None else sums + self.past
            self.past = sums[:, -1:]
        return x + sums

    def step(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        past = past + self.mixer(self.norm(x))
        return x + past, past


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor, input_pos: Tensor | None = None, start_pos: int = 0, cache: Any = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def keep(self) -> None:
        for layer in self.layers:
            layer.kept, layer.past = True, None

    def step(self, ids: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x, after = self.embed(ids), []
        for layer, before in zip(self.layers, past, strict=True):
            x, now = layer.step(x, before)  # type: ignore[operator]
            after.append(now)
        return x, after


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda model: model(zoo.IDS[:, 6:]), ONE),
        (lambda model: model(zoo.IDS[:, 4:], torch.arange(4, 7)), f"input_pos that {LATER}"),
        (lambda model: model(zoo.IDS[:, 4:], start_pos=4), f"start_pos that {LATER}"),
        (lambda model: model(zoo.IDS[:, 4:], cache=list(zoo.TOKENS)), r"tokens before it \(cache=\)"),
        (lambda model: model.step(zoo.IDS[:, 6], [zoo.TOKENS[:, 0]] * 2), "while the block itself is not called"),
        (lambda model: [layer(zoo.TOKENS[:, 0]) for layer in model.layers], "with an axis less than before"),
    ],
    ids=["one token", "input_pos", "start_pos", "cache", "step", "one by one"],
)
@pytest.mark.parametrize("remedy", [DeEscalate(0.9), PairNorm()], ids=lambda remedy: remedy.name)
def test_a_cache_of_its_own_is_refused(remedy: Remedy, call: Callable[[Any], Any], why: str):
    model = made(Model)
    depthscope.apply(model, remedy, causal=True)
    model.keep()
    model(zoo.IDS)
    with pytest.raises(ValueError, match=why):
        call(model)
    for layer in model.layers:
        layer.kept = False
    assert model(zoo.IDS[:1]).shape == (1, 7, 16)  # whole sequences go on


def test_decoding_from_the_first_token_on_is_refused_at_the_second():
    model = depthscope.apply(made(Model), DeEscalate(0.9), causal=True)
    model.keep()
    model(zoo.IDS[:, :1])
    with pytest.raises(ValueError, match=ONE):
        model(zoo.IDS[:, 1:2])


# --- tokens of another number, and masks that do not arrive ---------------------------------------------------


@pytest.mark.parametrize("hints", [{}, {"causal": True}, {"inputs": BOTH, "blocks": "prophetnet.decoder.layers.*"}])
def test_streams_side_by_side_are_refused(hints: dict[str, Any]):
    """ProphetNet's decoder has three streams, one behind the other: the second would see later tokens of the first."""
    model = made(lambda: hf.ProphetNetForConditionalGeneration(hf.ProphetNetConfig(**PROPHETNET)))
    depthscope.apply(model, DeEscalate(0.5), **hints)
    with pytest.raises(ValueError, match=r"is given 21 tokens, and the model 7: .*depthscope\.remove"):
        model(**BOTH)


def test_a_block_that_is_told_of_no_mask_has_that_of_the_model():
    """Nemotron-H gives its MLPs and mixtures of experts None; its padding is padding there, too."""
    model = made(lambda: hf.NemotronHForCausalLM(hf.NemotronHConfig(**NEMOTRON)))
    short = zoo.IDS[1:, :4]
    padded, alone = (
        depthscope.probe(model, inputs, measures=["token_similarity"]).frame.query("station == 'output'")
        for inputs in ({"input_ids": zoo.IDS, "attention_mask": zoo.MASK}, {"input_ids": short})
    )
    assert padded[padded["sample"] == 1]["value"].tolist() == pytest.approx(alone["value"].tolist(), abs=1e-6)
    depthscope.apply(model, DeEscalate(0.9), DeEscalate(0.5, at="input"))
    with torch.no_grad():
        found = model(zoo.IDS, attention_mask=zoo.MASK, use_cache=False).logits[1:, :4]
        assert_close(found, model(short, use_cache=False).logits, rtol=0, atol=1e-5)
