"""Models that read several inputs, or pack their sequences: no remedy shows a token what it may not see."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import depthscope
from depthscope.remedies import DeEscalate

WIDTH = 16
IDS = torch.randint(1, 20, (3, 8), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """One class for encoder and decoder: a context is read if there is one, and then later tokens are hidden."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal
        self.qkv, self.cross = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        if context is not None:
            x = x + F.scaled_dot_product_attention(self.cross(x), context, context)
        return x + self.mlp(self.second(x))


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.encoder = nn.ModuleList(Block(causal=False) for _ in range(3))
        self.decoder = nn.ModuleList(Block(causal=True) for _ in range(3))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        context, x = self.embedding(source), self.embedding(target)
        for block in self.encoder:
            context = block(context)
        for block in self.decoder:
            x = block(x, context)
        return x


class Conditioned(nn.Module):
    """The mean of one input is added to every token of another."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(3))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(target) + self.embedding(source).mean(dim=1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return x


class UniLM(nn.Module):
    """BERT, which a wrapper runs causally by a mask of pairs."""

    def __init__(self):
        super().__init__()
        small = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 24}
        self.bert = hf.BertModel(hf.BertConfig(vocab_size=20, **small))

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril().expand(len(ids), 1, n, n)
        return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state


class Packed(nn.Module):
    """Puts its sequences into one row, hidden from each other."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=False) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        batch, n = ids.shape
        x = self.embedding(ids).reshape(1, batch * n, WIDTH)
        mask = torch.block_diag(*[torch.ones(n, n)] * batch).bool()
        for block in self.blocks:
            x = block(x, mask=mask)
        return x.reshape(batch, n, WIDTH)


class Turned(nn.Module):
    """Its tokens are (batch, d, n)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        convolved = [nn.Conv1d(WIDTH, 24, 1), nn.GELU(), nn.Conv1d(24, WIDTH, 1)]
        self.blocks = nn.ModuleList(nn.Sequential(*convolved) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).mT
        for block in self.blocks:
            x = block(x)
        return x


class Branches(nn.Module):
    """Adds what its blocks return to what they were given."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(3)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


class TokensFirst(nn.Module):
    """Its activations are (n, batch, d), and nothing but ids tells."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return x


def leak(model: nn.Module, given: dict[str, Tensor], name: str) -> float:
    """How much earlier tokens move with the last one."""
    other = given[name].clone()
    other[:, -1] = other[:, -1] % 19 + 1
    with torch.no_grad():
        return float((model(**given) - model(**given | {name: other}))[:, :-1].abs().max())


def mt5() -> nn.Module:
    config = hf.MT5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4)
    return hf.MT5Model(config)


@pytest.mark.parametrize("kind", [EncoderDecoder, Conditioned])
@pytest.mark.filterwarnings("ignore:what the remedy covers", "ignore:cannot tell whether")
def test_the_last_token_of_the_tokens_own_input_is_not_shown(kind: Any):
    torch.manual_seed(0)
    model, given = kind().eval(), {"source": IDS, "target": IDS.flip(1)}
    assert leak(model, given, "target") == 0
    depthscope.apply(model, DeEscalate(0.5), inputs=given)
    assert leak(model, given, "target") == 0


def test_an_encoder_and_a_decoder_of_one_class_are_not_one_trunk():
    torch.manual_seed(0)
    profile = depthscope.probe(EncoderDecoder().eval(), {"source": IDS, "target": IDS.flip(1)})
    assert profile.depth == 3
    assert profile.metadata["causal"] is False  # of two stacks of one size the first, the encoder
    assert any("left out" in note for note in profile.metadata["notes"])
    torch.manual_seed(0)
    parts = depthscope.probe(mt5().eval(), {"input_ids": IDS, "decoder_input_ids": IDS}).parts
    assert parts == {"encoder": (1, 3), "decoder": (4, 6)}


@pytest.mark.parametrize("options", [{}, {"inputs": IDS}], ids=["alone", "with inputs"])
def test_a_known_model_that_a_wrapper_runs_causally_is_refused_or_does_not_leak(options: dict[str, Any]):
    torch.manual_seed(0)
    model = UniLM().eval()
    assert leak(model, {"ids": IDS}, "ids") == 0
    depthscope.apply(model, DeEscalate(0.5), **options)
    with pytest.raises(ValueError, match="mask of pairs of tokens"):
        model(IDS)


def test_sequences_that_the_model_packs_are_refused():
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="puts its sequences into one row"):
        depthscope.probe(Packed().eval(), IDS)
    assert depthscope.probe(Packed().eval(), IDS[:1]).metadata["tokens"] == 8


def test_tokens_of_another_axis_are_refused():
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="of which the second axis is as wide as the weights"):
        depthscope.probe(Turned().eval(), IDS)


@pytest.mark.parametrize(("kind", "why"), [(Branches, "is added to its tokens outside"), (TokensFirst, "token_axis=0")])
def test_without_inputs_the_first_pass_refuses_what_was_guessed_wrongly(kind: Any, why: str):
    torch.manual_seed(0)
    model = depthscope.apply(kind().eval(), DeEscalate(0.5), causal=False)
    with pytest.raises(ValueError, match=why):
        model(IDS)
    depthscope.apply(depthscope.remove(model), DeEscalate(0.5), causal=False, inputs=IDS)
    model(IDS)
