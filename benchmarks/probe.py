"""What a probe costs: ratios from one run, medians over alternating rounds.

    python benchmarks/probe.py            # all of it, about ten minutes on 2 cores
    python benchmarks/probe.py time       # one part of: time, padded, spectral, depth, memory

time      forward with the default profile ÷ plain forward, at `output` and at all trunk stations, with the kernel of
          the extra `fast` and without it; CPU time of one thread, quartiles beside the median, and how many
          operations of PyTorch a station adds
padded    the same on a padded batch
spectral  the same for each measure of the spectral group, at `output`; one round, they are slow
depth     how the cost grows with the number of blocks
memory    peak memory of a process that probes ÷ one that only runs the model, at two depths with
          shared weights, and against keeping all hidden states and measuring them afterwards
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from depthscope import measures as m
from depthscope.measures import group
from depthscope.models import BlockConfig, Encoder, VisionTransformer, pre_norm
from depthscope.probing import probe

ROUNDS = 9


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
    return Encoder(10, BlockConfig(128, 4)).eval(), torch.randn(4, 64, 128)


def padded_bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768)
    real = torch.arange(128) < torch.arange(8)[:, None] * 10 + 58
    return BertModel(config).eval(), {"input_ids": torch.randint(30_000, (8, 128)), "attention_mask": real.long()}


class Spread(NamedTuple):
    """Of ratios: the median and the quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f}) × plain"


def spreads(plain: Callable[[], object], others: dict[str, Callable[[], object]], rounds: int) -> dict[str, Spread]:
    """Other ÷ plain, in CPU time; every round runs all of them, one after the other."""
    found: dict[str, list[float]] = {name: [] for name in others}
    for call in (plain, *others.values(), *others.values()):
        call()
    for _ in range(rounds):
        before = _cpu_seconds(plain)
        spent = {name: _cpu_seconds(call) for name, call in others.items()}
        base = (before + _cpu_seconds(plain)) / 2
        for name, seconds in spent.items():
            found[name].append(seconds / base)
    return {name: Spread(*(statistics.quantiles(values, n=4)[i] for i in (1, 0, 2))) for name, values in found.items()}


def _cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


class Operations(TorchDispatchMode):
    """Counts the operations of PyTorch."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> int:
    with Operations() as seen:
        call()
    return seen.count


FORMS = {"on": "kernel", "off": "eager"} if find_spec("numba") else {"off": "eager"}


def with_form(form: str, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        os.environ["DEPTHSCOPE_KERNEL"] = form
        return call()

    return run


def compare(name: str, make: Callable[[], Any], rounds: int) -> None:
    """A model with the default profile and without, in every form and at one and at all trunk stations."""
    model, inputs = make()

    def plain() -> object:
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)

    calls = {
        f"{title}, {where}": with_form(form, partial(probe, model, inputs, stations=where))
        for form, title in FORMS.items()
        for where in ("output", "trunk")
    }
    with torch.no_grad():
        found = spreads(plain, calls, rounds)
        counts = {title: operations(call) - operations(plain) for title, call in calls.items()}
    for title, ratio in found.items():
        print(f"{name:<42} {title:<16} {ratio}, {counts[title]} operations more")


def compare_time() -> None:
    torch.set_num_threads(1)
    for name, make, rounds in (
        ("tiny, 10 × 128, 4 × 64 tokens", tiny, 60),
        ("ViT 12 × 192, 8 × 197 tokens", vit, 25),
        ("BERT-base, 8 × 128 tokens", bert, 9),
    ):
        compare(name, make, rounds)


def compare_padded() -> None:
    torch.set_num_threads(1)
    compare("BERT 12 × 192, 8 × 58–128 of 128 tokens", padded_bert, 15)


def compare_spectral() -> None:
    names = [name for name in group("spectral") if name not in group("default") and not name.startswith("sink")]
    for title, make in MODELS.items():
        model, inputs = make()
        calls = {
            name: lambda name=name, model=model, inputs=inputs: probe(model, inputs, measures=[name]) for name in names
        }
        with torch.no_grad():
            for name, ratio in ratios(lambda model=model, inputs=inputs: model(inputs), calls, rounds=1).items():
                print(f"{title:<30} {name:<20} {ratio:6.2f} × plain")


def compare_depth() -> None:
    x = torch.randn(4, 64, 128)
    previous = None
    for depth in (10, 50, 100):
        model = Encoder(depth, BlockConfig(128, 4)).eval()
        with torch.no_grad():
            (ratio,) = ratios(lambda m=model: m(x), {"probe": lambda m=model: probe(m, x)}).values()
            seconds = statistics.median(_seconds(lambda m=model: probe(m, x)) for _ in range(ROUNDS))
        per_block = seconds / depth
        growth = "" if previous is None else f", {per_block / previous:.2f} × the time per block at 10"
        previous = previous or per_block
        print(f"{depth:>4} blocks: {ratio:.3f} × plain{growth}")


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
            probe(model, inputs)
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
    "time": compare_time,
    "padded": compare_padded,
    "spectral": compare_spectral,
    "depth": compare_depth,
    "memory": compare_memory,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        peak(sys.argv[2], int(sys.argv[3]))
    else:
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {ROUNDS} rounds")
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
