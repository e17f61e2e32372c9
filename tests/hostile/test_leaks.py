"""Causal models of no known family, made at random: a remedy never shows a token what comes after it."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import depthscope
from depthscope.passes.hooks import hooks_in
from depthscope.remedies import DeEscalate

WIDTH, VOCABULARY = 16, 20


class Attention(nn.Module):
    """Hides later tokens by a mask of its own, by `is_causal`, or by the mask that it is given."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.how == "own":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.how == "is_causal")
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, how: str, pre: bool, dropout: float):
        super().__init__()
        self.attention, self.mlp = Attention(how), nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.first, self.second, self.pre, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), pre, dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.pre:
            x = x + F.dropout(self.attention(self.first(x), mask), self.dropout)  # always on
            return x + self.mlp(self.second(x))
        x = self.first(x + F.dropout(self.attention(x, mask), self.dropout))
        return self.second(x + self.mlp(x))


class OwnAttention(nn.MultiheadAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
        hidden = torch.full((query.shape[1], query.shape[1]), -torch.inf).triu(1)
        return super().forward(query, key, value, attn_mask=hidden, need_weights=False)


class Replaced(nn.TransformerEncoderLayer):
    """Has another attention in the place of PyTorch's."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.self_attn = OwnAttention(WIDTH, 2, batch_first=True)


class OwnMask(nn.TransformerEncoderLayer):
    """Adds its mask itself: nothing in its call says that it is causal."""

    def forward(self, src: Tensor, *_: Any, **__: Any) -> Tensor:
        hidden = torch.full((src.shape[1], src.shape[1]), -torch.inf).triu(1)
        return super().forward(src, src_mask=hidden)


class Model(nn.Module):
    def __init__(self, dice: random.Random):
        super().__init__()
        how, pre = dice.choice(["own", "is_causal", "given", "layer", "attention"]), dice.random() < 0.5
        dropout = dice.choice([0.0, 0.0, 0.2])
        self.given, self.by_name = how == "given", dice.random() < 0.5
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(16, WIDTH)
        layer = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 32, "batch_first": True, "norm_first": pre}
        layers = {"layer": OwnMask, "attention": Replaced}
        depth = dice.choice([2, 3, 4])
        made = [layers[how](**layer) if how in layers else Block(how, pre, dropout) for _ in range(depth)]
        self.blocks = nn.ModuleList(made)
        if dice.random() < 0.15:
            nn.init.constant_((made[0].linear1 if how in layers else made[0].mlp[0]).weight[0], torch.nan)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.embedding(ids) + self.position(torch.arange(n))
        mask = torch.ones(ids.shape[0], 1, n, n, dtype=torch.bool).tril() if self.given else None
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask=mask) if self.by_name else block(x, mask)
        return x


class Around(nn.Module):
    """A plain module around another."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(ids))


@pytest.mark.filterwarnings("ignore:cannot tell whether this model is causal")
@pytest.mark.parametrize("seed", range(60))
def test_no_remedy_shows_a_token_what_comes_after_it(seed: int):
    dice = random.Random(seed)
    torch.manual_seed(seed)
    model: nn.Module = Model(dice)
    if dice.random() < 0.5:
        model = Around(model)
    model.eval()
    ids = torch.randint(0, VOCABULARY, (dice.choice([1, 2, 3]), dice.choice([5, 9])))
    options: dict[str, Any] = {"inputs": ids} if dice.random() < 0.6 else {}
    if dice.random() < 0.3:
        options["causal"] = True
    depthscope.apply(model, DeEscalate(0.5), **options)
    assert {hook.mean.kind for _, hook in hooks_in(model) if hook.remedy is not None} == {"causal"}
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    outputs = []
    for given in (ids, changed):
        torch.manual_seed(0)  # the same tokens are dropped
        with torch.no_grad():
            outputs.append(model(given)[:, :-1])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0, equal_nan=True)
