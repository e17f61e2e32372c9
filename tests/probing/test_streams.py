"""Trunks of several streams (hyper-connections): each stream is measured, and changed, as a sequence of its own."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import depthscope
import zoo
from depthscope.measures import token_similarity
from depthscope.remedies import ContraNorm, DeEscalate, PairNorm, Remedy
from zoo import IDS, MASK

EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "qk_rope_head_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8}
SIZES = zoo.TEXT | EXPERTS | LATENT | {"head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
DEEPSEEK = SIZES | {"o_lora_rank": 8, "o_groups": 2, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3}
HY = SIZES | {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4}
PADDED = {"input_ids": IDS, "attention_mask": MASK}


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        read = self.norm(x * attention_mask[:, :, None, None])
        return x.flip(2) * torch.tensor([1.0, 0.5]).view(2, 1) + self.layer(read).cumsum(dim=1)


class Own(nn.Module):
    """A model of nobody's family, of two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 16), nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids).unsqueeze(2).expand(-1, -1, 2, -1)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x.mean(dim=2)


class OfOne(Mixing):
    """Its streams stand in the batch: (batch · 2, n, d), or (2 · batch, n, d) where they are not side by side."""

    side_by_side = True

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        apart = x.unflatten(0, (-1, 2)).transpose(1, 2) if self.side_by_side else x.unflatten(0, (2, -1)).movedim(0, 2)
        mixed = super().forward(apart, attention_mask)
        return (mixed.transpose(1, 2) if self.side_by_side else mixed.movedim(2, 0)).flatten(0, 1)


class Folded(Own):
    """As in lucidrains' packages, and in an mHC nanoGPT."""

    def __init__(self, *, side_by_side: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfOne() for _ in range(3))
        self.axis = 1 if side_by_side else 0
        for layer in self.layers:
            layer.side_by_side = side_by_side

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = torch.stack([x, x], dim=self.axis).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x.unflatten(0, (-1, 2) if self.axis else (2, -1)).mean(dim=self.axis)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "folded": Folded,
    "deepseek-v4": lambda: hf.DeepseekV4ForCausalLM(hf.DeepseekV4Config(**DEEPSEEK)),
    "hy-v4": lambda: hf.HYV4ForCausalLM(hf.HYV4Config(**HY, eos_token_id=2, bos_token_id=1)),
}


def made(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model


def blocks_of(model: Any) -> nn.ModuleList:
    return model.layers if isinstance(model, Own) else model.model.layers


def states_of(model: Any, inputs: dict[str, Tensor], change: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
    """What leaves every block, (batch, n, streams, d); `change` exchanges it."""
    states: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, returned: Any) -> Any:
        if isinstance(model, Folded):
            states.append(change(returned.unflatten(0, (-1, 2)).transpose(1, 2)))
            return states[-1].transpose(1, 2).flatten(0, 1)
        states.append(change(returned if isinstance(returned, Tensor) else returned[0]))
        return states[-1] if isinstance(returned, Tensor) else (states[-1], *returned[1:])

    hooks = [block.register_forward_hook(keep) for block in blocks_of(model)]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return states


def in_use(name: str, size: int = 2, *, masked: bool = True) -> dict[str, Tensor]:
    mask = MASK if masked else torch.ones_like(MASK)
    return {"input_ids": IDS[-size:], "attention_mask": mask[-size:]}


@pytest.mark.parametrize(("size", "masked"), [(1, False), (1, True), (2, True)])
@pytest.mark.parametrize("name", MODELS)
def test_every_stream_is_measured(name: str, size: int, masked: bool):
    model, inputs = made(name), in_use(name, size, masked=masked)
    profile = depthscope.probe(model, inputs, gradients=True)
    real = inputs["attention_mask"].bool()
    states = states_of(model, inputs)
    streams = states[0].shape[2]
    assert profile.metadata["streams"]["number"] == streams
    assert (profile.metadata["samples"], profile.metadata["width"], profile.metadata["causal"]) == (size, 16, True)
    frame = profile.frame.query("station == 'output'").set_index(["measure", "block", "sample"])["value"].sort_index()
    for number, state in enumerate(states, start=1):
        each = torch.stack(
            [token_similarity(state[:, :, k].double(), real) for k in range(streams)]
        )  # (streams, batch)
        found = frame["token_similarity", number].tolist()
        assert found == pytest.approx(each.mean(dim=0).tolist(), abs=1e-6)
        of_streams = profile.metadata["streams"]["token_similarity"][number]
        assert of_streams == pytest.approx(each.mean(dim=1).tolist(), abs=1e-6)
        pairs = [
            F.cosine_similarity(state[:, :, a], state[:, :, b], dim=-1) for a, b in combinations(range(streams), 2)
        ]
        alike = torch.where(real, torch.stack(pairs).mean(dim=0), 0.0).sum(dim=-1) / real.sum(dim=-1)
        assert frame["stream_similarity", number].tolist() == pytest.approx(alike.tolist(), abs=1e-5)
    assert frame["stream_similarity", 0].tolist() == pytest.approx([1.0] * size)  # copies of the embedding
    assert frame["output_gradient"].notna().all()


@pytest.mark.parametrize("name", MODELS)
def test_a_remedy_takes_the_mean_over_the_tokens_of_each_stream(name: str):
    model = made(name)

    def half(x: Tensor) -> Tensor:
        return x - 0.5 * torch.stack([DeEscalate.causal_mean.mean(x[:, :, k], None) for k in range(x.shape[2])], dim=2)

    whole = {"input_ids": IDS, "attention_mask": torch.ones_like(MASK)}
    expected = states_of(model, whole, half)[-1]
    depthscope.apply(model, DeEscalate(0.5), **({"inputs": PADDED} if name in ("own", "folded") else {}))
    assert_close(states_of(model, whole)[-1], expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        padded = states_of(model, PADDED)[-1][1:, :4]
    alone = {"input_ids": IDS[1:, :4], "attention_mask": MASK[1:, :4]}
    assert_close(padded, states_of(model, alone)[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("remedy", [DeEscalate(0.9), DeEscalate(0.9, at="input"), PairNorm()], ids=str)
@pytest.mark.parametrize("name", ["deepseek-v4", "hy-v4"])
def test_streams_decode_as_they_read_and_show_no_later_token(name: str, remedy: Remedy):
    model = depthscope.apply(made(name), remedy)
    changed = torch.cat([IDS[:, :4], IDS[:, 4:] - 1], dim=1)
    with torch.no_grad():
        whole, other = (model(ids, use_cache=False).logits for ids in (IDS, changed))
        assert_close(whole[:, :4], other[:, :4], rtol=0, atol=1e-5)
        found = model(IDS[:, :4], use_cache=True)
        pieces = [found.logits]
        for place in range(4, 7):
            past = found.past_key_values
            found = model(IDS[:, place : place + 1], past_key_values=past, use_cache=True)
            pieces.append(found.logits)
        assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-4)
        options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        beams = [model.generate(IDS, use_cache=cached, **options) for cached in (True, False)]
        assert torch.equal(*beams)


def test_what_a_pass_tells_and_what_is_refused():
    model = made("deepseek-v4")
    before = states_of(model, PADDED)[-1]
    use = depthscope.depth_use(model, PADDED)
    assert use.frame[["skip_output", "skip_loss"]].notna().all(axis=None)
    assert any("no logit lens" in note for note in use.metadata["notes"])
    assert depthscope.capture(model, PADDED)["output", 3].shape == (2, 7, 4, 16)
    for refused in (lambda: depthscope.paths(model, PADDED),):
        with pytest.raises(ValueError, match="several streams"):
            refused()
    with pytest.raises(ValueError, match="compares a token with all tokens before it"):
        depthscope.apply(made("deepseek-v4"), ContraNorm()).generate(IDS, max_new_tokens=2)
    assert torch.equal(states_of(model, PADDED)[-1], before)
    assert "4 streams" in str(depthscope.probe(model, PADDED))
    assert "of width 16 · several streams" in str(depthscope.Scope(model, PADDED))


def test_a_watched_training_step_has_the_numbers_of_a_probe():
    model = made("deepseek-v4").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with depthscope.watch(model, every=1) as watch:
        model(**PADDED, labels=IDS).loss.backward()
        optimizer.step()
    found = (
        watch.records.query("measure == 'token_similarity' and station == 'output'").groupby("block")["value"].mean()
    )
    expected = depthscope.probe(model.eval(), PADDED).curve("token_similarity")
    assert found.tolist()[-3:] == pytest.approx(expected[-3:], abs=1e-5)


def test_streams_that_do_not_stand_side_by_side_are_refused():
    with pytest.raises(ValueError, match="the change of one sequence"):
        depthscope.probe(Folded(side_by_side=False), PADDED)
