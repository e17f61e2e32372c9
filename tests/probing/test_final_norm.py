"""What the head reads: the final norm is found by where the last block's output goes, or not at all."""

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from depthscope import measures as m
from depthscope.models import BlockConfig, Encoder
from depthscope.probing import probe
from samples import seeded
from zoo import IDS, TOKENS, make, run

# Families with a norm behind their last block, and what it is called there.
FINAL = {
    "gpt2": "transformer.ln_f",
    "llama": "norm",
    "opt": "model.decoder.final_layer_norm",
    "vit": "layernorm",
}


@pytest.mark.parametrize("name", FINAL)
def test_what_is_measured_is_what_the_model_returns(name: str):
    model, inputs = make(name)
    profile = probe(model, inputs)
    assert profile.metadata["final_norm"] == FINAL[name]
    with torch.no_grad():
        state = run(model.base_model.eval(), inputs)
    rows = profile.frame.query("station == 'final_norm' and measure == 'token_similarity'")
    assert set(rows["block"]) == {profile.depth}
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    np.testing.assert_allclose(rows["value"], m.token_similarity(state, mask), rtol=1e-5, atol=1e-6)


def test_both_halves_of_an_encoder_decoder_have_one():
    model, inputs = make("t5")
    profile = probe(model, inputs)
    rows = profile.frame.query("station == 'final_norm' and measure == 'token_similarity'")
    assert sorted(set(rows["block"])) == [profile.metadata["parts"]["encoder"], profile.depth]


@pytest.mark.parametrize("name", ["bert", "albert", "distilbert"])
def test_post_norm_models_have_none(name: str):
    profile = probe(*make(name))
    assert profile.metadata["final_norm"] is None
    assert profile.names("final_norm") == []


class Behind(nn.Module):
    """Our blocks, and something behind them."""

    def __init__(self, norm: nn.Module, what: str = "all", between: bool = False):
        super().__init__()
        self.encoder = Encoder(3, BlockConfig(16, 4), generator=seeded(0))
        self.tail, self.what, self.between = norm, what, between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.encoder.blocks:
            x = block(x)
            if self.between:  # read aside, as an auxiliary head does
                self.tail(x)
        if self.what == "first":
            return self.tail(x[:, 0])
        if self.what == "changed":
            return self.tail(x * 2)
        return self.tail(x.mul_(2) if self.what == "written" else x)


class NormedHead(nn.Module):
    """Named a norm, and no norm: it mixes features."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


@pytest.mark.parametrize("what", ["first", "changed", "written"])
def test_a_norm_that_reads_something_else_is_not_taken_for_it(what: str):
    assert probe(Behind(nn.LayerNorm(16)), TOKENS).metadata["final_norm"] == "tail"
    assert probe(Behind(nn.LayerNorm(16), what), TOKENS).metadata["final_norm"] is None


def test_what_is_only_named_a_norm_is_not_taken_for_it():
    assert probe(Behind(NormedHead()), TOKENS).metadata["final_norm"] is None


def test_a_norm_that_reads_every_block_counts_behind_the_last_one_only():
    profile = probe(Behind(nn.LayerNorm(16), between=True), TOKENS, measures="all")
    assert set(profile.frame.query("station == 'final_norm'")["block"]) == {3}
    assert not [note for note in profile.metadata["notes"] if "between the blocks" in note]
    single = profile.frame.query("station == 'final_norm' and measure == 'token_similarity'")
    assert len(single) == len(TOKENS)


def test_it_leaves_no_hook_behind():
    model = Behind(nn.LayerNorm(16))
    probe(model, TOKENS)
    assert not model.tail._forward_hooks
    with pytest.raises(ValueError, match="fails on these inputs"):
        probe(model, torch.randn(2, 5, 12))
    assert not model.tail._forward_hooks


# --- sinks: where they stand, and what they are called ------------------------------------------------


class Spells:
    """A tokenizer that can spell ids, with a first token of its own."""

    bos_token, bos_token_id = "<s>", 1

    def decode(self, ids: list[int]) -> str:
        return {9: "\n", 1: "<s>"}.get(ids[0], f"word{ids[0]}")


def with_a_sink() -> hf.GPT2Model:
    """The embedding of id 9 is huge in one feature, and stays so."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.GPT2Model(hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=4, n_positions=16))
    with torch.no_grad():
        model.wte.weight[9, 3] = 100.0
    return model


def test_under_left_padding_a_sink_is_counted_among_the_real_tokens():
    ids = IDS[:, :6].clone()
    ids[ids == 9] = 10
    ids[0, 2], ids[1, 4] = 9, 9
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])  # both stand at place 2 of the real tokens
    profile = probe(with_a_sink(), {"input_ids": ids, "attention_mask": mask}, tokenizer=Spells())
    assert set(profile.sinks["token"]) == {2}
    assert set(profile.sinks["sample"]) == {0, 1}
    assert set(profile.sinks["text"]) == {"\n"}
    assert set(profile.sink_tokens()["text"]) == {"\n"}
    unspelled = probe(with_a_sink(), {"input_ids": ids, "attention_mask": mask})
    assert set(unspelled.sinks["text"]) == {""}


def test_sequences_without_the_first_token_of_the_tokenizer_are_named():
    ids = IDS.clone()
    ids[0, 0], ids[1, 0] = 1, 7
    noted = probe(with_a_sink(), {"input_ids": ids}, tokenizer=Spells()).metadata["notes"]
    assert [note for note in noted if note.startswith("1 of 2 sequences do not begin with '<s>'")]
    mask = torch.ones_like(ids)
    ids[1, :3], mask[1, :2] = torch.tensor([0, 0, 1]), 0  # it begins behind the padding
    assert not any(
        "begin with" in note
        for note in probe(with_a_sink(), {"input_ids": ids, "attention_mask": mask}, tokenizer=Spells()).metadata[
            "notes"
        ]
    )
