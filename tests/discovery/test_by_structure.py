"""Blocks of no known family whose parts have known names: taken apart by structure, believed only where it holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close

import depthscope
from depthscope import measures as m
from depthscope.anatomy import anatomy_of
from depthscope.anatomy.layout import guesses
from depthscope.discovery.by_structure import seen_by_structure
from depthscope.hooks import undisturbed
from depthscope.inputs import Batch
from depthscope.remedies import DeEscalate, ResidualWeight
from samples import seeded
from zoo import GROUPED, IDS, NO_PAD

INNER = {"after_attention", "attention_branch", "ffn_branch"}
EXPERTS: Any = {"num_experts": 4, "num_experts_per_tok": 2}
OTHERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "olmo": ("pre", lambda: hf.OlmoForCausalLM(hf.OlmoConfig(**GROUPED, **NO_PAD))),
    "glm": ("pre", lambda: hf.GlmForCausalLM(hf.GlmConfig(**GROUPED, **NO_PAD, head_dim=4))),
    "glm4": ("sandwich", lambda: hf.Glm4ForCausalLM(hf.Glm4Config(**GROUPED, **NO_PAD, head_dim=4))),
    "flex-olmo": ("branch", lambda: hf.FlexOlmoForCausalLM(hf.FlexOlmoConfig(**GROUPED, **NO_PAD, **EXPERTS))),
    "apertus": ("pre", lambda: hf.ApertusForCausalLM(hf.ApertusConfig(**GROUPED, **NO_PAD))),
    "olmoe": ("pre", lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**GROUPED, **NO_PAD, **EXPERTS))),
    "gpt1": (
        "post",
        lambda: hf.OpenAIGPTLMHeadModel(hf.OpenAIGPTConfig(vocab_size=50, n_embd=16, n_layer=3, n_head=4)),
    ),
}


class Mix(nn.Module):
    """A stand-in for attention: the mean of the tokens up to each one."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1)[:, None])


class Block(nn.Module):
    """The names of Llama's parts; `weight` is what its branches are multiplied with where no module shows it."""

    def __init__(self, parallel: bool = False, weight: float = 1.0):
        super().__init__()
        self.self_attn, self.mlp = Mix(), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.parallel, self.weight = parallel, weight

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.weight * self.self_attn(self.input_layernorm(x))
        return y + self.weight * self.mlp(self.post_attention_layernorm(x if self.parallel else y))


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 16), nn.ModuleList(blocks)
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=seeded(number))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def settled(model: nn.Module) -> Any:
    with undisturbed(model):
        return seen_by_structure(model, anatomy_of(model), Batch((), {"input_ids": IDS}))


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OTHERS[name][1]().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_the_next_model_of_a_known_structure_needs_no_file(name: str):
    model = build(name)
    assert anatomy_of(model).family == "unknown"
    assert not any(INNER & block.spots.keys() for block in anatomy_of(model).blocks)  # nothing is believed untried
    profile = depthscope.probe(model, {"input_ids": IDS}, stations="all", measures=["light", "branch_ratio"])
    assert profile.metadata["placement"] == OTHERS[name][0]
    assert set(profile.frame["station"]) >= INNER
    assert "every addition was seen to hold" in " ".join(profile.metadata["notes"])


def test_the_numbers_are_those_of_the_trunk():
    """Against hooks that are hung by hand on a model whose code is known here."""
    model = Model(*(Block() for _ in range(3))).double()  # so that both sums round alike
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()))
    profile = depthscope.probe(model, {"input_ids": IDS}, stations="all")
    expected = [m.token_similarity(x).mean().item() for x in seen[-3:]]
    assert_close(profile.curve("token_similarity", "after_attention")[1:], expected, rtol=1e-9, atol=0)


def test_parallel_branches_are_told_from_others_by_their_sums():
    assert {block.placement for block in settled(Model(Block(), Block())).blocks} == {"pre"}
    mixed = settled(Model(Block(), Block(parallel=True)))
    assert [block.placement for block in mixed.blocks] == ["pre", "parallel"]
    assert "after_attention" not in mixed.blocks[1].spots


@pytest.mark.parametrize("weight", [0.5, 0.0, 1.0001], ids=["half", "nothing", "hardly more"])
def test_a_structure_whose_sums_do_not_hold_is_not_believed(weight: float):
    """With nothing added every sum of nothing would hold; it is not believed either."""
    model = Model(Block(), Block(weight=weight), Block(weight=weight))
    if weight == 0:
        for layer in model.layers[1:]:
            layer.weight = 1.0
            nn.init.zeros_(layer.self_attn.proj.weight)
            nn.init.zeros_(layer.self_attn.proj.bias)
    assert list(guesses(anatomy_of(model).blocks[1]))
    found = settled(model)
    assert [block.placement for block in found.blocks] == ["pre", None, None]
    assert found.blocks[1].spots.keys() == {"input", "output"}
    notes = " ".join(found.notes)
    assert "'layers.1' and 1 more looks like a known structure, but its additions do not hold" in notes
    assert "in some blocks (pre-norm)" in notes


def test_remedies_inside_the_blocks_need_inputs_to_try_the_structure_on():
    model = Model(*(Block() for _ in range(3)))
    for remedy in (ResidualWeight(0.5), DeEscalate(0.5, at="after_attention", mixing="prefix")):
        with pytest.raises(ValueError, match=r"does not show its .*inputs=a batch\) tries whether the structure"):
            depthscope.apply(model, remedy)
    batch = {"input_ids": IDS}
    with torch.no_grad():
        depthscope.apply(model, ResidualWeight(0.0), inputs=batch)
        assert_close(model(IDS), model.embed(IDS))  # nothing is added to the trunk
        depthscope.remove(model)
        depthscope.apply(model, DeEscalate(1.0, at="after_attention", mixing="full", allow_leak=True), inputs=batch)
        x = model.embed(IDS)
        for layer in model.layers:
            y = x + layer.self_attn(layer.input_layernorm(x))
            y = y - y.mean(dim=1, keepdim=True)
            x = y + layer.mlp(layer.post_attention_layernorm(y))
        assert_close(model(IDS), x)


class LayerScale(nn.Module):
    """As in timm and in DINOv2's repository."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((16,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ScaledBlock(nn.Module):
    """The names of DINOv2's and DeiT III's block, or, with vectors of its own, of BEiT's in timm."""

    def __init__(self, vectors: bool = False):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(16), Mix()
        self.ls1 = nn.Identity() if vectors else LayerScale()
        self.drop_path1 = nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.ls2 = nn.Identity() if vectors else LayerScale()
        self.drop_path2 = nn.Identity()
        if vectors:
            self.gamma_1, self.gamma_2 = nn.Parameter(torch.full((16,), 0.1)), nn.Parameter(torch.full((16,), 0.1))
        self.vectors = vectors

    def forward(self, x: Tensor) -> Tensor:
        one, two = (self.gamma_1, self.gamma_2) if self.vectors else (1, 1)
        x = x + self.drop_path1(one * self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(two * self.ls2(self.mlp(self.norm2(x))))


@pytest.mark.parametrize("vectors", [False, True])
def test_branches_are_seen_after_layer_scale(vectors: bool):
    model = Model(*(ScaledBlock(vectors) for _ in range(3)))
    profile = depthscope.probe(model, IDS, stations="all")
    assert profile.metadata["placement"] == "pre"
    captured = depthscope.capture(model, IDS, stations=("input", "attention_branch", "ffn_branch", "output"))
    for number in (1, 2, 3):
        parts = [captured[station, number] for station in ("input", "attention_branch", "ffn_branch", "output")]
        assert_close(parts[0] + parts[1] + parts[2], parts[3])
