"""What fails in a watch ends the watch with a warning, and never the training step that it is in."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.watching import gradients
from depthscope.watching.watcher import Watch
from traces import hooks_of, state_of
from zoo import TOKENS


class Block(nn.Module):
    """Gives its tokens on in a form of its own."""

    def __init__(self, form: Callable[[Tensor], Tensor]):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm1, self.norm2, self.ffn, self.form = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 16), form

    def forward(self, x: Tensor) -> Tensor:
        x = plain(x)
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return self.form(x + self.ffn(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Block(form) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return plain(x)


def plain(x: Tensor) -> Tensor:
    if x.is_nested:
        return torch.stack(x.unbind())
    return x if x.layout is torch.strided else x.to_dense()


def nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the prototype
        return torch.nested.as_nested_tensor(list(x.unbind()))


def gradients_of(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(TOKENS).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def trained(model: nn.Module, expected: list[Tensor], **options: Any) -> Watch:
    """Two watched steps, which are those of the model alone."""
    state = state_of(model)
    with depthscope.watch(model, 1, **options) as watch:
        for _ in range(2):
            found = gradients_of(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert state_of(model)["hooks"] == state["hooks"]
    assert not any(hooks_of(model))
    return watch


@pytest.mark.parametrize("form", [torch.Tensor.to_sparse, nested])
def test_tensors_that_cannot_be_measured_end_the_watch(form: Callable[[Tensor], Tensor]):
    model = Model(form)
    expected = gradients_of(model)
    with pytest.warns(UserWarning, match=r"^the watch ends here, and its rules are asked no more; [^\n]*$") as said:
        watch = trained(model, expected, stop_if="token_similarity>-9 after 0")
    assert len([one for one in said if "the watch ends" in str(one.message)]) == 1
    assert (len(watch.records), watch.should_stop) == (0, False)


def test_a_view_with_its_sign_elsewhere_is_measured():
    model = Model(lambda x: torch._neg_view(-x))
    assert model(TOKENS).is_neg()
    curves = [trained(m, gradients_of(m), measures="light").records for m in (model, Model(lambda x: x))]
    assert curves[0].equals(curves[1])
    with torch.no_grad():
        assert depthscope.probe(model.eval(), TOKENS).curve("token_similarity")


PLACES = {
    "when a pass begins": (Watch, "_listen"),
    "when tokens pass": (Watch, "_see_tokens"),
    "when a pass ends": (Watch, "_measured"),
    "when a layer has written": (gradients.GradientTaps, "_write"),
    "when a gradient comes": (gradients, "norm_of_norms"),
    "when all gradients have come": (gradients.GradientTaps, "_curves"),
}


@pytest.mark.parametrize("place", PLACES)
def test_whatever_fails_of_ours(place: str, monkeypatch: pytest.MonkeyPatch):
    def fail(*_given: Any, **_more: Any) -> None:
        raise RuntimeError("a defect of ours\nin two lines")

    model = Encoder(2, BlockConfig(16, 4))
    expected = gradients_of(model)
    monkeypatch.setattr(*PLACES[place], fail)
    message = "^the watch ends here; the training goes on: RuntimeError: a defect of ours in two lines$"
    with pytest.warns(UserWarning, match=message) as said:
        trained(model, expected, gradients=True)
    assert len(said) == 1
