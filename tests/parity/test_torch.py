"""Our blocks against PyTorch's `nn.TransformerEncoderLayer`, with copied weights, in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from depthscope.models import BlockConfig, Encoder, FeedForward, post_norm, pre_norm
from samples import seeded


def copy_weights(source: nn.TransformerEncoderLayer, block: nn.Module) -> None:
    attention = source.self_attn
    weights = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    for linear, (weight, bias) in zip(
        (block.attention.query, block.attention.key, block.attention.value), weights, strict=True
    ):
        linear.load_state_dict({"weight": weight, "bias": bias})
    for target, part in (
        (block.attention.output, attention.out_proj),
        (block.ffn[0], source.linear1),
        (block.ffn[2], source.linear2),
        (block.norm1, source.norm1),
        (block.norm2, source.norm2),
    ):
        target.load_state_dict(part.state_dict())


@pytest.mark.parametrize("placement", [post_norm, pre_norm])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("causal", [True, False])
def test_transformer_encoder(placement, activation: str, causal: bool):
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(
            32, 4, 48, dropout=0.0, activation=activation, batch_first=True, norm_first=placement is pre_norm
        ).double()
        for _ in range(3)
    ]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3, generator=seeded(parameter.numel()))
    modules = {"relu": nn.ReLU, "gelu": nn.GELU}
    config = BlockConfig(
        32, 4, 48, causal=causal, placement=placement, ffn=lambda d, q: FeedForward(d, q, modules[activation])
    )
    encoder = Encoder(3, config, final_norm=False).double()
    for layer, block in zip(layers, encoder.blocks, strict=True):
        copy_weights(layer, block)

    x = torch.randn(2, 7, 32, generator=seeded(1), dtype=torch.float64)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3]).bool()
    later = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    expected = x
    for layer in layers:
        expected = layer(expected, src_mask=later, src_key_padding_mask=~mask)
    assert_close(encoder(x, mask)[mask], expected[mask], rtol=0, atol=1e-10)
    assert F.mse_loss(expected, x) > 0.1  # the weights do something
