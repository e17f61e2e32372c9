"""`depthscope compare RECIPE`: the same training under several variants, depths, seeds; curves, a table, a verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthscope.cli.command import add_report
from depthscope.cli.documents import document, print_document
from depthscope.cli.values import counted, folder, names
from depthscope.exit_codes import code_of
from depthscope.extras import require
from depthscope.files import require_writable, write_folder
from depthscope.locks import owned
from depthscope.naming import visible
from depthscope_lab.cli import settings as options
from depthscope_lab.cli.compare_display import list_runs, runs_as_json, show_bar, show_plan, show_summary
from depthscope_lab.training.comparison import Cell, Launch, Result, cells_of, run_cells
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.notation import split
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.variants import YU_ZHANG, label_of

if TYPE_CHECKING:
    from depthscope_lab.training.protocol import Choice, Protocol

FACTORS = {"depth": "--depths", "seed": "--seeds"}  # given as lists here
ALL = "all"


def compare(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="[RECIPE]", help="`depthscope train` lists them.", autocompletion=options.complete_recipe
        ),
    ] = "vit-digits",
    variants: Annotated[
        str,
        typer.Option(
            help="Which, separated by commas, or all; also composed, as for `train`: 'post,deescalated(tau=0.5)'.",
            autocompletion=options.complete_variant,
        ),
    ] = ",".join(YU_ZHANG),
    depths: Annotated[str | None, typer.Option(metavar="12,24,48", help="Blocks; by default the recipe's.")] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Choose each one's learning rate on validation data, then measure on fresh seeds."),
    ] = False,
    seeds: Annotated[int, counted("How many seeds: 0, 1, …; with --tune 1, 2, … and at least 3.")] = 3,
    lr_grid: Annotated[
        str | None, typer.Option(metavar="0.3,1,3", help="Factors of each one's learning rate; the best are marked.")
    ] = None,
    width: options.Width = None,
    batch_size: options.BatchSize = None,
    lr: options.Lr = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    settings: options.Set = None,
    out: Annotated[Path, typer.Option(metavar="DIR", parser=folder, help="Where runs and results are kept.")] = Path(
        "depthscope-comparison"
    ),
    jobs: Annotated[int, counted("Runs at a time.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs; train nothing.")] = False,
    as_json: options.Json = False,
    data: options.Data = None,
    cpu: options.Cpu = False,
) -> None:
    """Train variants side by side: each run a process and a folder; started again, it skips what is done.

    Every variant has its own learning rate, as in the recipe, unless --lr gives all the same, or --tune looks for it:
    then a plan is printed first, and a verdict last. It ranks variants of 8 seeds or more, at depths above the least.
    """
    of_config, of_run = options.separated(recipe, settings, cpu)
    for name in of_config.keys() & FACTORS.keys():
        raise ValueError(f"{name} is compared here: give {FACTORS[name]} instead of --set {name}")
    changes = of_config | options.given(width=width, batch_size=batch_size, lr=lr, epochs=epochs, steps=steps)
    if tune and "evaluate_on" in of_config:
        raise ValueError("--tune chooses on validation data and measures on test data: leave evaluate_on out")
    asked_depths = None if depths is None else tuple(_numbers("--depths", depths, int))
    factors = None if lr_grid is None else tuple(_numbers("--lr-grid", lr_grid, float))
    launch = Launch(out, data, jobs=jobs, options={"tracker": "none"} | of_run)
    chosen = _variants(recipe, variants, changes, launch, min((4, *(asked_depths or ()))))
    cells = cells_of(
        [options.configured(recipe, variant, changes) for variant in chosen],
        depths=asked_depths,
        seeds=(0,) if tune else range(seeds),
        lr_factors=(1.0,) if tune or factors is None else factors,
    )
    if tune:
        _tuned(recipe, cells, launch, factors, seeds, dry_run=dry_run, as_json=as_json)
    elif dry_run:
        from depthscope_lab.training.task import remedies_of

        for config in {cell.config.variant: cell.config for cell in cells}.values():
            remedies_of(config)  # refuses what does not exist, though nothing is built
        if as_json:
            print_document("compare", {"dry_run": True, "recipe": recipe, "plan": runs_as_json(cells, launch)})
        else:
            list_runs(cells, launch)
    else:
        _check(cells, launch)

        def run() -> dict[str, Any]:
            with show_bar(launch) as show:
                results = run_cells(cells, launch, lambda done, running: show("", done, running, len(cells)))
            return _summary(recipe, results, launch)

        _finish(run, launch, as_json)


def _numbers(option: str, text: str, kind: type[float] | type[int]) -> list[Any]:
    """`1,2,3` as numbers, at least one."""
    try:
        return [kind(part) for part in names(option, text)]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"expected {option} to be {what} separated by commas, got {text!r}") from None


def _variants(recipe: str, text: str, changes: dict[str, Any], launch: Launch, depth: int) -> list[str]:
    """Those that are named; for `all`, what this recipe can build with so many blocks, and on stderr why not the
    others: with one block there is none that a first one could be brought into."""
    from depthscope_lab.training.estimate import require_fits

    chosen = [name for name in split(text, ",") if name]
    if not chosen:
        raise ValueError(f"expected --variants to be some of {', '.join(RECIPES[recipe].variants)}, got {text!r}")
    if ALL in chosen:
        found, left_out = [], {}
        for name in RECIPES[recipe].variants:
            try:
                config = options.configured(recipe, name, changes).changed(depth=depth)
                require_fits(config, cpu=bool(launch.options.get("cpu")))
                found.append(name)
            except ValueError as error:
                left_out[name] = error
        if not found:  # the settings are to blame, not the variants
            raise ValueError(f"no variant of {recipe} can be built: {next(iter(left_out.values()))}")
        for name, reason in left_out.items():
            print(f"depthscope: {name} is left out: {reason}", file=sys.stderr)
        place = chosen.index(ALL)
        chosen[place : place + 1] = found
    return list(dict.fromkeys(chosen))


def _tuned(
    recipe: str,
    cells: list[Cell],
    launch: Launch,
    factors: tuple[float, ...] | None,
    seeds: int,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """The fair form: the plan first, then rates, then fresh seeds, then the verdict."""
    from depthscope_lab.training import protocol as fair
    from depthscope_lab.training.loading import make_task
    from depthscope_lab.training.task import total_steps

    configs = fair.prepared([cell.config for cell in cells])
    factors, fresh = factors or fair.FACTORS, fair.fresh_seeds(seeds)
    wanted = fair.Protocol(1, factors, seeds=fresh)  # refuses too few seeds or rates at once
    _check([fair.tuning(configs[0], wanted, configs[0].lr), *map(Cell, configs)], launch, writes=not dry_run)
    first = configs[0]
    protocol = fair.Protocol(total_steps(make_task(first, launch.data), first), factors, seeds=fresh)
    if dry_run:
        runs = [fair.tuning(config, protocol, fair.rounded(config.lr * f)) for config in configs for f in factors]
        if as_json:
            found = {"dry_run": True, "recipe": recipe, "plan": runs_as_json(runs, launch)}
            print_document("compare", {**found, "protocol": protocol.as_json()})
        else:
            show_plan(configs, protocol, launch, on_stderr=False)
            print("nothing was trained")
        return

    def run() -> dict[str, Any]:
        show_plan(configs, protocol, launch, on_stderr=as_json)
        with show_bar(launch) as show:
            choices, results = fair.run_protocol(configs, protocol, launch, show)
        return _summary(recipe, results, launch, (protocol, choices))

    _finish(run, launch, as_json)


def _check(cells: list[Cell], launch: Launch, *, writes: bool = True) -> None:
    """What every run would refuse is refused before the first; so is a folder that cannot be written."""
    from depthscope_lab.training.estimate import require_fits
    from depthscope_lab.training.loading import make_task

    if writes:
        require("matplotlib.figure", "figures")
        require_writable(launch.folder)
    pairs: dict[tuple[str, int], TrainingConfig] = {}
    for cell in cells:
        pairs.setdefault((cell.config.variant, cell.config.depth), cell.config)
    for config in pairs.values():
        require_fits(config, cpu=bool(launch.options.get("cpu")))
    make_task(cells[0].config, launch.data)


def _finish(run: Callable[[], dict[str, Any]], launch: Launch, as_json: bool) -> None:
    """Runs as the owner of the folder, and shows the summary; interrupted, it says that nothing is lost."""
    try:
        with owned(launch.folder):
            summary = run()
    except KeyboardInterrupt as interrupt:
        kept = f"the runs in {visible(str(launch.folder))} are saved"
        print(f"depthscope: interrupted; {kept}, and the same command goes on", file=sys.stderr)
        sys.exit(code_of(interrupt))  # past the line that the program itself would print
    if as_json:
        print_document("compare", summary)
    else:
        show_summary(summary, launch.folder)


def _summary(
    recipe: str, results: list[Result], launch: Launch, tuned: tuple[Protocol, list[Choice]] | None = None
) -> dict[str, Any]:
    """Writes the curves, their pictures and the summary, each whole or as it was; gives the summary."""
    from depthscope.drawing import draw_training_curves
    from depthscope.report.formats import ENDS
    from depthscope.sealed import with_record
    from depthscope_lab.training.comparison_results import curves, summarise

    frame = curves(results, launch)
    summary: dict[str, Any] = {
        "recipe": recipe,
        "runs": {result.cell.name: {"failed": result.failed, "stopped": result.stopped} for result in results},
        "cells": summarise(frame),
    }
    if tuned is not None:
        from depthscope_lab.fair.verdict import verdict_of

        protocol, choices = tuned
        cells, verdict = verdict_of(summary["cells"], frame, choices)
        summary |= {"cells": cells, "choices": [choice.as_json() for choice in choices], "verdict": verdict}
        summary["protocol"] = protocol.as_json()
    labels = {variant: label_of(variant) for variant in frame["variant"].unique()}
    figure = draw_training_curves(frame[~frame["quantity"].isin(ENDS)], labels)
    writers: dict[str, Callable[[Path], Any]] = {
        "curves.parquet": lambda path: frame.to_parquet(path, index=False),
        "curves.png": lambda path: figure.savefig(path, dpi=160),
    }
    write_folder(launch.folder, with_record(writers, "summary.json", "comparison", 1, document("compare", summary)))
    add_report(launch.folder, "compare")
    return summary
