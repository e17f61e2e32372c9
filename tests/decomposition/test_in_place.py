"""Blocks that write in place: split as those that do not, or refused, and nothing of ours stays in a model."""

import pytest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from decomposition.test_escapes import Trunk, tokens
from depthscope.decomposition import paths


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
