"""A model on inputs, settled once."""

from __future__ import annotations

import gc
from threading import Thread

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import depthscope
from depthscope import Scope
from depthscope.scope import scope_of

IDS = torch.randint(0, 50, (3, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
    ).eval()


class Mixing(nn.Module):
    """A block that mixes tokens: each with those before it, or with all."""

    def __init__(self, causal: bool):
        super().__init__()
        self.linear, self.causal = nn.Linear(8, 8), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        earlier = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return torch.tanh(self.linear(x + (earlier if self.causal else x.mean(1, keepdim=True))))


class Plain(nn.Module):
    """A model of no known family, which counts its passes."""

    def __init__(self, causal: bool):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Mixing(causal) for _ in range(3))
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_verb_of_a_scope_is_the_function(gpt2):
    scope, batch = Scope(gpt2, IDS), {"input_ids": IDS}
    assert scope.probe().frame.equals(depthscope.probe(gpt2, IDS).frame)
    assert scope.skip_loss().equals(depthscope.skip_loss(gpt2, batch))
    assert scope.depth(lens=False).frame.equals(depthscope.depth_use(gpt2, batch, lens=False).frame)
    assert scope.paths().frame.equals(depthscope.paths(gpt2, batch).frame)
    assert scope.spectra().frame.equals(depthscope.spectra(gpt2).frame)
    assert scope.recommend().remedies == depthscope.recommend(gpt2, batch).remedies
    assert scope.fix().after.frame.equals(depthscope.fix(gpt2, batch).after.frame)


def test_it_says_what_is_true_in_a_line(gpt2):
    masked = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([7]), 0)}
    assert str(Scope(gpt2, masked)) == (
        "gpt2 · 3 blocks of width 16 · pre-norm · causal (by its family) · 3 × 8 tokens, 3 padded"
    )
    x = torch.randn(2, 5, 8)
    assert "Plain · 3 blocks of width 8 · not causal (found by trying)" in str(
        Scope(Plain(False), x, blocks="layers.*")
    )
    assert "causal (as you say)" in str(Scope(Plain(True), x, blocks="layers.*", causal=True))


def test_a_window_is_not_said_to_be_causal():
    class Window(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x + nn.functional.avg_pool1d(x.mT, 3, 1, 1).mT)

    model = Plain(False)
    model.layers = nn.ModuleList(Window() for _ in range(3))
    said = str(Scope(model, torch.randn(2, 9, 8), blocks="layers.*"))
    assert "· tokens see some later ones, counted as causal (found by trying) ·" in said


def test_nothing_is_settled_twice():
    model, x = Plain(True), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    scope = Scope(model, x, blocks="layers.*")
    scope.probe()
    model.passes = 0
    scope.probe()
    assert model.passes == 1  # and not those that try the token axis, the structure and the causality
    assert scope.probe(x + 1).metadata["causal"] is True
    assert model.passes == 2


def test_no_verb_settles_again_what_a_scope_knows(gpt2, monkeypatch):
    """Blocks, causality and packing are found out once; `fix` costs its two probes and what `recommend` measures."""
    from depthscope import scope as module

    settled = []
    for name in ("anatomy_with_hints", "with_sight", "is_causal", "are_apart"):
        found = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=found, **o: settled.append(n) or f(*a, **o))
    plain, x = Plain(False), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    for scope in (Scope(gpt2, IDS), Scope(plain, x, blocks="layers.*")):
        scope.probe()
        scope.recommend()  # which tries again what only a library says
        settled.clear()
        scope.probe()
        scope.depth(lens=False)
        scope.recommend()
        scope.skip_loss(loss=lambda output: (output if torch.is_tensor(output) else output[0]).square().mean())
        scope.spectra() if scope.model is gpt2 else None
        scope.capture()
        scope.fix(tau=0.3)
        with scope.ablate(1):
            pass
        scope.apply(depthscope.DeEscalate(0.3))
        scope.remove()
        assert not settled
    plain.passes = 0
    scope.fix(tau=0.3)
    assert plain.passes == 5
    plain.passes = 0
    assert depthscope.fix(plain, x, blocks="layers.*", tau=0.3).remedies
    assert plain.passes == 14  # two find the blocks, three the batch and four the causality, all once


def test_an_exchanged_block_is_noticed(gpt2):
    scope = Scope(gpt2, IDS)
    before = scope.anatomy
    gpt2.transformer.h[1] = GPT2LMHeadModel(gpt2.config).transformer.h[1].eval()
    assert scope.anatomy is not before
    assert scope.probe().frame.equals(depthscope.probe(gpt2, IDS).frame)


def test_a_block_that_was_added_and_a_part_of_one_that_was_exchanged_are_noticed(gpt2):
    scope, other = Scope(gpt2, IDS), GPT2LMHeadModel(gpt2.config).transformer.h.eval()
    scope.probe()
    gpt2.transformer.h.append(other[0])
    gpt2.config.n_layer = 4
    assert scope.probe().frame.equals(depthscope.probe(gpt2, IDS).frame)
    gpt2.transformer.h[1].ln_1, gpt2.transformer.h[1].attn = other[1].ln_1, other[1].attn
    assert scope.probe(stations="all").frame.equals(depthscope.probe(gpt2, IDS, stations="all").frame)


def test_a_forward_that_was_exchanged_is_noticed(gpt2):
    """Its arguments say what may be a mask."""
    scope = Scope(gpt2, {"input_ids": IDS})
    before, block = scope.anatomy, gpt2.transformer.h[1]
    assert scope.anatomy is before
    block.forward = block.forward
    assert scope.anatomy is not before


def test_a_probe_leaves_nothing_for_the_garbage_collector(gpt2):
    """Buffers as large as the tokens would wait for it."""
    scope = Scope(gpt2, IDS)
    scope.probe()
    gc.collect()
    gc.disable()
    try:
        scope.probe()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_further_batch_may_say_that_it_is_causal():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    scope = Scope(model, x)
    assert scope.probe().metadata["causal"] is False
    later = {"src": x, "mask": nn.Transformer.generate_square_subsequent_mask(5)}
    assert scope.probe(later).metadata["causal"] is True

    class Hints(Plain):
        def forward(self, x: torch.Tensor, causal: bool = False) -> torch.Tensor:
            for layer in self.layers:
                layer.causal = causal
            return super().forward(x)

    scope = Scope(Hints(False), {"x": x}, blocks="layers.*")
    hints = ({}, {"causal": True}, {})
    assert [scope.on({"x": x} | more).is_causal() for more in hints] == [False, True, False]


def test_one_thread_that_is_refused_takes_nothing_from_the_one_that_measures(gpt2):
    scope, refused = Scope(gpt2, IDS), []

    def measure() -> None:
        with pytest.raises(ValueError, match="measured already, in another thread"):
            scope.probe()
        refused.append(True)

    with scope.undisturbed():
        thread = Thread(target=measure)
        thread.start()
        thread.join()
        assert refused
        scope.probe()  # goes on inside


def test_an_iterator_is_read_once_and_a_list_as_often_as_asked(gpt2):
    scope = Scope(gpt2, iter([IDS, IDS]))
    assert scope.probe().metadata["samples"] == 6
    with pytest.raises(ValueError, match="read once"):
        scope.probe()
    again = Scope(gpt2, [IDS, IDS])
    assert [again.probe().metadata["samples"] for _ in range(2)] == [6, 6]
    assert depthscope.fix(gpt2, iter([IDS, IDS])).before.metadata["samples"] == 6


def test_captured_tokens_are_those_of_the_model(gpt2):
    hidden = gpt2(IDS, output_hidden_states=True).hidden_states
    captured = Scope(gpt2, IDS).capture()
    assert list(captured) == [("output", block) for block in range(4)]
    assert torch.equal(captured["output", 0], hidden[0])
    assert torch.equal(captured["output", 2], hidden[2])
    assert set(Scope(gpt2, IDS).capture("ffn_branch", blocks=[2])) == {("ffn_branch", 2)}
    assert captured.nbytes == 4 * 3 * 8 * 16 * 4
    with pytest.raises(KeyError, match="captured station"):
        captured["output", 9]
    with pytest.raises(ValueError, match="from 0 to 3"):
        Scope(gpt2, IDS).capture(blocks=4)


def test_blocks_are_left_out_one_by_one_and_in_runs(gpt2):
    short = gpt2.transformer.h[1:2]
    with Scope(gpt2).ablate(1, range(3, 4)):
        cut = gpt2(IDS).logits
    whole, gpt2.transformer.h = gpt2.transformer.h, short
    expected = gpt2(IDS).logits
    gpt2.transformer.h = whole
    assert torch.equal(cut, expected)
    assert not torch.equal(cut, gpt2(IDS).logits)
    losses = depthscope.skip_loss(gpt2, IDS)
    with depthscope.ablate(gpt2, 2):
        assert depthscope.probing.mean_loss(gpt2, IDS) == pytest.approx(losses["loss"][2], abs=1e-12)
        with pytest.raises(ValueError, match="without its block 2 now"):
            depthscope.recommend(gpt2, IDS)
    for wrong in (0, 4, True, 2.5, None):
        with pytest.raises(ValueError, match="from 1 to 3"), depthscope.ablate(gpt2, wrong):
            pass
    with pytest.raises(ValueError, match="got nothing"), depthscope.ablate(gpt2):
        pass


def test_what_cannot_be_is_said(gpt2):
    with pytest.raises(ValueError, match="expected inputs"):
        Scope(gpt2).probe()
    with pytest.raises(TypeError, match="where the Scope is made"):
        depthscope.probe(Scope(gpt2, IDS), causal=True)
    with pytest.raises(TypeError, match="unexpected option"):
        scope_of(gpt2, IDS, cuasal=True)
    with pytest.raises(ValueError, match="of one batch"):
        Scope(gpt2, IDS, mask=torch.ones(3, 8)).probe(IDS)
    with pytest.raises(ValueError, match="expected a model"):
        Scope("gpt2")  # type: ignore[arg-type]


def test_remedies_go_in_and_out_by_a_scope():
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    ).eval()
    scope, before = Scope(model, IDS), model(IDS).last_hidden_state
    scope.apply(depthscope.DeEscalate(0.3), depthscope.LayerScale(0.5))
    assert not torch.equal(model(IDS).last_hidden_state, before)
    scope.remove()
    assert torch.equal(model(IDS).last_hidden_state, before)
    with scope.watch(every=1) as watch:
        model.train()(IDS)
    assert len(watch.records)


def test_names_are_listed():
    assert "de-escalation" in depthscope.list_remedies()
    assert "gpt2" in {name.lower() for name in depthscope.list_families()}
    assert "token_similarity" in depthscope.list_measures("light")
    assert set(depthscope.list_measures("light")) < set(depthscope.list_measures())


def test_one_of_a_thing_is_said_as_one():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
    assert "1 block of width 8" in str(Scope(model, torch.randn(2, 1, 8)))
    assert "2 × 1 token" in str(Scope(model, torch.randn(2, 1, 8))).split(" · ")
