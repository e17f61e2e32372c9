"""A causal language model has a loss without anybody's help: that of the next token."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import depthscope
from depthscope.probing import NoLoss, mean_loss, skip_loss
from depthscope.probing.losses import next_token_loss
from samples import seeded
from zoo import IDS, MASK, ZOO, make

OF_TRANSFORMERS = [name for name in ZOO if hasattr(make(name)[0], "lm_head") and ZOO[name].causal]


class Block(nn.Module):
    """Causal, or not, by a mean over the tokens before."""

    def __init__(self, causal: bool):
        super().__init__()
        self.inner, self.causal = nn.Linear(16, 16), causal

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        weights = torch.ones(n, n).tril() if self.causal else torch.ones(n, n)
        return x + torch.tanh(self.inner(weights / weights.sum(dim=-1, keepdim=True) @ x))


class Nano(nn.Module):
    """A language model that nobody here wrote an anatomy for; `gives` says what it returns."""

    def __init__(self, gives: str = "logits", causal: bool = True, width: int = 16):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(causal) for _ in range(3))
        self.head = nn.Linear(width, 50, bias=False)
        self.gives = gives
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, std=0.4, generator=seeded(number))

    def forward(self, idx: Tensor) -> Any:
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "pair": (self.head(x), None), "tokens": x}[self.gives]


class Karpathy(Nano):
    """As nanoGPT: without targets only the last position's logits."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def by_hand(logits: Tensor, ids: Tensor, lengths: list[int]) -> Tensor:
    """One sequence and one token at a time."""
    terms = [
        -torch.log_softmax(logits[row, i], dim=-1)[ids[row, i + 1]]
        for row, length in enumerate(lengths)
        for i in range(length - 1)
    ]
    return torch.stack(terms).mean()


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_it_is_the_loss_that_transformers_takes_of_shifted_labels(name: str):
    model, inputs = make(name)
    table = skip_loss(model, inputs)
    with torch.no_grad():
        own = model.eval()(**inputs, labels=IDS.masked_fill(MASK == 0, -100)).loss
    assert_close(table["loss"][0], own.item(), rtol=1e-5, atol=0)
    assert len(table) == ZOO[name].blocks + 1
    assert (table["change"][1:] != 0).all()


@pytest.mark.parametrize("model", [Nano(), Nano("pair"), Karpathy()], ids=["logits", "pair", "only with targets"])
def test_models_of_no_known_family_have_one(model: nn.Module):
    with torch.no_grad():
        logits = Nano.forward(model, IDS)  # type: ignore[arg-type]
    logits = logits[0] if isinstance(logits, tuple) else logits
    assert_close(skip_loss(model, IDS)["loss"][0], by_hand(logits, IDS, [7, 7]).item(), rtol=1e-5, atol=0)
    assert mean_loss(model, {"idx": IDS}) == skip_loss(model, IDS)["loss"][0]


def test_answers_that_are_given_are_the_models_business():
    model = Karpathy()
    targets = IDS.roll(-1, dims=1)
    with torch.no_grad():
        own = model(IDS, targets)[1]
    assert_close(mean_loss(model, {"idx": IDS, "targets": targets}), own.item(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("model", [Nano("tokens"), Nano(causal=False)], ids=["returns tokens", "sees the answer"])
def test_what_has_none_is_refused_in_one_line(model: nn.Module):
    with pytest.raises(NoLoss, match=r"^the model returns no loss.*pass labels in the batch, or loss=$"):
        skip_loss(model, IDS)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_does_not_count(side: str):
    logits = torch.randn(2, 7, 50, generator=seeded(3), dtype=torch.float64)
    real = MASK.bool() if side == "right" else MASK.bool().flip(1)
    moved = (logits, IDS) if side == "right" else (torch.cat([logits[1:, 3:], logits[1:, :3]], 1), IDS[1:].roll(-3, 1))
    if side == "right":
        expected = by_hand(*moved, [7, 4])
    else:
        expected = (6 * by_hand(logits[:1], IDS[:1], [7]) + 3 * by_hand(*moved, [4])) / 9
    assert_close(next_token_loss(logits, IDS, real), expected, rtol=1e-12, atol=0)
    with pytest.raises(NoLoss, match="two real tokens"):
        next_token_loss(logits, IDS, torch.zeros_like(real))


def test_fix_has_a_loss_of_any_causal_model():
    fixed = depthscope.fix(Nano(), IDS, tau=0.5)
    assert fixed.losses is not None
    assert_close(fixed.losses[0], mean_loss(Nano(), IDS), rtol=0, atol=0)
    assert fixed.losses[1] != fixed.losses[0]
    assert depthscope.fix(Nano("tokens"), IDS, tau=0.5).losses is None
