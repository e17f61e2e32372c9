"""Causality of models whose inputs have no token axis: what enters the blocks is changed itself."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import depthscope
from depthscope.remedies import DeEscalate
from samples import seeded

PIXELS = torch.randn(2, 3, 8, 8, generator=seeded(0))


class Block(nn.Module):
    def __init__(self, causal: bool):
        super().__init__()
        self.inner, self.causal = nn.Linear(16, 16), causal

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.ones(x.shape[1], x.shape[1])
        weights = weights.tril() if self.causal else weights
        return x + torch.tanh(self.inner(weights / weights.sum(dim=-1, keepdim=True) @ x))


class Patches(nn.Module):
    """A ViT of no known family; as an image GPT its patches see earlier ones only."""

    def __init__(self, causal: bool = False, mixes: bool = False):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 2, 2)
        self.before = nn.Linear(16, 16) if mixes else nn.Identity()  # the mean of all patches enters each of them
        self.layers = nn.ModuleList(Block(causal) for _ in range(3))
        self.mixes = mixes

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels).flatten(2).mT
        x = x + self.before(x.mean(dim=1, keepdim=True)) if self.mixes else x
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_causality_of_images_is_tried(causal: bool, mixes: bool):
    metadata = depthscope.probe(Patches(causal, mixes), PIXELS).metadata
    assert (metadata["causal"], metadata["causal_by"]) == (causal, "tried")


def test_images_are_given_the_mean_of_all_patches_and_no_warning():
    model = Patches().eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        depthscope.apply(model, DeEscalate(0.3, at="output", blocks=(3,)), inputs=PIXELS)
        treated = model(PIXELS)
        plain = depthscope.remove(model)(PIXELS)
    torch.testing.assert_close(treated, plain - 0.3 * plain.mean(dim=1, keepdim=True))


def test_blocks_that_cannot_be_changed_are_not_called_causal(monkeypatch: pytest.MonkeyPatch):
    """What is changed at their entrance reaches nothing, not even the same token: then nothing is known."""
    monkeypatch.setattr("depthscope.discovery.causality.other_numbers", lambda tokens: tokens)
    assert depthscope.probe(Patches(), PIXELS).metadata["causal"] is None
