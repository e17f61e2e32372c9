"""Planted models: what is there is reported, what is not there is not; sinks, gradients, skipped blocks."""

import numpy as np
import pytest
import torch
import transformers as hf
from planted_collapse import profiles
from torch import nn

from depthscope.models import BlockConfig, Encoder
from depthscope.probing import probe, skip_loss
from samples import seeded
from zoo import IDS, MASK, TOKENS, make


def test_planted_collapses():
    found = profiles()
    tokens, sequences, sink = found.values()
    assert tokens.curve("token_similarity")[0] < 0.1
    assert tokens.curve("token_similarity")[-1] == pytest.approx(1)
    assert tokens.curve("effective_rank")[0] > 15
    assert tokens.curve("effective_rank")[-1] == pytest.approx(1, abs=1e-5)
    # Sequences that collapse onto each other are no collapse of tokens.
    assert max(sequences.curve("token_similarity")) < 0.1
    assert max(sequences.curve("cosine_similarity")) < 0.1
    assert min(sequences.curve("effective_rank")) > 15
    # One huge token: raw similarity is blind, directions are not, and the token is named.
    assert max(sink.curve("token_similarity")) < 0.1
    assert sink.curve("direction_similarity")[0] < 0.7
    assert sink.curve("direction_similarity")[-1] == pytest.approx(1)
    assert min(sink.curve("largest_token_share")) > 0.9
    assert list(sink.sink_tokens()["token"]) == [0, 0]


class Sinking(nn.Module):
    """Tokens through our blocks; token 2 is made huge after the second block and normal after the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(6, BlockConfig(16, 4), generator=seeded(0))

        def scale(factor: float):
            def hook(_module, _args, output):
                output = output.clone()
                output[:, 2] *= factor
                return output

            return hook

        self.encoder.blocks[1].register_forward_hook(scale(50.0))
        self.encoder.blocks[3].register_forward_hook(scale(50.0))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.encoder(x, mask=mask)


def test_sinks_are_named_with_the_blocks_where_they_live():
    profile = probe(Sinking(), TOKENS, measures="spectral")
    table = profile.sink_tokens()
    assert list(table["token"]) == [2, 2]
    assert list(table["sample"]) == [0, 1]
    assert set(profile.sinks["block"]) == {2, 4}  # post-norm makes it normal again in between
    assert table["peak_norm_ratio"].between(40, 60).all()
    drawn = profile.frame.query("measure == 'sink_attention'")
    assert set(drawn["block"]) == {3, 5}
    assert len(drawn) == 2 * 2 * 4
    assert drawn["value"].between(0, 1).all()
    sizes = profile.frame.query("measure == 'sink_value_norm' and block == 3")["value"]
    assert (sizes > 10).all()  # a token 50 times as large has values about as much larger


def test_sink_numbers_equal_their_definitions():
    model = Sinking()
    profile = probe(model, TOKENS, measures="spectral")
    with torch.no_grad():
        x = TOKENS
        for block in model.encoder.blocks[:2]:
            x = block(x)
        attention = model.encoder.blocks[2].attention
        q, k, v = (
            f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (attention.query, attention.key, attention.value)
        )
        p = torch.softmax(q @ k.mT / 2, dim=-1)  # (batch, h, n, n)
    rows = profile.frame.query("block == 3").sort_values(["sample", "head"])
    drawn = rows.query("measure == 'sink_attention'")["value"]
    np.testing.assert_allclose(drawn, p[..., 2].mean(dim=-1).flatten(), rtol=1e-5)
    norms = v.norm(dim=-1)
    ratio = norms[..., 2] / norms.median(dim=-1).values
    np.testing.assert_allclose(rows.query("measure == 'sink_value_norm'")["value"], ratio.flatten(), rtol=1e-5)


def test_sinks_of_padded_sequences_and_of_several_batches_are_those_of_each_sequence_alone():
    model = Sinking()
    batches = [{"x": TOKENS, "mask": MASK}, {"x": TOKENS.flip(0), "mask": MASK.flip(0)}]
    together = probe(model, batches, measures="spectral")
    assert together.sinks["sample"].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    alone = probe(model, TOKENS[1:, :4], measures="spectral")
    for measure in ("sink_attention", "sink_value_norm"):
        expected = alone.frame.query(f"measure == '{measure}'")["value"]
        assert len(expected) == 2 * 4  # two blocks of four heads
        for sample in (1, 2):
            found = together.frame.query(f"measure == '{measure}' and sample == {sample}")["value"]
            np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_gradient_norms_equal_backward():
    model, inputs = make("bert")
    profile = probe(model, inputs, gradients=True, loss=lambda output: output.pooler_output.square().sum())
    model.eval()(**inputs).pooler_output.square().sum().backward()
    expected = [
        torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item() for layer in model.encoder.layer
    ]
    np.testing.assert_allclose(profile.curve("weight_gradient")[1:], expected, rtol=1e-5)
    assert profile.frame.query("measure == 'output_gradient'").shape[0] == 3 * 2


def test_gradients_with_labels_are_of_the_models_own_loss():
    model, inputs = make("gpt2")
    labelled = inputs | {"labels": IDS.masked_fill(MASK == 0, -100)}
    profile = probe(model, labelled, gradients=True)
    model.eval()(**labelled, use_cache=False).loss.backward()
    expected = [
        torch.cat([p.grad.flatten() for p in block.parameters()]).norm().item() for block in model.transformer.h
    ]
    np.testing.assert_allclose(profile.curve("weight_gradient")[1:], expected, rtol=1e-5)
    assert profile.metadata["gradients_of"] == ["the model's own"]
    assert "gradients are of the model's own loss, which it returned" in profile.metadata["notes"]
    without = probe(model, inputs, gradients=True).metadata
    assert without["gradients_of"] == ["the product of the last output with a random matrix"]
    assert not any("loss" in note for note in without["notes"])


def test_labels_that_the_model_makes_no_loss_of_are_named():
    class Deaf(nn.Module):  # it takes the labels and returns tokens
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder(2, BlockConfig(16, 4), generator=seeded(0))

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            return self.encoder(x)

    profile = probe(Deaf(), {"x": TOKENS, "labels": torch.ones(2)}, gradients=True)
    assert any("returned no loss of them" in note for note in profile.metadata["notes"])
    plain = probe(Deaf(), TOKENS, gradients=True)
    assert profile.curve("weight_gradient")[1:] == plain.curve("weight_gradient")[1:]


@pytest.mark.parametrize("scale", [0.0, 2.0**-700, 2.0**700])
def test_gradients_of_any_size_have_a_norm(scale: float):
    """Also none at all: the squares of float64 gradients would under- or overflow."""
    model, tokens = Encoder(2, BlockConfig(16, 4), generator=seeded(0)).double(), TOKENS.double()
    model.blocks[0].register_parameter("nothing", nn.Parameter(torch.empty(0, dtype=torch.float64)))
    weights = torch.randn(tokens.shape, generator=seeded(1), dtype=torch.float64)
    plain, scaled = (
        probe(model, tokens, gradients=True, loss=lambda output, s=s: s * (weights * output).sum())
        for s in (1.0, scale)
    )
    for measure in ("weight_gradient", "output_gradient"):
        found, expected = (np.array(profile.curve(measure)[1:]) for profile in (scaled, plain))
        assert (expected > 0).all()
        np.testing.assert_allclose(found, scale * expected, rtol=1e-12)


def test_gradients_of_the_default_loss_are_defined_after_a_norm():
    model, inputs = make("bert")
    both, outputs = (probe(model, inputs, gradients=which) for which in (True, "outputs"))
    assert outputs.curve("output_gradient")[1:] == both.curve("output_gradient")[1:]
    assert "weight_gradient" in both.names()
    assert "weight_gradient" not in outputs.names()
    profile = probe(*make("albert"), gradients=True)
    assert "weight_gradient" not in profile.names()  # shared weights have one gradient, not one per block
    assert min(profile.curve("output_gradient")[1:]) > 1e-3


def test_gradients_need_parameters_that_require_them():
    model, inputs = make("bert")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="require a gradient"):
        probe(model, inputs, gradients=True)


def test_skipping_a_block_equals_the_model_without_it():
    model, inputs = make("gpt2")
    table = skip_loss(model, inputs)
    assert list(table["first_block"]) == [0, 1, 2, 3]
    labels = IDS.masked_fill(MASK == 0, -100)
    for skipped in range(4):
        shorter, _ = make("gpt2")
        shorter.load_state_dict(model.state_dict())
        kept = [block for number, block in enumerate(shorter.transformer.h, start=1) if number != skipped]
        shorter.transformer.h = nn.ModuleList(kept)
        with torch.no_grad():
            loss = shorter.eval()(**inputs, labels=labels, use_cache=False).loss.item()
        assert table["loss"][skipped] == pytest.approx(loss, rel=1e-6)
        assert table["change"][skipped] == pytest.approx(loss - table["loss"][0], abs=1e-6)


def test_skipping_runs_shared_blocks_and_own_losses():
    model, inputs = make("albert")
    table = skip_loss(model, inputs, run=2, loss=lambda output: output.pooler_output.square().mean())
    assert list(zip(table["first_block"], table["last_block"], strict=True)) == [(0, 0), (1, 2), (2, 3)]
    t5, batch = make("t5-encoder")
    assert len(skip_loss(t5, batch, loss=lambda output: output[0].square().mean())) == 4
    with pytest.raises(ValueError, match="run of 1 to 3 blocks"):
        skip_loss(model, inputs, run=4, loss=lambda output: output.pooler_output.mean())
    with pytest.raises(ValueError, match="returns no loss"):
        skip_loss(model, inputs)
    assert not any(module._forward_hooks for module in model.modules())


def test_blocks_that_do_nothing_turn_nothing():
    """A pre-norm block with zero branches: no turn, no ratio, nothing lost by skipping it."""
    config = hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=4, n_positions=32)
    model = hf.GPT2LMHeadModel(config)
    idle = model.transformer.h[1]
    for projection in (idle.attn.c_proj, idle.mlp.c_proj):
        nn.init.zeros_(projection.weight)
        nn.init.zeros_(projection.bias)
    profile = probe(model, IDS, measures=["light", "branch_ratio"])
    assert profile.curve("angular_distance")[2] == 0
    assert profile.curve("branch_ratio", "attention_branch")[2] == 0
    assert profile.curve("angular_distance")[1] > 1e-3
    assert skip_loss(model, {"input_ids": IDS})["change"][2] == 0
