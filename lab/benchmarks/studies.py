"""What the batched trials of Fig. 2 and Fig. 3 (Yu & Zhang 2024) save, against the plain loop, in one run.

    python lab/benchmarks/studies.py            # a fifth of the trials of both figures, both ways
    python lab/benchmarks/studies.py --share 1  # all of them: several minutes for the loop

The plain loop takes one trial at a time: `models.Block` for every block, δ by `svdvals`, λ₂ by `eigvals`, W_V
drawn again in full for Fig. 3 (its two estimates once per block). Same sizes, same number of trials, float32.
CPU time of all threads: on a shared machine it is steadier than the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from depthscope.models import Block, BlockConfig, theorem
from depthscope.stations import TRUNK
from depthscope_lab.papers.yu2024 import fig2, fig3


def mean_and_spread(x: Tensor) -> tuple[Tensor, Tensor]:
    """‖Π₁X‖² and ‖Π⊥X‖²."""
    mean = x.mean(dim=0, keepdim=True)
    return len(x) * mean.square().sum(), (x - mean).square().sum()


def ratio(x: Tensor, y: Tensor) -> float:
    """ξ₁/ξ₂ of the step x → y."""
    (m, s), (n, t) = mean_and_spread(x), mean_and_spread(y)
    return ((n / m) / (t / s)).item()


def attention_of(block: Block, x: Tensor) -> Tensor:
    """P of every head, (h, n, n)."""
    q, k = (
        project(x).unflatten(-1, (block.attention.heads, -1)).transpose(0, 1)
        for project in (block.attention.query, block.attention.key)
    )
    return torch.softmax(q @ k.mT * block.attention.scale, dim=-1)


def gap(p: Tensor, x: Tensor) -> tuple[float, float]:
    """δ and ω, averaged over heads."""
    deltas = [torch.linalg.svdvals(head - head.mean(dim=0))[0].item() for head in p]
    centred, size = x - x.mean(dim=0), x.mean(dim=0).norm()
    omegas = [((head @ centred).mean(dim=0).norm() / size).item() for head in p]
    return sum(deltas) / len(deltas), sum(omegas) / len(omegas)


def block_config(config: fig2.Config | fig3.Config) -> BlockConfig:
    return BlockConfig(
        width=config.width,
        heads=config.heads,
        output_projection=False,
        scale="width",
        attention_bias=False,
        initialise=theorem,
    )


@torch.no_grad()
def loop_fig2(config: fig2.Config) -> float:
    """Returns the mean of ξ₁/ξ₂ of step 1 over all trials and blocks."""
    generator = torch.Generator().manual_seed(config.seed)
    first = []
    for _ in range(config.trials):
        x = torch.randn(1, config.tokens, config.width, generator=generator)
        for _ in range(config.blocks):
            block, seen = Block(block_config(config), generator), []
            for name in TRUNK:
                block.stations[name].register_forward_hook(lambda _m, _i, y, seen=seen: seen.append(y[0]))
            y = block(x)
            ratios = [ratio(a, b) for a, b in pairwise(seen)]
            gap(attention_of(block, x[0]), x[0])
            first.append(ratios[0])
            x = y
    return sum(first) / len(first)


@torch.no_grad()
def loop_fig3(config: fig3.Config) -> float:
    """The same of Fig. 3."""
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(1, config.tokens, config.width, generator=generator)
    first = []
    for _ in range(config.blocks):
        block = Block(block_config(config), generator)
        p = attention_of(block, x[0])
        gap(p, x[0])
        for head in p:
            torch.linalg.eigvals(head).abs().sort()
        following = block(x)
        for _ in range(config.trials):
            nn.init.normal_(block.attention.value.weight, std=config.width**-0.5, generator=generator)
            first.append(ratio(x[0], (x + block.attention(x))[0]))
        x = following
    return sum(first) / len(first)


def ours_fig2(config: fig2.Config) -> float:
    return float(fig2.compute(config, lambda _share: None)["ratio_1"].mean())


def ours_fig3(config: fig3.Config) -> float:
    return 1 + float(fig3.compute(config, lambda _share: None)["excess_mean"].mean())


def timed(call: Callable[[], float]) -> tuple[float, float]:
    start = time.process_time()
    value = call()
    return time.process_time() - start, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.2, help="share of the full number of trials, both ways")
    parser.add_argument("--threads", type=int, default=1, help="of torch; above 1 only on a machine that is idle")
    options = parser.parse_args()
    share = options.share
    torch.set_num_threads(options.threads)
    two = replace(fig2.STUDY.full, trials=max(2, round(share * fig2.STUDY.full.trials)))
    three = replace(fig3.STUDY.full, trials=max(2, round(share * fig3.STUDY.full.trials)))
    ours_fig2(replace(two, trials=2, blocks=1))  # warms up
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32; {share:g} of the trials\n")
    print(f"{'figure':<8} {'trials':>6}  {'ours':>8}  {'loop':>8}  {'loop ÷ ours':>11}  mean ξ₁/ξ₂: ours, loop")
    total_ours = total_loop = 0.0
    for name, trials, ours, loop in (
        ("Fig. 2", two.trials, lambda: ours_fig2(two), lambda: loop_fig2(two)),
        ("Fig. 3", three.trials, lambda: ours_fig3(three), lambda: loop_fig3(three)),
    ):
        (fast, value), (slow, reference) = timed(ours), timed(loop)
        total_ours, total_loop = total_ours + fast, total_loop + slow
        print(f"{name:<8} {trials:>6}  {fast:7.1f}s  {slow:7.1f}s  {slow / fast:11.1f}  {value:.3f}, {reference:.3f}")
    print(f"{'both':<8} {'':>6}  {total_ours:7.1f}s  {total_loop:7.1f}s  {total_loop / total_ours:11.1f}")


if __name__ == "__main__":
    main()
