"""What a probe costs: ratios from one run, medians over alternating rounds with their quartiles.

    python benchmarks/probe.py tiny vit gpt2 bert   # what is asked of a probe, about four minutes on an idle machine
    python benchmarks/probe.py                      # all of it; other parts: padded, growth, spectral, memory

tiny, vit, gpt2, bert   forward with the default profile of an open scope ÷ plain forward, at `output` and at all trunk
          stations, beside a naive loop over kept states and a probe without a scope, with what is asked of each;
          processor time of one thread, and how many operations of PyTorch are added. The two tables of a profile are
          made when they are first read, which is timed by itself
padded    the same on a padded batch
growth    how the cost grows with the number of blocks, of tokens, and with the width
spectral  the same for each measure of the spectral group, at `output`; one round, they are slow
memory    peak memory of a process that probes ÷ one that only runs the model, at two depths with
          shared weights, and against keeping all hidden states and measuring them afterwards
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import compare, keep_memory, operations
from torch import nn

from depthscope import Scope
from depthscope import measures as m
from depthscope.anatomy import anatomy_of
from depthscope.measures import list_measures
from depthscope.models import BlockConfig, Encoder, VisionTransformer, pre_norm
from depthscope.probing import probe

ROUNDS = 9
LIGHT: dict[str, Any] = {"measures": "light", "stations": "output"}  # what was timed before there was a verdict


def bert() -> tuple[nn.Module, torch.Tensor]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()).eval(), torch.randint(30_000, (8, 128))


def vit() -> tuple[nn.Module, torch.Tensor]:
    config = BlockConfig(192, 3, placement=pre_norm)
    return VisionTransformer(12, config, image_size=224, patch_size=16).eval(), torch.randn(8, 3, 224, 224)


MODELS = {"BERT-base, 8 × 128 tokens": bert, "ViT 12 × 192, 8 × 197 tokens": vit}


def ratios(
    plain: Callable[[], object], others: dict[str, Callable[[], object]], rounds: int = ROUNDS
) -> dict[str, float]:
    """Median over the rounds of (other ÷ plain), each pair timed back to back."""
    found: dict[str, list[float]] = {name: [] for name in others}
    for call in (plain, *others.values()):
        call()
    for _ in range(rounds):
        for name, call in others.items():
            base, spent = _seconds(plain), _seconds(call)
            found[name].append(spent / base)
    return {name: statistics.median(values) for name, values in found.items()}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def tiny() -> tuple[nn.Module, torch.Tensor]:
    config = BlockConfig(128, 4, placement=pre_norm)
    return VisionTransformer(10, config, image_size=32, patch_size=4).eval(), torch.randn(4, 3, 32, 32)


def padded_bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768)
    real = torch.arange(128) < torch.arange(8)[:, None] * 10 + 58
    return BertModel(config).eval(), {"input_ids": torch.randint(30_000, (8, 128)), "attention_mask": real.long()}


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(n_embd=192, n_head=3, n_layer=12)).eval(), torch.randint(50_000, (8, 128))


def naive(model: nn.Module, run: Callable[[], object]) -> object:
    """What people write by hand: the blocks' outputs are kept, and three measures are taken in a loop."""
    kept: list[torch.Tensor] = []
    hooks = [
        block.module.register_forward_hook(
            lambda _m, _a, output: kept.append(output[0] if isinstance(output, tuple) else output)
        )
        for block in anatomy_of(model).blocks
    ]
    run()
    for hook in hooks:
        hook.remove()
    found = []
    for x in kept:
        mean = x.mean(dim=1, keepdim=True)
        found += [mean.norm(dim=-1).square().mean() * x.shape[1] / x.square().sum(dim=(1, 2)).mean()]
        found += [(x - mean).square().sum(dim=(1, 2)).mean()]
        unit = x / x.norm(dim=-1, keepdim=True)
        found += [unit.mean(dim=1).square().sum(dim=-1).mean()]
    return torch.stack(found).tolist()


def show(name: str, model: nn.Module, inputs: Any, rounds: int, targets: dict[str, str] | None = None) -> None:
    """A model with the default profile of an open scope and without, at one and at all trunk stations, beside a naive
    loop; `targets` are what is asked of each."""

    def plain() -> object:
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)

    scope = Scope(model, inputs)
    calls: dict[str, Callable[[], object]] = {
        "output": partial(scope.probe, **LIGHT),
        "trunk": partial(scope.probe, measures="light", stations="trunk"),
        "naive loop": partial(naive, model, plain),
        "first probe, without a scope": partial(probe, model, inputs, **LIGHT),
    }
    torch.set_num_threads(1)
    with torch.no_grad():
        base, found = compare(plain, calls, rounds)
        counts = {title: operations(call) - operations(plain) for title, call in calls.items()}
        profile = scope.probe(**LIGHT)
    print(f"{name}: plain {base} ms, {rounds} rounds")
    for title, (ratio, added) in found.items():
        asked = (targets or {}).get(title)
        print(
            f"    {title:<28} {ratio} × plain, {added:.1f} ms and {counts[title]} operations more"
            + (f"   asked: {asked}" if asked else "")
        )
    more = found["first probe, without a scope"].added - found["output"].added
    print(f"    the first probe beside one of an open scope: {more:.1f} ms more   asked of the tiny model: at most 10")
    reading = _seconds(lambda: (profile.frame, profile.sinks))
    print(f"    the tables, when they are first read: {1000 * reading:.1f} ms   asked: at most 3")


def show_tiny() -> None:
    targets = {"output": "at most 1.25", "trunk": "at most 1.5"}
    show("tiny ViT 10 × 128, 4 × 65 tokens", *tiny(), rounds=60, targets=targets)


def show_vit() -> None:
    targets = {"output": "at most the naive loop + .02", "trunk": "at most 1.10"}
    show("ViT 12 × 192, 8 × 197 tokens", *vit(), rounds=21, targets=targets)


def show_bert() -> None:
    show("BERT-base, 8 × 128 tokens", *bert(), rounds=5, targets={"output": "at most 1.02"})


def show_gpt2() -> None:
    targets = {"output": "at most the naive loop + .03"}
    show("GPT-2 12 × 192, 8 × 128 tokens", *gpt2(), rounds=21, targets=targets)


def show_padded() -> None:
    show("BERT 12 × 192, 8 × 58–128 of 128 tokens", *padded_bert(), rounds=15)


def show_growth() -> None:
    """One of depth, tokens and width changes, the others stay."""
    torch.set_num_threads(1)
    cases = [("blocks", d, 64, 128) for d in (5, 10, 20, 40, 80)]
    cases += [("tokens", 10, n, 128) for n in (16, 64, 256, 1024)]
    cases += [("width", 10, 64, d) for d in (64, 128, 256, 512)]
    for what, depth, tokens, width in cases:
        model, x = Encoder(depth, BlockConfig(width, 4)).eval(), torch.randn(4, tokens, width)
        with torch.no_grad():
            base, found = compare(partial(model, x), {"probe": partial(probe, model, x, **LIGHT)}, rounds=9)
        ratio, added = found["probe"]
        print(
            f"{what:<7} {depth:>3} blocks, 4 × {tokens:>4} tokens, width {width:>3}: plain {base.median:7.1f} ms, "
            f"{ratio} × plain, {added:5.1f} ms more, {added / depth:.2f} per block"
        )


def compare_spectral() -> None:
    names = [
        name for name in list_measures("spectral") if name not in list_measures("light") and not name.startswith("sink")
    ]
    for title, make in MODELS.items():
        model, inputs = make()
        calls = {name: partial(probe, model, inputs, measures=[name], stations="output") for name in names}
        with torch.no_grad():
            for name, ratio in ratios(lambda model=model, inputs=inputs: model(inputs), calls, rounds=1).items():
                print(f"{title:<30} {name:<20} {ratio:6.2f} × plain")


def compare_memory() -> None:
    results = {}
    for depth in (12, 48):
        for mode in ("plain", "probe", "hidden"):
            command = [sys.executable, __file__, "--peak", mode, str(depth)]
            results[mode, depth] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        base = results["plain", depth]
        ratio = {mode: results[mode, depth] / base for mode in ("probe", "hidden")}
        print(f"ALBERT shape, {depth} applications, plain {base / 1e6:.0f} MB: probe {ratio['probe']:.3f} × plain")
        print(f"    all hidden states kept, the same measures afterwards: {ratio['hidden']:.3f} × plain")
    print(f"probe, 48 ÷ 12 applications: {results['probe', 48] / results['probe', 12]:.3f}")
    print(f"plain, 48 ÷ 12 applications: {results['plain', 48] / results['plain', 12]:.3f}")


def peak(mode: str, depth: int) -> None:
    """Runs one way of measuring in this process and prints the most memory it ever had, in bytes."""
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        num_hidden_layers=depth,
        attention_probs_dropout_prob=0.0,
    )
    model, inputs = AlbertModel(config).eval(), torch.randint(30_000, (32, 128))
    with torch.no_grad():
        if mode == "probe":
            probe(model, inputs, **LIGHT)
        elif mode == "hidden":
            for state in model(inputs, output_hidden_states=True).hidden_states:
                tokens = m.TokenMatrix(state)
                for measure in (m.token_similarity, m.token_diversity, m.cosine_similarity, m.direction_similarity):
                    measure(tokens)
        else:
            model(inputs)
    print(_most_memory())


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


PARTS = {
    "tiny": show_tiny,
    "vit": show_vit,
    "gpt2": show_gpt2,
    "bert": show_bert,
    "padded": show_padded,
    "growth": show_growth,
    "spectral": compare_spectral,
    "memory": compare_memory,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        peak(sys.argv[2], int(sys.argv[3]))
    else:
        print(f"torch {torch.__version__}")
        keep_memory()
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
