"""Encoder, VisionTransformer and CausalLM: shapes, masks, causality, and that they can learn."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from depthscope.measures import token_similarity
from depthscope.models import BlockConfig, CausalLM, Encoder, VisionTransformer, post_norm, pre_norm, xavier
from depthscope.remedies import deescalate
from samples import seeded

SMALL = BlockConfig(16, 4)


def test_pre_norm_ends_with_a_norm_and_post_norm_does_not():
    assert isinstance(Encoder(2, BlockConfig(16, 4, placement=pre_norm)).final_norm, nn.LayerNorm)
    assert isinstance(Encoder(2, BlockConfig(16, 4, placement=post_norm)).final_norm, nn.Identity)
    assert isinstance(Encoder(2, SMALL, final_norm=True).final_norm, nn.LayerNorm)


def test_blocks_have_weights_of_their_own():
    first, second = Encoder(2, SMALL, generator=seeded(0)).blocks
    assert not torch.equal(first.attention.query.weight, second.attention.query.weight)


def test_encoder_masked_equals_cropped():
    encoder = Encoder(3, SMALL, generator=seeded(0)).double()
    x = torch.randn(1, 6, 16, generator=seeded(1), dtype=torch.float64)
    padded = torch.cat([x, torch.randn(1, 3, 16, generator=seeded(2), dtype=torch.float64)], dim=1)
    mask = torch.arange(9)[None] < 6
    assert_close(encoder(padded, mask)[:, :6], encoder(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_vision_transformer(pool):
    model = VisionTransformer(
        2, SMALL, image_size=8, patch_size=4, channels=1, classes=7, pool=pool, generator=seeded(0)
    )
    images = torch.randn(3, 1, 8, 8, generator=seeded(1))
    assert model(images).shape == (3, 7)
    assert model.positions.shape[1] == 4 + (pool == "class")
    # Each patch is one token: a change inside the last patch moves no other token's embedding.
    changed = images.clone()
    changed[..., 4:, 4:] += 1
    same = (model.embed(images) == model.embed(changed)).all(dim=1)[0]
    assert same.tolist() == [[True, True], [True, False]]


def test_causal_model_sees_no_later_token_whatever_the_block_config_says():
    model = CausalLM(2, BlockConfig(16, 4, causal=False), vocabulary=11, context=8, generator=seeded(0)).double()
    ids = torch.randint(11, (2, 8), generator=seeded(1))
    changed = ids.clone()
    changed[:, 5:] = (ids[:, 5:] + 1) % 11
    assert torch.equal(model(ids)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(ids)[:, 5:], model(changed)[:, 5:])


def test_the_head_is_tied():
    model = CausalLM(1, SMALL, vocabulary=11)
    assert sum(p.shape[0] == 11 for p in model.parameters()) == 1


@pytest.mark.parametrize("placement", [post_norm, pre_norm])
def test_a_causal_model_learns_to_repeat(placement):
    """From ln V to well below it in 60 steps: gradients reach every parameter."""
    model = CausalLM(2, BlockConfig(32, 4, placement=placement), vocabulary=8, context=8, generator=seeded(0))
    ids = torch.arange(8)[torch.randperm(8, generator=seeded(1))].repeat(4, 1)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in model.parameters())
    assert losses[-1] < 0.1 * losses[0]


def test_sixty_post_norm_blocks_collapse_and_de_escalated_ones_do_not():
    """The demo's claim: without de-escalation all tokens are equal at the end, with it they are not."""
    encoder = Encoder(60, BlockConfig(64, 4, initialise=xavier), generator=seeded(0))
    plain = mended = torch.randn(2, 32, 64, generator=seeded(1))
    with torch.no_grad():
        for block in encoder.blocks:
            plain, mended = block(plain), block(deescalate(mended))
    assert (token_similarity(plain) > 0.999).all()
    assert (token_similarity(mended) < 0.2).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Encoder(0, SMALL), "got 0"),
        (lambda: VisionTransformer(1, SMALL, image_size=30, patch_size=4), "image 30 and patch 4"),
        (lambda: VisionTransformer(1, SMALL, pool="max"), "'max'"),
        (lambda: CausalLM(1, SMALL, vocabulary=4, context=2)(torch.zeros(1, 3, dtype=torch.int64)), "at most 2 tokens"),
    ],
)
def test_impossible_shapes_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
