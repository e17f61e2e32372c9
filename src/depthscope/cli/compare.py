"""`depthscope compare RECIPE`: the same training under several variants, depths, seeds; curves and a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthscope.cli import completion
from depthscope.cli.documents import document, print_document
from depthscope.cli.folders import folder
from depthscope.cli.help import count_of_seeds
from depthscope.cli.reporting import add_report
from depthscope.cli.settings import (
    AllowIncomplete,
    BatchSize,
    Cpu,
    Data,
    Epochs,
    Lr,
    Set,
    Steps,
    Width,
    configured,
    given,
    numbers,
    separated,
)
from depthscope.exit_codes import code_of
from depthscope.extras import require
from depthscope.files import require_writable, write_folder, write_json
from depthscope.locks import owned
from depthscope.naming import visible
from depthscope.progress import bar
from depthscope.training.comparison import Cell, Launch, cells_of, last_step, run_cells
from depthscope.training.notation import split
from depthscope.training.recipes import RECIPES
from depthscope.training.variants import YU_ZHANG, label_of

if TYPE_CHECKING:
    import pandas as pd

    from depthscope.cli.console import Screen

FACTORS = {"depth": "--depths", "seed": "--seeds", "warmup_steps": "--warmup"}  # given as lists here


def compare(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="`depthscope train` lists them.", autocompletion=completion.recipes)
    ],
    variants: Annotated[
        str,
        typer.Option(
            help="Which, separated by commas; also composed, as for `train`: 'post,deescalated(tau=0.5)'.",
            autocompletion=completion.variants,
        ),
    ] = ",".join(YU_ZHANG),
    depths: Annotated[str | None, typer.Option(metavar="12,24,48", help="Blocks; by default the recipe's.")] = None,
    seeds: Annotated[int, typer.Option(metavar="N", parser=count_of_seeds, help="How many seeds: 0, 1, …")] = 3,
    warmup: Annotated[
        str | None, typer.Option(metavar="0,100", help="Warm-up steps to compare; by default the recipe's.")
    ] = None,
    lr_grid: Annotated[
        str | None,
        typer.Option(metavar="0.3,1,3", help="Factors of each variant's learning rate; the best are marked."),
    ] = None,
    width: Width = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    epochs: Epochs = None,
    steps: Steps = None,
    settings: Set = None,
    out: Annotated[Path, typer.Option(metavar="DIR", parser=folder, help="Where runs and results are kept.")] = Path(
        "depthscope-comparison"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs; train nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    data: Data = None,
    allow_incomplete: AllowIncomplete = False,
    cpu: Cpu = False,
) -> None:
    """Train variants side by side: each run a process and a folder; started again, it skips what is done.

    Every variant has its own learning rate, as in the recipe, unless --lr gives all the same.
    """
    of_config, of_run = separated(recipe, settings, cpu)
    for name in of_config.keys() & FACTORS.keys():
        raise ValueError(f"{name} is compared here: give {FACTORS[name]} instead of --set {name}")
    changes = of_config | given(width=width, batch_size=batch_size, lr=lr, epochs=epochs, steps=steps)
    cells = cells_of(
        [configured(recipe, variant, changes) for variant in _variants(recipe, variants)],
        depths=None if depths is None else numbers("--depths", depths, int),
        seeds=range(seeds),
        warmups=None if warmup is None else numbers("--warmup", warmup, int),
        lr_factors=(1.0,) if lr_grid is None else numbers("--lr-grid", lr_grid, float),
    )
    launch = Launch(out, data, allow_incomplete, jobs, {"tracker": "none"} | of_run)
    if dry_run:
        _show_plan(cells, launch, as_json)
        return
    _check(cells, launch)
    with owned(out):
        summary = _run(recipe, cells, launch)
    if as_json:
        print_document("compare", summary)
    else:
        _show(summary, out)


def _run(recipe: str, cells: list[Cell], launch: Launch) -> dict[str, Any]:
    """Trains what is not there yet, writes curves and summary, and gives the summary."""
    out = launch.folder
    try:
        with _bar(len(cells), launch) as watching:
            results = run_cells(cells, launch, watching)
    except KeyboardInterrupt as interrupt:
        kept = f"the runs in {visible(str(out))} are saved"
        print(f"depthscope: interrupted; {kept}, and the same command goes on", file=sys.stderr)
        sys.exit(code_of(interrupt))  # past the line that the program itself would print

    from depthscope.training.comparison_results import curves, summarise

    frame = curves(results, launch)
    summary = {
        "recipe": recipe,
        "runs": {result.cell.name: {"failed": result.failed} for result in results},
        "cells": summarise(frame, results),
    }
    _write(out, frame, summary)
    add_report(out, "compare")
    return summary


def _variants(recipe: str, text: str) -> list[str]:
    chosen = [name for name in split(text, ",") if name]
    if not chosen:
        raise ValueError(f"expected --variants to be some of {', '.join(RECIPES[recipe].variants)}, got {text!r}")
    return list(dict.fromkeys(chosen))


def _check(cells: list[Cell], launch: Launch) -> None:
    """What every run would refuse is refused before the first; so is a folder that cannot be written."""
    from depthscope.training.estimate import require_fits
    from depthscope.training.loading import make_task

    require("matplotlib.figure", "figures")
    require_writable(launch.folder)
    for config in {(cell.config.variant, cell.config.depth): cell.config for cell in cells}.values():
        require_fits(config, cpu=bool(launch.options.get("cpu")))
    make_task(cells[0].config, launch.data, allow_incomplete=launch.allow_incomplete)


@contextmanager
def _bar(total: int, launch: Launch) -> Iterator[Callable[[int, Any], None]]:
    """On stderr: how many runs are done, and where the running ones stand."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with bar(*columns) as display:
        task = display.add_task("", total=total)

        def watching(done: int, running: Any) -> None:
            where = []
            for cell in running:
                row = last_step(cell, launch)
                where.append(f"{cell.name}: " + (f"step {row['step']}, loss {row['loss']:.3f}" if row else "starting"))
            display.update(task, completed=done, description="; ".join(where))

        yield watching


def _write(out: Path, frame: pd.DataFrame, summary: dict[str, Any]) -> None:
    """curves.parquet, curves.png, curves.pdf and summary.json, each whole or as it was."""
    from depthscope.drawing import draw_training_curves

    labels = {variant: label_of(variant) for variant in frame["variant"].unique()}
    figure = draw_training_curves(frame[frame["quantity"] != "failed"], labels)
    writers: dict[str, Callable[[Path], Any]] = {
        "curves.parquet": lambda path: frame.to_parquet(path, index=False),
        "curves.png": lambda path: figure.savefig(path, dpi=160),
        "curves.pdf": figure.savefig,
        "summary.json": lambda path: write_json(path, document("compare", summary)),
    }
    write_folder(out, writers)


def _show(summary: dict[str, Any], out: Path) -> None:
    from depthscope.cli.console import Screen

    rows, console = summary["cells"], Screen()
    grid = any(not row["best_lr"] for row in rows)
    _show_cells(console, [_as_words(row, grid) for row in rows])
    console.print("\nloss: training loss over the last tenth of the steps; ±: over the seeds", markup=False)
    if grid:
        console.print("* the learning rate with the least training loss", markup=False)
    for name, run in summary["runs"].items():
        if run["failed"]:
            console.print(f"{name}: {run['failed']}", markup=False)
    files = "curves.png, curves.pdf, curves.parquet, summary.json"
    console.print(f"{files} and the runs are in {out}", markup=False, soft_wrap=True)


def _show_cells(console: Screen, cells: list[dict[str, str]]) -> None:
    """A table; where the terminal is too narrow for it, a paragraph per cell."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in cells[0]:
        table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
    for cell in cells:
        table.add_row(*cell.values())
    if console.has_room_for(table):
        console.print(table)
        return
    for cell in cells:
        console.print(", ".join(f"{name} {value}" for name, value in cell.items()), markup=False)


def _as_words(row: dict[str, Any], grid: bool) -> dict[str, str]:
    """A cell of the comparison, by the headings of its columns; in a `grid` the best learning rate has a mark."""
    return {
        "variant": row["variant"],
        "blocks": str(row["depth"]),
        "lr": f"{row['lr']:g}" + (" *" if grid and row["best_lr"] else ""),
        "warm-up": str(row["warmup_steps"]),
        "runs": f"{row['runs']}" + (f", {row['failed']} failed" if row["failed"] else ""),
    } | {name.replace("_", " "): _with_spread(row, name) for name in row if f"{name}_std" in row}


def _with_spread(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return "–"
    spread = row[f"{name}_std"]
    return f"{row[name]:.3f}" + (f" ± {spread:.3f}" if spread is not None else "")


def _show_plan(cells: list[Cell], launch: Launch, as_json: bool) -> None:
    if as_json:
        plan = {cell.name: {"folder": str(launch.run_folder(cell)), "config": cell.config.as_json()} for cell in cells}
        print_document("compare", {"dry_run": True, "recipe": cells[0].config.recipe, "plan": plan})
        return
    for cell in cells:
        print(visible(str(launch.run_folder(cell))))
    print(f"{len(cells)} run{'s' if len(cells) > 1 else ''}; nothing was trained")
