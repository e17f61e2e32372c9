"""What the remedies beside de-escalation share: their options, caches, padding, compiling, threads."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.testing import assert_close

import depthscope
import zoo
from depthscope.inputs import batches
from depthscope.remedies import (
    ContraNorm,
    MVSplit,
    PairNorm,
    ResidualWeight,
    applied,
)
from depthscope.remedies.remedy import Remedy
from zoo import run

REMEDIES: dict[str, Remedy] = {
    "pair-norm": PairNorm(),
    "mv-split": MVSplit(0.7, 0.3),
    "residual-weight": ResidualWeight(0.5, "feature"),
    "contra-norm": ContraNorm(),
}
EVERY = pytest.mark.parametrize("remedy", REMEDIES.values(), ids=list(REMEDIES))
NEW = list(REMEDIES)


def pairs(first: list[str], others: list[str], without: tuple[tuple[str, str], ...] = ()) -> Any:
    """Remedy × model: many models for the first remedy, fewer for the others."""
    found = [(remedy, name) for remedy in REMEDIES for name in (others if remedy in NEW else first)]
    return pytest.mark.parametrize(("remedy", "name"), [pair for pair in found if pair not in without])


@pairs(["gpt2", "llama", "t5", "bart"], ["llama"], without=(("contra-norm", "llama"),))
def test_a_cache_gives_what_full_passes_give(name: str, remedy: str):
    builders = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**zoo.GROUPED)),
        "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**zoo.BART)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4, decoder_start_token_id=0)
        ),
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = builders.get(name, zoo.ZOO[name].build)().double().eval()
    depthscope.apply(model, REMEDIES[remedy])
    options: dict[str, Any] = {
        "attention_mask": zoo.MASK.flip(1),  # padding on the left
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    for beams in (1, 3):
        cached, plain = (model.generate(zoo.IDS, use_cache=use, num_beams=beams, **options) for use in (True, False))
        assert torch.equal(cached.sequences, plain.sequences)
        for one, other in zip(cached.logits, plain.logits, strict=True):
            assert_close(one, other, rtol=1e-5, atol=1e-5)  # generate hands out float32


def test_contra_norm_and_a_cache():
    """It would need all earlier tokens: a first pass fills a cache, a second is refused."""
    model, _ = zoo.make("gpt2")
    depthscope.apply(model.eval(), ContraNorm())
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with pytest.raises(ValueError, match="with use_cache=False"):
        model.generate(zoo.IDS, use_cache=True, **options)
    assert model.generate(zoo.IDS, use_cache=False, **options).shape == (2, 10)


@pytest.mark.parametrize("side", ["left", "right"])
@pairs(["bert", "deberta", "gpt2", "qwen3", "phi3", "gpt-neox"], ["bert", "gpt2", "phi3"])
def test_padding_changes_nothing(name: str, side: str, remedy: str):
    model, _ = zoo.make(name)
    depthscope.apply(model.double().eval(), REMEDIES[remedy])
    ids, one, none = torch.arange(5, 10)[None], torch.ones(1, 5, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
    alone = model(input_ids=ids, attention_mask=one)[0]
    order = (lambda a, b: [a, b]) if side == "right" else (lambda a, b: [b, a])
    padded, mask = torch.cat(order(ids, none + 3), dim=1), torch.cat(order(one, none), dim=1)
    places = {} if side == "right" else {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    found = model(input_ids=padded, attention_mask=mask, **places)[0]
    assert_close(found[mask.bool()][None], alone, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("name", ["causal-lm", "bert", "torch"])
def test_compiles_without_graph_breaks(name: str):
    """All that a model can have at once: a compilation takes a second, and more for every remedy."""
    model, inputs = zoo.make(name)
    zoo.shortened(model.eval())
    chosen = {"causal-lm": list(REMEDIES), "bert": ["mv-split"], "torch": ["pair-norm"]}[name]
    depthscope.apply(model, *(REMEDIES[remedy] for remedy in chosen))
    batch = next(batches(model, inputs))
    eager = run(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(*batch.args, **batch.kwargs)
    compiled = compiled if isinstance(compiled, Tensor) else compiled[0]
    assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@EVERY
def test_threads_and_autocast(remedy: Remedy):
    model, _ = zoo.make("gpt2")
    depthscope.apply(model.eval(), remedy)
    texts = [torch.randint(5, 50, (2, 3 + k), generator=torch.Generator().manual_seed(k)) for k in range(8)]

    def logits(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return model(ids)[0]

    alone = [logits(ids) for ids in texts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(logits, texts * 4))
    assert all(torch.equal(one, other) for one, other in zip(alone * 4, together, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(logits(texts[0]).float(), alone[0], rtol=0.05, atol=0.05)  # 8 bits, over three blocks


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (PairNorm, {"scale": float("nan")}, "scale to be a finite number, got nan"),
        (PairNorm, {"scale": True}, "scale to be a finite number, got True"),
        (PairNorm, {"scale": "much"}, "scale to be a finite number, got 'much'"),
        (PairNorm, {"mixing": "ema"}, "mixing='auto', 'full' or 'prefix', got 'ema'"),
        (PairNorm, {"scale": None}, "scale to be a finite number, got None"),
        (PairNorm, {"scale": 0}, "expected scale above 0, got 0"),
        (ContraNorm, {"temperature": -1}, "expected temperature above 0, got -1"),
        (ContraNorm, {"at": "ffn_branch"}, "expected at one of input"),
        (MVSplit, {"alpha": None}, "alpha to be a finite number, got None"),
        (ResidualWeight, {"alpha": 1, "learn": "all"}, "learn='no', 'block' or 'feature', got 'all'"),
        (MVSplit, {"learnable": 1}, "learnable to be true or false, got 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(kind: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize("kind", [PairNorm, ContraNorm, MVSplit])
def test_full_mixing_in_a_causal_model_is_refused(kind: Any):
    model, _ = zoo.make("gpt2")
    with pytest.raises(ValueError, match=rf"{kind.name} with full mixing in a model that is causal.*'prefix'"):
        depthscope.apply(model, kind(mixing="full"))
    depthscope.apply(model, kind(mixing="full", allow_leak=True))
    assert len({entry.block for entry in applied(model)}) == 3


def test_a_norm_inside_the_ffn_does_not_say_how_wide_a_token_is():
    model, inputs = zoo.make("bert")
    for layer in model.encoder.layer:
        layer.intermediate.wide_norm = torch.nn.LayerNorm(24)
    depthscope.apply(model.eval(), ResidualWeight(0.5, "feature"))
    assert model.encoder.layer[0].residual_weight_ffn_branch.shape == (16,)
    assert run(model, inputs).isfinite().all()
