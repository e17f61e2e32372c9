"""Planted blocks: what is there is found, with the number that it must have."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from depthscope import depth_use
from depthscope.hooks import undisturbed
from depthscope.inputs import batches
from depthscope.models import BlockConfig, CausalLM, Encoder, pre_norm
from samples import seeded

WIDTH, TOKENS = 8, 24


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    x = torch.randn(6, TOKENS, WIDTH, generator=seeded(1))
    return x - x.mean(dim=-1, keepdim=True)  # a LayerNorm with gain 1 only scales these


def erase(ffn: nn.Sequential) -> None:
    """FFN(x) = −x: ReLU of x and of −x."""
    first, second = (module for module in ffn if isinstance(module, nn.Linear))
    with torch.no_grad():
        for part in (first, second):
            part.weight.zero_()
            part.bias.zero_()
        first.weight[:WIDTH], first.weight[WIDTH : 2 * WIDTH] = torch.eye(WIDTH), -torch.eye(WIDTH)
        second.weight[:, :WIDTH], second.weight[:, WIDTH : 2 * WIDTH] = -torch.eye(WIDTH), torch.eye(WIDTH)


def silence(linear: nn.Module) -> None:
    assert isinstance(linear, nn.Linear)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)


@pytest.fixture(scope="module")
def planted() -> Encoder:
    """Pre-norm. Block 1 is as drawn, block 2 the identity, in block 3 attention is silent and the FFN erases."""
    model = Encoder(4, BlockConfig(WIDTH, 2, placement=pre_norm), generator=seeded(0)).eval()
    silence(model.blocks[1].attention.output)
    silence(model.blocks[1].ffn[-1])
    silence(model.blocks[2].attention.output)
    erase(model.blocks[2].ffn)
    return model


def test_the_identity_does_nothing(planted: Encoder, tokens: torch.Tensor):
    found = depth_use(planted, tokens)
    row = found.frame.set_index("block").loc[2]
    assert row["attention_ratio"] == row["ffn_ratio"] == 0
    assert math.isnan(row["attention_cosine"])
    assert math.isnan(row["ffn_cosine"])
    assert row["skip_later"] == row["skip_output"] == 0
    assert (found.matrix.loc[2, [3, 4]] == 0).all()
    assert found.matrix.loc[1, [3, 4]].min() > 0.01
    assert np.isnan(found.matrix.loc[1, 2])  # what adds nothing cannot change what it adds
    others = found.frame.set_index("block").loc[[1, 4]]
    assert (others[["attention_ratio", "ffn_ratio", "skip_output"]] > 0.01).all().all()
    finding = next(finding for finding in found.findings if finding.rule == "could go")
    assert finding.numbers["least_block"] == 2
    assert finding.sentence.startswith("Block 2 could go")


def test_an_erasing_block_has_the_cosine_minus_one(tokens: torch.Tensor):
    model = Encoder(1, BlockConfig(WIDTH, 2, placement=pre_norm), generator=seeded(0)).eval()
    silence(model.blocks[0].attention.output)
    erase(model.blocks[0].ffn)
    found = depth_use(model, tokens, skips=False)
    row = found.frame.iloc[0]
    assert row["ffn_cosine"] == pytest.approx(-1, abs=1e-6)
    sizes = tokens.norm(dim=-1).flatten().double()
    scaled = nn.functional.layer_norm(tokens, (WIDTH,)).norm(dim=-1).flatten().double()
    assert row["ffn_ratio"] == pytest.approx((scaled / sizes).quantile(0.5).item(), rel=1e-5)


def test_post_norm_compares_with_the_trunk_of_each_addition(tokens: torch.Tensor):
    model = Encoder(1, BlockConfig(WIDTH, 2), generator=seeded(0)).eval()
    erase(model.blocks[0].ffn)
    row = depth_use(model, tokens, skips=False).frame.iloc[0]
    assert row["ffn_ratio"] == pytest.approx(1, abs=1e-6)  # the FFN reads what it is added to
    assert row["ffn_cosine"] == pytest.approx(-1, abs=1e-6)


class Adding(nn.Module):
    """x + f(x), of no family that is known."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def sinking(width: int = WIDTH) -> tuple[CausalLM, float]:
    """Causal, post-norm: head 0 of block 1 looks at whatever has a large first feature, with a known score."""
    model = CausalLM(1, BlockConfig(width, 2), vocabulary=5, context=TOKENS, generator=seeded(0)).eval()
    attention = model.encoder.blocks[0].attention
    sharp = 40.0
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.positions.weight.normal_(generator=seeded(3))
        model.positions.weight[:, 0] = 0.0
        model.positions.weight[0, 0] = 1.0
        silence(attention.query)
        silence(attention.key)
        attention.query.bias[0] = sharp
        attention.key.weight[0, 0] = 1.0
    return model, sharp / math.sqrt(width / 2)


def test_a_head_that_attends_to_the_first_token_only():
    model, logit = sinking()
    ids = torch.randint(5, (2, TOKENS), generator=seeded(0))
    found = depth_use(model, ids, skips=False)
    row = found.frame.iloc[0]
    assert row["sink_rate"] == 0.5  # of two heads one; the other looks at all tokens alike
    assert row["largest_logit"] == pytest.approx(logit, rel=1e-6)


def test_a_sink_is_that_of_the_first_real_token():
    """Padding on the left: the first token is the first that is real."""
    model, _ = sinking()
    with torch.no_grad():
        model.positions.weight[0, 0] = 0.0
        model.positions.weight[3, 0] = 1.0
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[:, :3] = False
    batch = {"ids": torch.randint(5, (2, TOKENS), generator=seeded(0)), "mask": mask}
    assert depth_use(model, batch, skips=False).frame["sink_rate"].tolist() == [0.5]
    whole = {"ids": batch["ids"]}
    assert depth_use(model, whole, skips=False).frame["sink_rate"].tolist() == [0.0]


def test_what_all_sequences_share_is_told_from_what_one_has():
    def energy(x: torch.Tensor) -> dict[str, float]:
        model = nn.Sequential(*(Adding(nn.Linear(16, 16)) for _ in range(2)))
        for block in model:
            silence(block.inner)
        return depth_use(model, x, skips=False).metadata["energy"]

    noise = torch.randn(8, 30, 16, generator=seeded(0))
    assert energy(noise)["token"] > 0.8
    assert energy(noise + 20 * torch.ones(16))["shared"] > 0.9
    assert energy(0.1 * noise + torch.randn(8, 1, 16, generator=seeded(1)))["sequence"] > 0.5


def test_batches_are_what_a_probe_takes(tokens: torch.Tensor):
    """One batch, or the same in two: medians differ by batch, the largest logit and the sink rate do not."""
    model = Encoder(2, BlockConfig(WIDTH, 2), generator=seeded(0)).eval()
    with undisturbed(model):
        assert len(list(batches(model, [tokens[:3], tokens[3:]]))) == 2
    one = depth_use(model, tokens, skips=False).frame
    two = depth_use(model, [tokens[:3], tokens[3:]], skips=False).frame
    assert one["largest_logit"].tolist() == pytest.approx(two["largest_logit"].tolist(), rel=1e-6)
    assert one["attention_ratio"].tolist() == pytest.approx(two["attention_ratio"].tolist(), rel=0.2)
