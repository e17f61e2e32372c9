"""How alike tokens are at block 60 of new weights: t_sim of every wiring, and of every remedy in a post-norm model.

    python benchmarks/block60.py              # about four minutes on one core
    python benchmarks/block60.py deep-norm    # some names

64 random tokens of width 256 in two sequences, 8 heads, weights of attention from N(0, 1/d), mean of two seeds. Two
FFNs: as `nn.Linear` draws its weights, and at He's scale (first layer N(0, 2/fan_in), second N(0, 1/fan_in), so that
the branch is as large as the trunk). The last two columns are the same in a causal model. This is about initialisation
alone, and says nothing of what trains well.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import depthscope
from depthscope.measures import token_similarity
from depthscope.models import WIRINGS, Attention, BlockConfig, Encoder
from depthscope.models.initialisers import DEFAULT, HE, UNIT, Initialiser, Scheme, draw_block, draw_linear
from depthscope.remedies import (
    ContraNorm,
    DeEscalate,
    MVSplit,
    PairNorm,
    Remedy,
    ResidualWeight,
)

REMEDIES: dict[str, Remedy] = {
    "de-escalation, τ = 1": DeEscalate(1.0),
    "de-escalation, τ = 0.5": DeEscalate(0.5),
    "de-escalation, τ = 0.1": DeEscalate(0.1),
    "weight 0.1": ResidualWeight(0.1),
    "PairNorm": PairNorm(),
    "ContraNorm, s = 1": ContraNorm(1.0),
    "ContraNorm, before LN": ContraNorm(1.0, at="after_attention"),
    "MV-Split": MVSplit(learnable=False),
    "MV-Split, β = 1": MVSplit(1.0, learnable=False),
}


def plain(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    draw_block(Scheme(UNIT, UNIT, UNIT, DEFAULT), attention, ffn, generator)


def he(attention: Attention, ffn: nn.Module, generator: torch.Generator | None = None) -> None:
    draw_block(Scheme(UNIT, UNIT, UNIT, HE), attention, ffn, generator)
    draw_linear(UNIT, ffn[2], attention.heads, generator)  # type: ignore[index]


def similarity(wiring: str, initialise: Initialiser, causal: bool, remedy: Remedy | None, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    block = BlockConfig(256, 8, placement=wiring, initialise=initialise, causal=causal)
    model = Encoder(60, block, final_norm=False, generator=generator)
    if remedy is not None:
        depthscope.apply(model, remedy)
    seen: list[torch.Tensor] = []
    model.blocks[-1].register_forward_hook(lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(torch.randn(2, 64, 256, generator=generator))
    return float(token_similarity(seen[0]).mean())


def row(name: str, wiring: str, remedy: Remedy | None) -> None:
    found = [
        sum(similarity(wiring, draw, causal, remedy, seed) for seed in range(2)) / 2
        for causal in (False, True)
        for draw in (plain, he)
    ]
    print(f"{name:<24} " + "  ".join(f"{value:.4f}" for value in found), flush=True)


def main() -> None:
    wanted = sys.argv[1:]
    for name in WIRINGS:
        if not wanted or name in wanted:
            row(name, name, None)
    for name, remedy in REMEDIES.items():
        if not wanted or name in wanted:
            row(name, "post", remedy)


if __name__ == "__main__":
    main()
