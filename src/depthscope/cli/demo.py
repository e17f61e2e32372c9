"""`depthscope demo`: a collapse and its repair, on this machine, without any download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from depthscope.cli.values import counted

if TYPE_CHECKING:
    from torch import Tensor

    from depthscope.models import Encoder

_SEED, _TAU, _WIDTH, _HEADS = 0, 1.0, 256, 8


def demo(
    depth: Annotated[int, counted("Number of blocks.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Watch a deep post-norm Transformer collapse, block by block, and watch it de-escalated."""
    import torch

    from depthscope.cli.documents import print_document
    from depthscope.memory import count_parameters, require_memory
    from depthscope.models import BlockConfig, Encoder, post_norm, pre_norm, xavier

    with torch.device("meta"):
        parameters = 2 * depth * count_parameters(Encoder(1, BlockConfig(_WIDTH, _HEADS)))
    require_memory(parameters, what=f"--depth {depth}", blocks=2 * depth)
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randn(4, 64, _WIDTH, generator=generator)  # 4 sequences of 64 random tokens
    post, pre = (
        Encoder(depth, BlockConfig(_WIDTH, _HEADS, placement=placement, initialise=xavier), generator=generator)
        for placement in (post_norm, pre_norm)
    )
    curves = {
        "post-norm": _similarity_by_block(post, tokens),
        f"de-escalated, τ={_TAU:g}": _similarity_by_block(post, tokens, _TAU),
        "pre-norm": _similarity_by_block(pre, tokens),
    }
    if as_json:
        print_document("demo", {"blocks": depth, "tau": _TAU, "seed": _SEED, "curves": curves})
    else:
        _show(curves)


def _similarity_by_block(encoder: Encoder, x: Tensor, tau: float = 0.0) -> list[float]:
    """t_sim of what leaves 0, 1, … blocks, mean over the sequences.

    With `tau`, every block's output is de-escalated before the next block reads it; it is measured
    before that, or τ = 1 would show zeros whatever the block does.
    """
    import torch

    from depthscope.measures import token_similarity
    from depthscope.remedies import deescalate

    curve = [token_similarity(x).mean().item()]
    with torch.no_grad():
        for block in encoder.blocks:
            x = block(x)
            curve.append(token_similarity(x).mean().item())
            x = deescalate(x, tau)
    return curve


def _show(curves: dict[str, list[float]]) -> None:
    import pandas as pd

    from depthscope.cli.console import Screen, sparkline
    from depthscope.cli.display import show_table

    depth, console = len(curves["post-norm"]) - 1, Screen()
    console.print(f"\nToken similarity after each block, {depth} blocks at initialisation (1 = all tokens equal)\n")
    for name, curve in curves.items():
        console.print(f"  {sparkline(curve, width=36)}  {curve[0]:.3f} → {curve[-1]:.3f}  {name}")
    table = pd.DataFrame(curves).rename(index=str)
    console.print()
    show_table(table.iloc[sorted({*range(0, depth + 1, max(1, depth // 12)), depth})])
    console.print()
    console.say(
        f"Xavier weights, 4 sequences of 64 random tokens, width {_WIDTH}, {_HEADS} heads. De-escalated: the "
        "post-norm model, τ·mean subtracted from every block's output (shown before it)."
    )
