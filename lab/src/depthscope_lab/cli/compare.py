"""`depthscope compare RECIPE`: the same training under several variants, depths, seeds; curves, a table, a verdict."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthscope.cli.documents import document, print_document
from depthscope.cli.reporting import add_report
from depthscope.cli.values import count_of_seeds, counted, folder
from depthscope.exit_codes import code_of
from depthscope.extras import require
from depthscope.files import require_writable, write_folder
from depthscope.locks import owned
from depthscope.naming import visible
from depthscope_lab.cli import completion
from depthscope_lab.cli import settings as options
from depthscope_lab.cli.compare_display import list_runs, runs_as_json, show_bar, show_plan, show_summary
from depthscope_lab.training.comparison import Cell, Launch, Result, cells_of, run_cells
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.notation import split
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.run import Run
from depthscope_lab.training.variants import YU_ZHANG, label_of

if TYPE_CHECKING:
    import pandas as pd

    from depthscope_lab.training.plan import Plan

FACTORS = {"depth": "--depths", "seed": "--seeds", "warmup_steps": "--warmup"}  # given as lists here
ALL = "all"
_BUDGET = re.compile(r"(?:(?P<h>[\d.]+)h)?\s*(?:(?P<m>[\d.]+)m(?:in)?)?\s*(?:(?P<s>[\d.]+)s)?")


def compare(
    recipe: Annotated[
        str,
        typer.Argument(metavar="[RECIPE]", help="`depthscope train` lists them.", autocompletion=completion.recipes),
    ] = "vit-digits",
    variants: Annotated[
        str,
        typer.Option(
            help="Which, separated by commas, or all; also composed, as for `train`: 'post,deescalated(tau=0.5)'.",
            autocompletion=completion.variants,
        ),
    ] = ",".join(YU_ZHANG),
    depths: Annotated[str | None, typer.Option(metavar="12,24,48", help="Blocks; by default the recipe's.")] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Choose each one's learning rate on validation data, then measure on fresh seeds."),
    ] = False,
    budget: Annotated[
        str | None, typer.Option(metavar="2h", help="How long it may take in all (1h30m, 45m); --tune goes with it.")
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N", parser=count_of_seeds, help="How many seeds: 0, 1, …; with --tune 1, 2, … and at least 3."
        ),
    ] = 3,
    warmup: Annotated[
        str | None, typer.Option(metavar="0,100", help="Warm-up steps to compare; by default the recipe's.")
    ] = None,
    lr_grid: Annotated[
        str | None,
        typer.Option(
            metavar="0.3,1,3", help="Factors of each variant's learning rate; the best are marked, or tuned to."
        ),
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    stop_if: options.StopIf = None,
    warn_if: options.WarnIf = None,
    data: options.Data = None,
    allow_incomplete: options.AllowIncomplete = False,
    cpu: options.Cpu = False,
) -> None:
    """Train variants side by side: each run a process and a folder; started again, it skips what is done.

    Every variant has its own learning rate, as in the recipe, unless --lr gives all the same, or --tune looks for it:
    then a plan with its time is printed first, and a verdict last.
    """
    of_config, of_run = options.separated(recipe, settings, cpu, stop_if, warn_if)
    for name in of_config.keys() & FACTORS.keys():
        raise ValueError(f"{name} is compared here: give {FACTORS[name]} instead of --set {name}")
    changes = of_config | options.given(width=width, batch_size=batch_size, lr=lr, epochs=epochs, steps=steps)
    seconds = None if budget is None else read_budget(budget)
    tuned = tune or budget is not None
    if tuned and "evaluate_on" in of_config:
        raise ValueError("--tune chooses on validation data and measures on test data: leave evaluate_on out")
    asked_depths = None if depths is None else options.numbers("--depths", depths, int)
    launch = Launch(out, data, allow_incomplete, jobs, {"tracker": "none"} | of_run)
    if of_run.keys() & {"stop_if", "warn_if"}:
        from depthscope_lab.training.observation import require_rules

        require_rules(Run(out, **of_run))
    factors = None if lr_grid is None else options.numbers("--lr-grid", lr_grid, float)
    cells = cells_of(
        [
            options.configured(recipe, variant, changes)
            for variant in _variants(recipe, variants, changes, launch, asked_depths)
        ],
        depths=asked_depths,
        seeds=(0,) if tuned else range(seeds),
        warmups=None if warmup is None else options.numbers("--warmup", warmup, int),
        lr_factors=(1.0,) if tuned or factors is None else factors,
    )
    if tuned:
        asked = epochs is not None or steps is not None
        _tuned(recipe, cells, launch, factors, seeds, seconds, asked=asked, dry_run=dry_run, as_json=as_json)
        return
    if dry_run:
        from depthscope_lab.training.building import remedies_of

        for config in {cell.config.variant: cell.config for cell in cells}.values():
            remedies_of(config)  # refuses what does not exist, though nothing is built
        if as_json:
            print_document("compare", {"dry_run": True, "recipe": recipe, "plan": runs_as_json(cells, launch)})
        else:
            list_runs(cells, launch)
        return
    _check(cells, launch)

    def run() -> dict[str, Any]:
        with show_bar(launch) as told:
            results = run_cells(cells, launch, lambda done, running: told("", done, running, len(cells)))
        return _summary(recipe, results, launch)

    _finish(run, launch, as_json)


def read_budget(text: str) -> float:
    """`2h`, `1h30m`, `45m`, `90s` as seconds."""
    found = _BUDGET.fullmatch(text.strip())
    try:
        parts = {unit: float(number) for unit, number in (found.groupdict() if found else {}).items() if number}
    except ValueError:
        parts = {}
    seconds = sum(number * {"h": 3600, "m": 60, "s": 1}[unit] for unit, number in parts.items())
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected --budget as 2h, 1h30m or 45m, got {text!r}")
    return seconds


def _tuned(
    recipe: str,
    cells: list[Cell],
    launch: Launch,
    factors: tuple[float, ...] | None,
    seeds: int,
    budget: float | None,
    *,
    asked: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """The fair form: the plan first, then rates, then fresh seeds, then the verdict."""
    from depthscope_lab.training import protocol as fair
    from depthscope_lab.training.plan import keep_plan, kept_plan, make_plan, request_of

    factors = factors or fair.FACTORS
    configs = fair.prepared([cell.config for cell in cells])
    wanted = fair.Protocol(1, factors, seeds=fair.fresh_seeds(seeds))  # refuses too few seeds or rates at once
    _check([fair.tuning(configs[0], wanted, configs[0].lr), *map(Cell, configs)], launch, writes=not dry_run)
    request = request_of(configs, launch, factors, seeds, budget)

    def planned() -> Plan:
        return make_plan(configs, launch, factors=factors, seeds=seeds, budget=budget, asked=asked)

    if dry_run:
        plan = kept_plan(launch.folder, configs, request) or planned()
        first = [fair.tuning(c, plan.protocol, fair.rounded(c.lr * f)) for c in configs for f in plan.protocol.factors]
        if as_json:
            found = {"dry_run": True, "recipe": recipe, "plan": runs_as_json(first, launch), **plan.as_json()}
            print_document("compare", found)
        else:
            show_plan(plan, launch, budget=budget, on_stderr=False)
            print("nothing was trained")
        return

    def run() -> dict[str, Any]:
        plan = kept_plan(launch.folder, configs, request)
        if plan is None:
            plan = planned()
            keep_plan(launch.folder, plan, request)
        show_plan(plan, launch, budget=budget, on_stderr=as_json)
        with show_bar(launch) as told:
            choices, results = fair.run_protocol(configs, plan.protocol, launch, told)
        return _summary(recipe, results, launch, plan=plan, choices=choices)

    _finish(run, launch, as_json)


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
    recipe: str, results: list[Result], launch: Launch, *, plan: Plan | None = None, choices: Any = ()
) -> dict[str, Any]:
    """Writes curves and summary, and gives the summary."""
    from depthscope_lab.training.comparison_results import curves, summarise

    frame = curves(results, launch)
    summary: dict[str, Any] = {
        "recipe": recipe,
        "runs": {result.cell.name: {"failed": result.failed, "stopped": result.stopped} for result in results},
        "cells": summarise(frame),
    }
    if plan is not None:
        from depthscope_lab.training.comparison_verdict import ranks, verdict_of, with_intervals

        rows = with_intervals(summary["cells"], frame)
        ranked = ranks(rows)
        summary["cells"] = [{**row, "rank": ranked[place]} for place, row in enumerate(rows)]
        summary |= {"choices": [choice.as_json() for choice in choices], "verdict": verdict_of(rows, choices)}
        summary |= plan.as_json()
    _write(launch.folder, frame, summary)
    add_report(launch.folder, "compare")
    return summary


def _variants(
    recipe: str, text: str, changes: dict[str, Any], launch: Launch, depths: Sequence[int] | None
) -> list[str]:
    """Those that are named; for `all`, what this recipe can build, and on stderr why not the others."""
    chosen = [name for name in split(text, ",") if name]
    if not chosen:
        raise ValueError(f"expected --variants to be some of {', '.join(RECIPES[recipe].variants)}, got {text!r}")
    if ALL in chosen:
        place = chosen.index(ALL)
        chosen[place : place + 1] = _buildable(recipe, changes, launch, min((4, *(depths or ()))))
    return list(dict.fromkeys(chosen))


def _buildable(recipe: str, changes: dict[str, Any], launch: Launch, depth: int) -> list[str]:
    """What can be built with so many blocks: with one there is no block that a first one could be brought into."""
    from depthscope_lab.training.estimate import require_fits

    found, left_out = [], {}
    for name in RECIPES[recipe].variants:
        try:
            require_fits(
                options.configured(recipe, name, changes).changed(depth=depth), cpu=bool(launch.options.get("cpu"))
            )
            found.append(name)
        except ValueError as error:
            left_out[name] = error
    if not found:  # the settings are to blame, not the variants
        raise ValueError(f"no variant of {recipe} can be built: {next(iter(left_out.values()))}")
    for name, reason in left_out.items():
        print(f"depthscope: {name} is left out: {reason}", file=sys.stderr)
    return found


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
    make_task(cells[0].config, launch.data, allow_incomplete=launch.allow_incomplete)


def _write(out: Path, frame: pd.DataFrame, summary: dict[str, Any]) -> None:
    """curves.parquet, curves.png, curves.pdf and summary.json, each whole or as it was."""
    from depthscope.drawing import draw_training_curves
    from depthscope.report.formats import ENDS
    from depthscope.sealed import with_record

    labels = {variant: label_of(variant) for variant in frame["variant"].unique()}
    figure = draw_training_curves(frame[~frame["quantity"].isin(ENDS)], labels)
    writers: dict[str, Callable[[Path], Any]] = {
        "curves.parquet": lambda path: frame.to_parquet(path, index=False),
        "curves.png": lambda path: figure.savefig(path, dpi=160),
        "curves.pdf": figure.savefig,
    }
    write_folder(out, with_record(writers, "summary.json", "comparison", 1, document("compare", summary)))
