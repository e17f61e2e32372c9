"""Models that are written in unusual ways: the numbers must be right, or a note must say what is not."""

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import depthscope
from depthscope import measures as m
from depthscope.anatomy import anatomy_of
from depthscope.hooks import Listen, Machine
from depthscope.probing import probe, skip_loss
from samples import seeded
from zoo import IDS, MASK, TEXT, TOKENS, make


class Mixing(nn.Module):
    """A block without attention that pulls tokens together; `in_place` writes into its input."""

    def __init__(self, seed: int, in_place: bool = False):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        nn.init.normal_(self.linear.weight, std=0.2, generator=seeded(seed))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        step = self.linear(x) + x.mean(dim=1, keepdim=True)
        if self.in_place:
            x += step
            return x
        return x + step


class Stack(nn.Module):
    """Mixing blocks with something done between them."""

    def __init__(self, between=lambda x: x, **options):
        super().__init__()
        self.layers = nn.ModuleList(Mixing(seed, **options) for seed in range(4))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def test_blocks_that_write_into_their_input():
    plain, in_place = Stack(), Stack(in_place=True)
    in_place.load_state_dict(plain.state_dict())
    expected = probe(plain, TOKENS).curve("token_similarity")
    np.testing.assert_allclose(probe(in_place, TOKENS).curve("token_similarity"), expected, rtol=1e-6)
    assert expected[-1] > expected[0] + 0.1


def test_steps_begin_at_the_block_s_own_input():
    """Something stands between the blocks: what it does is not the next block's doing."""

    def pull(x: Tensor) -> Tensor:
        return x - 0.9 * x.mean(dim=1, keepdim=True)

    model = Stack(pull)
    profile = probe(model, TOKENS)
    with torch.no_grad():
        x = TOKENS
        for number, layer in enumerate(model.layers, start=1):
            y = layer(x)
            rate, angle = m.escalation_rate(x, y).mean().item(), m.angular_distance(x, y).mean().item()
            assert profile.curve("escalation_rate")[number] == pytest.approx(rate, rel=1e-5)
            assert profile.curve("angular_distance")[number] == pytest.approx(angle, rel=1e-4)
            x = pull(y)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Stack(), Stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x).mean() + self.right(torch.cat([x, x[:1]])[:, :5]).mean()


def test_two_towers_of_different_size():
    model = Towers()
    profile = probe(model, TOKENS, blocks="*.layers.*", token_axis=1)  # its second tower reads a sequence twice
    assert profile.depth == 8
    alone = probe(model.right, torch.cat([TOKENS, TOKENS[:1]])[:, :5])
    assert profile.curve("escalation_rate")[5:] == pytest.approx(alone.curve("escalation_rate")[1:], rel=1e-5)


class Renamed(nn.Module):
    """A wrapper with names of its own for what the model inside calls attention_mask."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, which: Tensor, **extra: Tensor) -> Tensor:
        return self.inner(input_ids=ids, attention_mask=which, **extra).last_hidden_state


class Anything(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, **everything: Tensor) -> Tensor:
        return self.inner(**everything).last_hidden_state


class Positional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, None, hidden)
        return x


def test_masks_are_found_wherever_the_model_takes_them():
    bert, batch = make("bert")
    expected = probe(bert, batch).curve("token_similarity")
    assert probe(Renamed(bert), {"ids": IDS, "which": MASK}).curve("token_similarity") == expected
    assert probe(Anything(bert), batch).curve("token_similarity") == expected
    assert probe(bert, IDS).curve("token_similarity") != expected
    first = probe(Positional(), {"x": TOKENS, "hidden": MASK == 0}).curve("token_similarity")[0]
    assert first == pytest.approx(m.token_similarity(TOKENS, MASK).mean().item())


class OwnMask(Stack):
    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


def test_a_mask_that_is_not_understood_is_named():
    notes = probe(OwnMask(), {"x": TOKENS, "padding_mask": MASK == 0}).metadata["notes"]
    assert "not used as masks of real tokens: padding_mask" in notes


def test_a_mask_that_the_model_does_not_hand_on_is_named():
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3}
    model = hf.RwkvForCausalLM(hf.RwkvConfig(**sizes, attention_hidden_size=16, intermediate_size=32)).eval()
    found = probe(model, {"input_ids": IDS, "attention_mask": MASK})
    assert "not used as masks of real tokens: attention_mask" in found.metadata["notes"]
    real = probe(model, {"input_ids": IDS, "attention_mask": MASK}, mask="attention_mask")
    alone = probe(model, IDS[1:, :4]).curve("token_similarity")
    samples = real.frame.query("measure == 'token_similarity' and station == 'output' and sample == 1")["value"]
    assert samples.tolist() == pytest.approx(alone, abs=1e-5)
    depthscope.apply(model, depthscope.remedies.DeEscalate(0.9), causal=True)
    with pytest.raises(ValueError, match=r"after earlier ones \(state=\).*use_cache=False"):
        model.generate(IDS, max_new_tokens=2, pad_token_id=0)


@pytest.mark.parametrize("n", [4, 5])
def test_tokens_with_the_width_before_them_are_refused(n: int):
    """SqueezeBERT; of four groups its weights are 4 wide, and its FFN's 16."""
    sizes = TEXT | {"embedding_size": 16, "intermediate_size": 16}
    model = hf.SqueezeBertModel(hf.SqueezeBertConfig(**sizes, q_groups=4, k_groups=4, v_groups=4)).eval()
    with pytest.raises(ValueError, match=r"got \(2, 16, \d+\)"):
        probe(model, torch.arange(2 * n).view(2, n))


def test_modules_that_several_blocks_share_are_heard_once():
    layers = [nn.TransformerEncoderLayer(16, 4, 24, batch_first=True) for _ in range(3)]
    for layer in layers:
        layer.norm1 = layers[0].norm1
    profile = probe(nn.Sequential(*layers), TOKENS, stations="trunk")
    rows = profile.frame.query("measure == 'escalation_rate' and station == 'after_attention'")
    assert len(rows) == 3 * 2


def test_a_padded_encoder_is_not_taken_for_a_causal_one():
    model, _ = make("torch")
    padded = {"src": TOKENS, "src_key_padding_mask": (torch.arange(7) >= 5).expand(2, 7)}
    assert probe(model, padded).metadata["causal"] is False
    assert probe(model, {"src": TOKENS[:, :1]}).metadata["causal"] is None


def test_gradients_of_the_default_loss_ignore_padding_and_the_rest_of_the_batch():
    model, batch = make("bert")
    both = probe(model, batch, gradients=True).frame.query("measure == 'output_gradient' and sample == 1")["value"]
    alone = {key: value[1:, :4] for key, value in batch.items()}
    cropped = probe(model, alone, gradients=True).frame.query("measure == 'output_gradient'")["value"]
    np.testing.assert_allclose(both, cropped, rtol=1e-4)


def test_excluded_positions_are_counted_among_the_real_tokens():
    model, _ = make("llama")
    left = {"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1)}
    padded = probe(model, left, measures="light", exclude_tokens=[0]).frame.query("sample == 1 and block == 0")
    alone = probe(model, IDS.flip(1)[1:, 3:], measures="light", exclude_tokens=[0]).frame.query("block == 0")
    np.testing.assert_allclose(padded["value"], alone["value"], rtol=1e-5)
    with pytest.raises(ValueError, match="cannot exclude token 500: the sequences have 7 tokens"):
        probe(model, left, exclude_tokens=[500])
    for wrong in ("outliers", 0, [0.5]):
        with pytest.raises(ValueError, match="a list of positions"):
            probe(model, left, exclude_tokens=wrong)


@pytest.mark.parametrize(("excluded", "left"), [([-1], 1), ([0, -1], 2), ([1, -2], 2), ([0, -7], 1)])
def test_excluded_positions_may_be_counted_from_the_end_of_each_sequence(excluded: list[int], left: int):
    model, _ = make("encoder")
    profile = probe(model, {"x": TOKENS, "mask": MASK}, exclude_tokens=excluded)
    real = MASK.clone()
    for row, length in enumerate((7, 4)):
        for index in excluded:
            if -length <= index < length:
                real[row, index % length] = 0
    assert (MASK - real).sum(dim=-1).max() == left
    found = profile.frame.query("measure == 'token_similarity' and block == 0")["value"]
    np.testing.assert_allclose(found, m.token_similarity(TOKENS, real), rtol=1e-6)


class Listed(Stack):
    """Blocks that return lists, and a loss."""

    class Block(Mixing):
        def forward(self, x: Tensor) -> list:
            return [super().forward(x), "extra"]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Block(seed) for seed in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def test_skipping_blocks_that_return_lists():
    model = Listed()
    table = skip_loss(model, TOKENS, loss=lambda output: output.square().mean())
    with torch.no_grad():
        x = TOKENS
        for number in (1, 3, 4):
            x = model.layers[number - 1](x)[0]
    assert table["loss"][2] == pytest.approx(x.square().mean().item(), rel=1e-6)


def test_no_loss_is_made_up_where_the_answer_is_visible():
    model = hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=4, d_inner=24))
    with pytest.raises(ValueError, match="returns no loss"):
        skip_loss(model, {"input_ids": IDS})


def test_a_patch_of_the_user_is_used_and_kept(monkeypatch: pytest.MonkeyPatch):
    calls = 0
    original = F.scaled_dot_product_attention

    def mine(*args, **kwargs):
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", mine)
    model, _ = make("torch")
    later = torch.zeros(7, 7, dtype=torch.bool)
    profile = probe(model, {"src": TOKENS, "mask": later}, measures="attention_entropy")
    assert F.scaled_dot_product_attention is mine
    assert calls >= 3
    assert "attention was not seen" not in " ".join(profile.metadata["notes"])


class Conditioned(nn.Module):
    """Blocks called as block(condition, tokens), as in diffusion transformers."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, condition: Tensor, x: Tensor) -> Tensor:
            return x + self.linear(x) * condition[:, None]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x[:, 0], x)
        return x


@pytest.mark.parametrize("batch", [1, 2])
def test_a_conditioning_vector_is_not_taken_for_tokens(batch: int):
    profile = probe(Conditioned(), TOKENS[:batch])
    assert profile.metadata["tokens"] == 7
    assert profile.curve("token_similarity")[0] == pytest.approx(m.token_similarity(TOKENS[:batch]).mean().item())


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = hf.BertModel(hf.BertConfig(**TEXT))
        self.head = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.bert(input_ids).last_hidden_state)


def test_blocks_of_two_families_are_two_parts():
    profile = probe(WithHead(), {"input_ids": IDS})
    assert profile.metadata["family"] == "bert + torch"
    assert profile.metadata["parts"] == {"bert": 3, "head": 1}
    assert [tower["family"] for tower in profile.metadata["towers"].values()] == ["bert", "torch"]
    curve = profile.curve("token_similarity")
    assert profile.curve("token_similarity", part="head") == curve[3:]  # what leaves one part enters the next
    other = hf.OpenAIGPTModel(hf.OpenAIGPTConfig(vocab_size=50, n_embd=16, n_layer=3, n_head=4, n_positions=16))
    assert probe(other, IDS).metadata["family"] == "unknown"  # its class is called Block, as ours is


def test_blocks_with_cross_attention_show_what_the_ffn_reads():
    config = hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    model = hf.BertModel(config).eval()
    read: list[Tensor] = []
    model.encoder.layer[1].intermediate.register_forward_pre_hook(lambda _m, args: read.append(args[0]))
    batch = {"input_ids": IDS, "encoder_hidden_states": TOKENS}
    profile = probe(model, batch, stations="all", measures=["token_similarity", "attention_entropy"])
    expected = m.token_similarity(read[-1]).mean().item()
    assert profile.curve("token_similarity", "ffn_input")[2] == pytest.approx(expected, rel=1e-6)
    assert len(profile.frame.query("station == 'cross_attention' and measure == 'attention_entropy'")) == 3 * 2 * 4


def test_a_block_that_stands_in_a_list_four_times():
    shared = Mixing(0)
    model = nn.Sequential(*[shared] * 4)
    profile = probe(model, TOKENS)
    assert profile.depth == 4
    assert profile.metadata["shared_weights"] is True


class Rebel(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


def test_a_model_that_turns_gradients_on_itself():
    rebel, plain = Rebel(), Stack()
    plain.load_state_dict(rebel.state_dict())
    assert probe(rebel, TOKENS).curve("token_similarity") == probe(plain, TOKENS).curve("token_similarity")
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        probe(make("bert")[0], IDS, gradients=True)
    with torch.inference_mode():
        assert probe(make("bert")[0], IDS).depth == 3


class WithCompiledPart(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = torch.compile(part, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def test_compiled_parts_run_uncompiled():
    encoder, _ = make("encoder")
    assert probe(WithCompiledPart(encoder), TOKENS).curve("token_similarity") == probe(encoder, TOKENS).curve(
        "token_similarity"
    )


def test_a_tuple_of_tensors_is_refused():
    with pytest.raises(ValueError, match="pass a dict"):
        probe(make("bert")[0], (IDS, MASK))


@pytest.mark.parametrize("with_mask", [False, True])
def test_a_cache_in_the_inputs_is_left_as_it_was_and_the_new_tokens_are_measured(with_mask: bool):
    model, _ = make("llama")
    ids = torch.randint(5, 50, (2, 12), generator=seeded(3))
    whole = probe(model, {"input_ids": ids})
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).past_key_values
    keys = cache.layers[0].keys.clone()
    inputs = {"input_ids": ids[:, 7:], "past_key_values": cache}
    if with_mask:
        inputs["attention_mask"] = torch.ones_like(ids)
    kept: list[Tensor] = []
    keep = Listen({"output"}, lambda _v, _s, tokens, _source: kept.append(tokens[:, 7:].clone()))
    with torch.no_grad(), Machine(model.eval(), anatomy_of(model), keep):
        model(ids)
    expected = [m.token_similarity(tokens).mean().item() for tokens in kept]
    for _ in range(2):  # the second probe finds what the first found
        found = probe(model, inputs)
        assert cache.get_seq_length() == 7
        assert torch.equal(cache.layers[0].keys, keys)
        assert found.metadata["tokens"] == 5
        assert "the inputs bring a cache of 7 tokens: only the new tokens are measured" in found.metadata["notes"]
        assert found.curve("token_similarity")[1:] == pytest.approx(expected, rel=1e-4)
    assert whole.metadata["notes"] == []
