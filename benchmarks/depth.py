"""What the use of depth costs: ratios of processor time of one thread from one run, medians over alternating rounds.

    python benchmarks/depth.py            # all of it, about four minutes on one core
    python benchmarks/depth.py time       # one part of: time, lens, skips, memory

time    forward with what one pass tells (branches, sinks, logits, energy) ÷ plain forward
lens    the same with the logit lens, of a model with a head, ÷ plain forward; 32 tokens of each sequence
skips   everything, in forward passes
memory  peak memory of a process that measures ÷ one that only runs the model, at two depths with shared weights
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from depthscope.usage import depth_use

ROUNDS = 9


def bert(tokens: int = 128) -> tuple[nn.Module, torch.Tensor]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()).eval(), torch.randint(30_000, (8, tokens))


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)).eval(), torch.randint(50_000, (4, 128))


def compare(title: str, plain: Callable[[], object], other: Callable[[], object], rounds: int = ROUNDS) -> None:
    """Prints the median of other ÷ plain, each pair timed back to back, and its quartiles."""
    plain(), other()
    found = []
    for _ in range(rounds):
        base, spent = _seconds(plain), _seconds(other)
        found.append(spent / base)
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    print(f"{title:<58} {middle:.3f} × plain (quartiles {low:.3f} to {high:.3f})", flush=True)


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()  # other work on the machine counts less than in time on the clock
    call()
    return time.process_time() - start


def compare_time() -> None:
    for tokens in (128, 512):
        model, ids = bert(tokens)
        ids = ids[: 8 if tokens == 128 else 2]
        with torch.no_grad():
            compare(
                f"BERT-base, {len(ids)} × {tokens} tokens, one pass",
                lambda model=model, ids=ids: model(ids),
                lambda model=model, ids=ids: depth_use(model, ids, lens=False, skips=False),
            )


def compare_lens() -> None:
    model, ids = gpt2()
    with torch.no_grad():
        compare(
            "GPT-2 small, 4 × 128 tokens, one pass and the logit lens",
            lambda: model(ids),
            lambda: depth_use(model, ids, skips=False),
            rounds=5,
        )


def compare_skips() -> None:
    model, ids = bert()
    with torch.no_grad():
        compare(
            "BERT-base, 8 × 128 tokens, with skipped blocks",
            lambda: model(ids),
            lambda: depth_use(model, ids),
            rounds=3,
        )


def compare_memory() -> None:
    peaks = {}
    for depth in (12, 48):
        for mode in ("plain", "use"):
            command = [sys.executable, __file__, "--peak", mode, str(depth)]
            peaks[mode, depth] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        base = peaks["plain", depth]
        print(
            f"ALBERT shape, {depth} applications, plain {base / 1e6:.0f} MB: {peaks['use', depth] / base:.3f} × plain"
        )


def _peak(mode: str, depth: int) -> None:
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(num_hidden_layers=depth, hidden_size=768, num_attention_heads=12, intermediate_size=3072)
    model, ids = AlbertModel(config).eval(), torch.randint(30_000, (8, 128))
    with torch.no_grad():
        model(ids) if mode == "plain" else depth_use(model, ids, lens=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


PARTS = {"time": compare_time, "lens": compare_lens, "skips": compare_skips, "memory": compare_memory}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--peak"]:
        _peak(sys.argv[2], int(sys.argv[3]))
    else:
        for name in sys.argv[1:] or PARTS:
            PARTS[name]()
