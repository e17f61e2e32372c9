"""`depthscope demo`: a collapse and its repair, on this machine, without any download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from depthscope.models import Encoder


def demo(
    depth: Annotated[int, typer.Option(min=1, help="Number of blocks.")] = 60,
    tau: Annotated[float, typer.Option(min=0, max=1, help="Strength of the de-escalation.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also draw the curves into DIR/demo.png.", metavar="DIR")] = None,
) -> None:
    """Watch a deep post-norm Transformer collapse, block by block, and watch it de-escalated."""
    import torch

    from depthscope.models import BlockConfig, Encoder, post_norm, pre_norm, xavier

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(4, 64, 256, generator=generator)  # 4 sequences of 64 random tokens
    config = {"width": 256, "heads": 8, "initialise": xavier}
    post = Encoder(depth, BlockConfig(placement=post_norm, **config), generator=generator)  # type: ignore[arg-type]
    pre = Encoder(depth, BlockConfig(placement=pre_norm, **config), generator=generator)  # type: ignore[arg-type]
    curves = {
        "post-norm": _similarity_by_block(post, tokens),
        f"post-norm, de-escalated (τ = {tau:g})": _similarity_by_block(post, tokens, tau),
        "pre-norm": _similarity_by_block(pre, tokens),
    }
    _show(curves)
    if out is not None:
        _draw(curves, out)


def _similarity_by_block(encoder: Encoder, x: Tensor, tau: float | None = None) -> list[float]:
    """t_sim after 0, 1, … blocks, mean over the sequences; with `tau`, every block's output is de-escalated."""
    import torch

    from depthscope.measures import token_similarity
    from depthscope.remedies import deescalate

    curve = [token_similarity(x).mean().item()]
    with torch.no_grad():
        for block in encoder.blocks:
            x = block(x)
            if tau is not None:
                x = deescalate(x, tau)
            curve.append(token_similarity(x).mean().item())
    return curve


def _show(curves: dict[str, list[float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from depthscope.cli.sparkline import sparkline

    depth = len(next(iter(curves.values()))) - 1
    console = Console()
    console.print(f"\nToken similarity t_sim of {depth}-block Transformers at initialisation (1 = all tokens equal)\n")
    for name, curve in curves.items():
        console.print(f"  {sparkline(curve)}  {curve[0]:.3f} → {curve[-1]:.3f}  [bold]{name}[/bold]")
    table = Table("block", *curves, box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for block in sorted({*range(0, depth + 1, max(1, depth // 12)), depth}):
        table.add_row(str(block), *(f"{curve[block]:.5f}" for curve in curves.values()))
    console.print()
    console.print(table)
    console.print("\nRandom weights (Xavier), 4 sequences of 64 random tokens, width 256, 8 heads.")


def _draw(curves: dict[str, list[float]], out: Path) -> None:
    from depthscope.extras import require

    figure_module = require("matplotlib.figure", "figures")
    out.mkdir(parents=True, exist_ok=True)
    figure = figure_module.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(curve, label=name)
    axes.set(xlabel="block", ylabel="token similarity  t_sim", ylim=(-0.02, 1.02))
    axes.legend()
    figure.savefig(out / "demo.png", dpi=160)
    print(f"wrote {out / 'demo.png'}")
