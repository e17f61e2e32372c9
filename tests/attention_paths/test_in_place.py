"""Blocks that write in place: split as those that do not, or refused, and nothing of ours stays in a model."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from attention_paths.test_escapes import Trunk, tokens
from depthscope.attention_paths import paths


def add_to_itself(y: Tensor) -> Tensor:
    y += F.gelu(y)
    return y


def add_twice(y: Tensor) -> Tensor:
    r = y * 2
    y.add_(r)
    return y.add_(F.relu(r))


def relu_and_sum(y: Tensor) -> Tensor:
    return y * 0.5 + F.relu(y * 2, inplace=True)


IN_PLACE = {
    "+=": (add_to_itself, lambda y: y + F.gelu(y)),
    "add_": (add_twice, lambda y: y + y * 2 + F.relu(y * 2)),
    "relu": (relu_and_sum, lambda y: y * 0.5 + F.relu(y * 2)),
    "silu": (lambda y: nn.SiLU(inplace=True)(y * 2), lambda y: F.silu(y * 2)),
    "leaky": (lambda y: nn.LeakyReLU(0.1, inplace=True)(y * 2), lambda y: F.leaky_relu(y * 2, 0.1)),
    "dropout": (lambda y: F.dropout(y * 2, 0.5, False, inplace=True), lambda y: y * 2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_as_not_in_place(name: str):
    writes, does_not = (paths(Trunk(f).double().eval(), tokens(), keep_terms=True) for f in IN_PLACE[name])
    assert writes.terms is not None
    assert_close(writes.terms, does_not.terms, rtol=1e-12, atol=1e-14)


def test_what_shares_memory_is_refused():
    def aliased(y: Tensor) -> Tensor:
        r = y.detach()
        r.mul_(2)
        return y

    with pytest.raises(ValueError, match=r"block 1 .*: it gives other numbers when its paths are followed"):
        paths(Trunk(aliased).double().eval(), tokens())


class Keeps(nn.Module):
    """Keeps what passes, in every way in which a module can."""

    def __init__(self, fails: bool):
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("seen", torch.zeros(()))
        self.kept: dict[str, list[Tensor]] = {"all": []}
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mix(x, x, x)[0]
        self.last, self.pair, self.seen = y, (y, 1), y.mean()
        self.kept["all"].append(y)
        return y.cumprod(-1) if self.fails else y


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_model_keeps_has_no_paths(fails: bool):
    model = nn.Sequential(Keeps(False), Keeps(fails)).double().eval()
    if fails:
        with pytest.raises(ValueError, match="cumprod"):
            paths(model, tokens())
    else:
        paths(model, tokens())
    for block in model:
        kept = [block.last, block.pair[0], block.seen, *block.kept["all"]]
        assert {type(tensor) for tensor in kept} == {Tensor}
        assert isinstance(dict(block.named_buffers())["seen"], Tensor)
