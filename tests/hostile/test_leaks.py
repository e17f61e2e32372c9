"""Causal models made at random, of no known family or of a library's parts: a remedy never shows a token what comes
after it, unless the model does."""

import random
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.bert.modeling_bert import BertEncoder, BertLayer

import depthscope
from depthscope.hooks.staying import hooks_in
from depthscope.remedies import DeEscalate

WIDTH, VOCABULARY = 16, 20


def allowed(how: str, n: int) -> Tensor:
    """Which tokens (columns) a token (row) sees: earlier ones; its chunk of four too; the next one too."""
    position = torch.arange(n)
    limit = {"chunks": position // 4 * 4 + 3, "ahead": position + 1}.get(how, position)
    return position <= limit.unsqueeze(-1)


def hidden(how: str, n: int) -> Tensor:
    """The same, to be added to scores; (1, 1, n, n) as transformers' layers want it."""
    return torch.zeros(1, 1, n, n).masked_fill(~allowed(how, n), torch.finfo(torch.float32).min)


class Attention(nn.Module):
    """Hides later tokens by a mask of its own, by `is_causal`, or by the mask that it is given."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.how in ("own", "chunks", "ahead"):
            mask = allowed(self.how, x.shape[1])
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


WAYS = ("own", "is_causal", "given", "layer", "attention", "chunks", "ahead")


class Model(nn.Module):
    def __init__(self, dice: random.Random):
        super().__init__()
        how, pre = dice.choice(WAYS), dice.random() < 0.5
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


class Parts(nn.Module):
    """A library's parts in somebody's own module, which masks them."""

    def __init__(self, parts: nn.Module, how: str):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.parts, self.how = parts, how

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x, mask = self.embedding(ids) + self.position(torch.arange(n)), hidden(self.how, n)
        if isinstance(self.parts, nn.TransformerEncoder):
            return self.parts(x)
        for part in self.parts if isinstance(self.parts, nn.ModuleList) else [self.parts]:
            x = part(x, attention_mask=mask)
            x = x if isinstance(x, Tensor) else x[0]
        return x


class OwnBert(hf.BertModel):
    """Makes its own mask."""

    how = "own"

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = self.embeddings(input_ids)
        return self.encoder(embedded, attention_mask=hidden(self.how, input_ids.shape[1]))[0]


def masked(how: str) -> Any:
    """A hook before attention that masks."""

    def mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        n = args[0].shape[1]
        if isinstance(module, nn.MultiheadAttention):
            return args, kwargs | {"attn_mask": hidden(how, n)[0, 0], "is_causal": False}
        return args[:1], kwargs | {"attention_mask": hidden(how, n)}

    return mask


def bert() -> hf.BertConfig:
    return hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


class First(nn.Module):
    """The first of what another module returns."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids)[0]


def of_a_library(kind: str, how: str) -> nn.Module:
    """A library's model or its parts, made causal by somebody else."""
    if kind == "encoder":
        return Parts(BertEncoder(bert()), how)
    if kind == "layers":
        return Parts(nn.ModuleList(BertLayer(bert()) for _ in range(3)), how)
    if kind == "subclass":
        model: Any = OwnBert(bert())
        model.how = how
        return model
    if kind == "hooked torch":
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        model = Parts(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), how)
        for layer in model.parts.layers:
            layer.self_attn.register_forward_pre_hook(masked(how), with_kwargs=True)
        return model
    model = hf.BertModel(bert())
    if kind == "hooked":
        for layer in model.encoder.layer:
            layer.attention.register_forward_pre_hook(masked(how), with_kwargs=True)
    elif kind == "exchanged":
        plain = model.encoder.forward
        model.encoder.forward = lambda x, *_, **__: plain(x, attention_mask=hidden(how, x.shape[1]))
    return First(model)


KINDS = ("encoder", "layers", "subclass", "hooked torch", "hooked", "exchanged")


def reach(model: nn.Module, ids: Tensor) -> Tensor:
    """(n, n): whether a change of the token of a row changes the output of the token of a column, in any sequence."""

    def run(given: Tensor) -> Tensor:
        torch.manual_seed(0)  # the same tokens are dropped
        return model(given)

    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it passes attention that was replaced by, and is off with hooks
    try:
        with torch.no_grad():
            before, found = run(ids), []
            for place in range(ids.shape[1]):
                changed = ids.clone()
                changed[:, place] = (changed[:, place] + 1) % VOCABULARY
                after = run(changed)
                same = (before == after) | (before.isnan() & after.isnan())
                found.append(~same.all(dim=-1).all(dim=0))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore:cannot tell whether this model is causal")
@pytest.mark.parametrize("seed", range(100))
def test_no_remedy_shows_a_token_what_comes_after_it(seed: int):
    dice = random.Random(seed)
    torch.manual_seed(seed)
    model: nn.Module = Model(dice)
    if dice.random() < 0.5:
        model = Around(model)
    _shows_nothing_new(model, dice)


@pytest.mark.filterwarnings("ignore:cannot tell whether this model is causal")
@pytest.mark.parametrize("around", [None, Around, nn.Sequential, nn.DataParallel])
@pytest.mark.parametrize("how", ["own", "chunks", "ahead"])
@pytest.mark.parametrize("kind", KINDS)
def test_nor_in_a_library_that_somebody_else_masks(kind: str, how: str, around: type[nn.Module] | None):
    for seed in range(3):
        torch.manual_seed(seed)
        model = of_a_library(kind, how)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
        _shows_nothing_new(model if around is None else around(model), random.Random(seed))


def _shows_nothing_new(model: nn.Module, dice: random.Random) -> None:
    """In the model with a remedy, no token sees a later one that it did not see before."""
    model.eval()
    ids = torch.randint(0, VOCABULARY, (dice.choice([1, 2, 3]), dice.choice([6, 9])))
    options: dict[str, Any] = {"inputs": ids} if dice.random() < 0.6 else {}
    if dice.random() < 0.3:
        options["causal"] = True
    before = reach(model, ids)
    assert not before.all()  # it hides something
    depthscope.apply(model, DeEscalate(0.5), **options)
    assert {hook.mean.kind for _, hook in hooks_in(model) if hook.remedy is not None} == {"causal"}
    later = torch.ones_like(before).tril(-1)  # the token that is changed comes after the one that is looked at
    assert not (reach(model, ids) & ~before & later).any()
