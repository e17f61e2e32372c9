"""Tokens that go past their paths are refused: what is made of them would pass for constant."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from depthscope.attention_paths import paths
from samples import seeded


class Block(nn.Module):
    """A block of no family: attention, and some function of the tokens that is added."""

    def __init__(self, extra: Callable[..., Tensor] | None = None):
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.extra = extra

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        y = x + self.mix(x, x, x)[0]
        return y if self.extra is None else self.extra(y, *others)


class Trunk(nn.Module):
    def __init__(self, extra: Callable[..., Tensor] | None = None):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Block(extra) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Reminded(Trunk):
    """Every block is given once more what entered the first."""

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x, first)
        return x


class Derived(Trunk):
    """As `Reminded`, by way of something that is made of the tokens between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, kept)
            kept = (x * 2).tanh()
        return x


class Skips(Trunk):
    """The last block is given what left the first, as in U-ViT."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x, torch.zeros_like(x))
        return self.layers[2](self.layers[1](first, torch.zeros_like(x)), first)


class Aside(Trunk):
    """A block hands something of its own to the next one, past the trunk."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, self.kept)
        self.kept.clear()
        return x


def tokens() -> Tensor:
    return torch.randn(2, 5, 8, generator=seeded(0), dtype=torch.float64)


def keep_and_add(y: Tensor, kept: list[Tensor]) -> Tensor:
    total = y + kept[-1] if kept else y
    kept.append(y * 2)
    return total


SIDE_DOORS = {
    "sum": (Reminded, lambda y, first: y + first, "1 .*'add' takes tokens without their paths"),
    "product first": (Reminded, lambda y, first: y + first.mul(0.5), "1 .*'mul' takes tokens without their paths"),
    "derived": (Derived, lambda y, kept: y + kept, "2 .*'add' takes tokens of an earlier block"),
    "join": (Skips, lambda y, first: torch.cat([y, first], -1)[..., :8], "3 .*'cat' takes tokens of an earlier block"),
    "aside": (Aside, keep_and_add, "2 .*'add' takes tokens of an earlier block"),
}


@pytest.mark.parametrize("name", SIDE_DOORS)
def test_side_doors_are_refused(name: str):
    kind, extra, message = SIDE_DOORS[name]
    with pytest.raises(ValueError, match=rf"block {message}"):
        paths(kind(extra).double().eval(), tokens())


def test_what_only_has_the_shape_of_tokens_is_no_side_door():
    found = paths(Skips(lambda y, other: y + torch.zeros_like(other)).double().eval(), tokens())
    assert found.metadata["heads"] == [2, 2, 2]


@torch.jit.script
def scripted(y: Tensor) -> Tensor:
    return y * 2.0 + 1.0


ESCAPES = {
    "script": scripted,
    "vmap": lambda y: y + torch.vmap(lambda row: row * 2)(y),
    "jvp": lambda y: y + torch.func.jvp(lambda z: z * 2, (y,), (torch.ones(2, 5, 8, dtype=y.dtype),))[0],
    "numpy": lambda y: y + torch.from_numpy(np.tanh(y.numpy())),
    "array": lambda y: y + torch.from_numpy(np.asarray(y) * 2),
    "dlpack": lambda y: y + torch.from_dlpack(y),
    "to_dlpack": lambda y: y + torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y)),
    "tensor": lambda y: y + torch.tensor(y.tolist(), dtype=y.dtype),
    "subclass": lambda y: y + y.as_subclass(Tensor),
    "item": lambda y: y + torch.tensor([row[0, 0].item() for row in y], dtype=y.dtype).view(-1, 1, 1),
    "integers": lambda y: y + y.long(),
    "out": lambda y: y + written(y),
    "disabled": lambda y: y + without_subclass(y),
}


def written(y: Tensor) -> Tensor:
    room = torch.empty(2, 5, 8, dtype=y.dtype)
    torch.mul(y, 2, out=room)
    return room


def without_subclass(y: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return y * 2


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes_are_refused(name: str):
    with pytest.raises(ValueError, match=r"block 1 .* takes tokens without their paths"):
        paths(Trunk(ESCAPES[name]).double().eval(), tokens())


def test_memory_that_was_tokens_is_no_escape():
    """Tokens that are gone leave their memory to others."""

    def busy(y: Tensor) -> Tensor:
        for _ in range(20):
            y = y * 2
            y = y * torch.full((2, 5, 8), 0.5, dtype=y.dtype)
        return y

    assert paths(Trunk(busy).double().eval(), tokens()).metadata["largest_error"] < 1e-12
