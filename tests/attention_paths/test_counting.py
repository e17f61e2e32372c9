"""The numbers of paths are those of the lengths in the table, or the model is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from attention_paths.test_escapes import tokens
from depthscope.attention_paths import CONSTANT, paths

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, mix: Mix, heads: int = 2):
        super().__init__()
        self.qkv, self.out, self.mix, self.heads = nn.Linear(8, 24), nn.Linear(8, 8), mix, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


def model_of(mix: Mix) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Block(mix) for _ in range(3))).double().eval()


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, dim=-1)


def usual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q, k) @ v


def head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([softmax(q[:, h], k[:, h]) @ v[:, h] for h in range(2)], dim=1)


def in_pieces(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([softmax(part, k) @ v for part in q.split(3, dim=2)], dim=2)


def by_halves_of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([softmax(q, k) @ half for half in v.chunk(2, dim=-1)], dim=-1)


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(k, q) @ (softmax(q, k) @ v)


def by_gate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (softmax(q, k).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def static(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.arange(25.0, dtype=v.dtype).sin().view(5, 5), dim=-1) @ v


def fourier(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.fft.fft2(v).real


def test_heads_in_turn_are_heads():
    whole, parts = (paths(model_of(mix), tokens(), keep_terms=True) for mix in (usual, head_by_head))
    assert parts.metadata["heads"] == whole.metadata["heads"] == [2, 2, 2]
    assert parts.counts == whole.counts
    assert set(whole.counts) == set(whole.summary().index) - {CONSTANT}
    assert_close(parts.terms, whole.terms, rtol=1e-12, atol=1e-14)


REFUSED = {
    "in pieces": (in_pieces, "queries in pieces"),
    "halves": (by_halves_of_values, "the same attention twice"),
    "twice": (twice, "2 calls of it one after another"),
    "gate": (by_gate, "spread and weighted by what a softmax gave"),
    "static": (static, "not seen to multiply values by what a softmax gave"),
    "fourier": (fourier, "'real' is not linear in the tokens, or not known"),
    "none": (lambda q, k, v: v, "not seen to multiply values by what a softmax gave"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_counted_is_refused(name: str):
    mix, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"block 1 \(0\): .*{message}"):
        paths(model_of(mix), tokens())
