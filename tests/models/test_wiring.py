"""Wirings: by name, on both kinds of block; with more norms, and with another wiring by the number of the block."""

import copy
import pickle

import pytest
import torch
from torch import nn

from depthscope.anatomy import anatomy_of
from depthscope.models import WIRINGS, BlockConfig, CausalLM, Encoder, Wiring, post_norm, pre_norm
from depthscope.models.wiring import wiring_of
from depthscope_lab.models import TransformerXL, TransformerXLConfig
from samples import seeded

X = torch.randn(2, 5, 16, generator=seeded(0))


def run_peri_norm(block, x, given):
    """A norm before and behind each branch (Kim et al. 2025)."""
    at = block.stations
    x = at["input"](x)
    y = at["after_attention"](x + at["attention_branch"](block.norm3(block.attend(x, given, block.norm1))))
    z = y + at["ffn_branch"](block.norm4(block.ffn(block.enter_ffn(block.norm2(y), given))))
    return at["output"](at["after_ffn"](z))


def add_norms(block) -> None:
    block.norm3, block.norm4 = (copy.deepcopy(norm) for norm in (block.norm1, block.norm2))


def mix(block) -> None:
    """The first blocks post-norm, the others pre-norm (Li et al. 2025)."""
    block.wiring = post_norm if block.number <= block.depth // 2 else pre_norm


def refuse(block, x, given):
    raise AssertionError("every block has another wiring")


PERI = Wiring("peri", run_peri_norm, final_norm=True, placement="pre", prepare=add_norms)
MIXED = Wiring("mixed", refuse, final_norm=True, prepare=mix)


def test_a_wiring_has_a_name_and_a_name_a_wiring():
    assert wiring_of("post") is post_norm
    assert wiring_of(pre_norm) is pre_norm
    assert list(WIRINGS)[:2] == ["post", "pre"]
    with pytest.raises(ValueError, match="unknown wiring 'psot': did you mean 'post'"):
        Encoder(1, BlockConfig(16, 4, placement="psot"))


@pytest.mark.parametrize("wiring", [post_norm, pre_norm])
def test_a_name_gives_the_same_model_as_the_wiring_itself(wiring: Wiring):
    first, second = (
        Encoder(2, BlockConfig(16, 4, placement=given), generator=seeded(1)) for given in (wiring, wiring.name)
    )
    assert torch.equal(first(X), second(X))
    assert torch.equal(pickle.loads(pickle.dumps(first))(X), first(X))
    assert isinstance(first.final_norm, nn.LayerNorm) == wiring.final_norm


@pytest.mark.parametrize("wiring", [PERI, MIXED])
def test_the_final_norm_follows_from_the_wiring_in_every_model(wiring: Wiring):
    block = BlockConfig(16, 4, placement=wiring)
    assert isinstance(Encoder(2, block).final_norm, nn.LayerNorm)
    assert isinstance(CausalLM(2, block, vocabulary=7).encoder.final_norm, nn.LayerNorm)
    config = TransformerXLConfig(13, 2, 16, 2, 24, cutoffs=(5,), placement=wiring)
    assert isinstance(TransformerXL(config).final_norm, nn.LayerNorm)
    assert isinstance(TransformerXL(TransformerXLConfig(13, 2, 16, 2, 24, cutoffs=(5,))).final_norm, nn.Identity)


def test_more_norms_are_parameters_of_the_block_and_act():
    model = Encoder(2, BlockConfig(16, 4, placement=PERI), generator=seeded(1))
    assert "blocks.1.norm4.weight" in model.state_dict()
    before = model(X)
    with torch.no_grad():
        model.blocks[1].norm4.weight.zero_()
    assert not torch.equal(model(X), before)
    language = TransformerXL(TransformerXLConfig(13, 2, 16, 2, 24, cutoffs=(5,), placement=PERI), seeded(1))
    assert language(torch.zeros(2, 3, dtype=torch.int64)).hidden.isfinite().all()
    assert "blocks.1.norm4.weight" in language.state_dict()


def test_a_wiring_may_differ_by_block_and_the_anatomy_sees_it():
    model = Encoder(4, BlockConfig(16, 4, placement=MIXED), generator=seeded(1))
    assert [block.placement for block in anatomy_of(model).blocks] == ["post", "post", "pre", "pre"]
    x = X
    for number, wiring in enumerate((post_norm, post_norm, pre_norm, pre_norm)):
        x = wiring.forward(model.blocks[number], x, None)
    assert torch.equal(model(X), model.final_norm(x))
