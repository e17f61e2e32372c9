"""`depthscope demo`: a collapse and its repair, on this machine, without any download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthscope.cli.values import counted, folder
from depthscope.cli.values import seed as seed_of

if TYPE_CHECKING:
    from torch import Tensor

    from depthscope.models import Encoder

_PICTURE = "demo.png"


def demo(
    depth: Annotated[int, counted("Number of blocks.")] = 60,
    tau: Annotated[float, typer.Option(min=0, max=1, help="Strength of the de-escalation.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", parser=seed_of, help="Seed of weights and tokens.")] = 0,
    out: Annotated[
        Path | None, typer.Option(parser=folder, help="Also draw the curves into DIR/demo.png.", metavar="DIR")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Watch a deep post-norm Transformer collapse, block by block, and watch it de-escalated."""
    import torch

    from depthscope.cli.documents import print_document
    from depthscope.cli.running import require_writable, say_where
    from depthscope.memory import count_parameters, require_memory
    from depthscope.models import BlockConfig, Encoder, post_norm, pre_norm, xavier

    with torch.device("meta"):
        parameters = 2 * depth * count_parameters(Encoder(1, BlockConfig(256, 8)))
    require_memory(parameters, what=f"--depth {depth}", blocks=2 * depth)
    if out is not None:
        require_writable(out)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(4, 64, 256, generator=generator)  # 4 sequences of 64 random tokens
    post, pre = (
        Encoder(depth, BlockConfig(256, 8, placement=placement, initialise=xavier), generator=generator)
        for placement in (post_norm, pre_norm)
    )
    curves = {
        "post-norm": _similarity_by_block(post, tokens),
        f"de-escalated, τ={tau:g}": _similarity_by_block(post, tokens, tau),
        "pre-norm": _similarity_by_block(pre, tokens),
    }
    if as_json:
        print_document("demo", {"blocks": depth, "tau": tau, "seed": seed, "curves": curves})
    else:
        _show(curves)
    if out is not None:
        _draw(curves, out)
        say_where(out / _PICTURE, as_json)


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
    from rich.table import Table

    from depthscope.cli.console import Screen
    from depthscope.cli.sparkline import sparkline

    depth = len(next(iter(curves.values()))) - 1
    console = Screen()
    console.print(f"\nToken similarity after each block, {depth} blocks at initialisation (1 = all tokens equal)\n")
    for name, curve in curves.items():
        console.print(
            f"  {sparkline(curve, width=36)}  {curve[0]:.3f} → {curve[-1]:.3f}  [bold]{name}[/bold]", markup=True
        )
    table = Table("block", *curves, box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for block in sorted({*range(0, depth + 1, max(1, depth // 12)), depth}):
        table.add_row(str(block), *(f"{curve[block]:.5f}" for curve in curves.values()))
    console.print()
    console.print(table)
    console.print(
        "\nXavier weights, 4 sequences of 64 random tokens, width 256, 8 heads."
        "\nDe-escalated: the post-norm model, τ·mean subtracted from every block's output (shown before it)."
    )


def _draw(curves: dict[str, list[float]], out: Path) -> None:
    from depthscope.drawing import VARIANT_COLOURS, Curve, draw_by_block
    from depthscope.files import write_whole

    colours = (VARIANT_COLOURS[variant] for variant in ("post", "deescalated", "pre"))
    shown = [
        Curve(range(len(curve)), curve, colour, name)
        for (name, curve), colour in zip(curves.items(), colours, strict=True)
    ]
    figure = draw_by_block({"token similarity": shown}, width=7, height=4)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / _PICTURE, lambda target: figure.savefig(target, dpi=160))
