"""Our blocks and `CausalLM` against Hugging Face's BERT, ViT and GPT-2, with copied weights, in float64."""

from functools import partial

import torch
from torch import nn
from torch.testing import assert_close
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, ViTConfig, ViTModel

from depthscope.models import Block, BlockConfig, CausalLM, FeedForward, VisionTransformer, pre_norm
from samples import seeded

GELU = partial(FeedForward, activation=nn.GELU)
NEW_GELU = partial(FeedForward, activation=partial(nn.GELU, approximate="tanh"))


def randomised(model: nn.Module) -> nn.Module:
    """Weights large enough that every part matters: biases and norms too."""
    for i, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=seeded(i))
    return model.double().eval()


def copy_parts(pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    for ours, theirs in pairs:
        ours.load_state_dict(theirs.state_dict())


def test_bert_layers():
    model = randomised(
        BertModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=48))
    )
    config = BlockConfig(32, 4, 48, ffn=GELU, norm_eps=model.config.layer_norm_eps)
    ids = torch.randint(1000, (2, 7), generator=seeded(0))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    for i, layer in enumerate(model.encoder.layer):
        block = Block(config).double()
        copy_parts(
            [
                (block.attention.query, layer.attention.self.query),
                (block.attention.key, layer.attention.self.key),
                (block.attention.value, layer.attention.self.value),
                (block.attention.output, layer.attention.output.dense),
                (block.norm1, layer.attention.output.LayerNorm),
                (block.ffn[0], layer.intermediate.dense),
                (block.ffn[2], layer.output.dense),
                (block.norm2, layer.output.LayerNorm),
            ]
        )
        real = mask.bool()
        assert_close(block(states[i], mask)[real], states[i + 1][real], rtol=0, atol=1e-10)


def test_vit_from_pixels_to_the_last_norm():
    model = randomised(
        ViTModel(
            ViTConfig(
                hidden_size=32,
                num_attention_heads=4,
                num_hidden_layers=3,
                intermediate_size=48,
                image_size=8,
                patch_size=4,
            ),
            add_pooling_layer=False,
        )
    )
    config = BlockConfig(32, 4, 48, ffn=GELU, norm_eps=model.config.layer_norm_eps, placement=pre_norm)
    ours = VisionTransformer(3, config, image_size=8, patch_size=4, classes=32).double()
    copy_parts([(ours.embed, model.embeddings.patch_embeddings.projection), (ours.encoder.final_norm, model.layernorm)])
    ours.class_token.data.copy_(model.embeddings.cls_token)
    ours.positions.data.copy_(model.embeddings.position_embeddings)
    for block, layer in zip(ours.encoder.blocks, model.layers, strict=True):
        copy_parts(
            [
                (block.attention.query, layer.attention.q_proj),
                (block.attention.key, layer.attention.k_proj),
                (block.attention.value, layer.attention.v_proj),
                (block.attention.output, layer.attention.o_proj),
                (block.norm1, layer.layernorm_before),
                (block.ffn[0], layer.mlp.fc1),
                (block.ffn[2], layer.mlp.fc2),
                (block.norm2, layer.layernorm_after),
            ]
        )
    nn.init.eye_(ours.head.weight)
    images = torch.randn(2, 3, 8, 8, generator=seeded(0), dtype=torch.float64)
    assert_close(ours(images), model(images).last_hidden_state[:, 0], rtol=0, atol=1e-10)


def test_gpt2_logits():
    reference = randomised(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=3, n_head=4)))
    config = BlockConfig(32, 4, ffn=NEW_GELU, placement=pre_norm)
    ours = CausalLM(3, config, vocabulary=50, context=16).double()
    theirs = reference.transformer
    copy_parts([(ours.embedding, theirs.wte), (ours.positions, theirs.wpe), (ours.encoder.final_norm, theirs.ln_f)])
    for block, layer in zip(ours.encoder.blocks, theirs.h, strict=True):
        copy_parts([(block.norm1, layer.ln_1), (block.norm2, layer.ln_2)])
        a = block.attention
        for linear, weight, bias in zip(
            (a.query, a.key, a.value),
            layer.attn.c_attn.weight.chunk(3, dim=1),
            layer.attn.c_attn.bias.chunk(3),
            strict=True,
        ):
            linear.load_state_dict({"weight": weight.T, "bias": bias})
        for linear, conv in (
            (a.output, layer.attn.c_proj),
            (block.ffn[0], layer.mlp.c_fc),
            (block.ffn[2], layer.mlp.c_proj),
        ):
            linear.load_state_dict({"weight": conv.weight.T, "bias": conv.bias})  # Conv1D stores the transpose
    ids = torch.randint(50, (2, 9), generator=seeded(0))
    assert_close(ours(ids), reference(ids).logits, rtol=0, atol=1e-10)
