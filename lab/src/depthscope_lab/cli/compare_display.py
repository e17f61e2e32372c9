"""What `compare` shows: a bar, the plan, the table, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.naming import counted, visible
from depthscope.progress import bar
from depthscope_lab.training.comparison import Cell, Launch, last_step

if TYPE_CHECKING:
    from depthscope.cli.console import Screen
    from depthscope_lab.training.plan import Plan

FILES = "curves.png, curves.pdf, curves.parquet, summary.json"


@contextmanager
def show_bar(launch: Launch) -> Iterator[Callable[[str, int, Sequence[Cell], int], None]]:
    """On stderr: what is being done, how many runs are done, and where the running ones stand."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with bar(*columns) as display:
        task = display.add_task("", total=None)

        def told(doing: str, done: int, running: Sequence[Cell], total: int) -> None:
            where = [doing] if doing else []
            for cell in running:
                row = last_step(cell, launch)
                where.append(f"{cell.name}: " + (f"step {row['step']}, loss {row['loss']:.3f}" if row else "starting"))
            display.update(task, completed=done, total=total, description="; ".join(where))

        yield told


def show_summary(summary: dict[str, Any], out: Path) -> None:
    """The table of a comparison; of a fair one also the verdict."""
    from depthscope.cli.console import Screen

    rows, console = summary["cells"], Screen()
    fair = "verdict" in summary
    grid = not fair and any(not row["best_lr"] for row in rows)
    edges = {_key(choice) for choice in summary.get("choices", []) if choice["edge"]}
    _show_cells(console, [_as_words(row, grid, fair, _key(row) in edges) for row in rows])
    if fair:
        console.print()
        console.say("loss: training loss over the last tenth of the steps; in brackets: bootstrap over the seeds, 95 %")
        if edges:
            console.say("! a rate at the edge of those that were tried")
        console.print()
        for sentence in summary["verdict"]:
            console.say(sentence)
    else:
        console.print("\nloss: training loss over the last tenth of the steps; ±: over the seeds", markup=False)
    if grid:
        console.print("* the learning rate with the least training loss", markup=False)
    for name, run in summary["runs"].items():
        if why := run["failed"] or run["stopped"]:
            console.print(f"{name}: {why}", markup=False)
    console.print(f"{FILES} and the runs are in {out}", markup=False, soft_wrap=True)


def show_plan(plan: Plan, launch: Launch, *, budget: float | None, on_stderr: bool) -> None:
    """What will be run and how long it takes, before it is."""
    from depthscope.cli.console import Screen

    console = Screen(stderr=on_stderr)
    for line in plan_in_words(plan, launch, budget):
        console.say(line)
    console.file.flush()


def plan_in_words(plan: Plan, launch: Launch, budget: float | None) -> list[str]:
    """The lines of a plan."""
    from depthscope_lab.training.plan import in_words

    protocol, count = plan.protocol, len(plan.configs)
    variants = list(dict.fromkeys(config.variant for config in plan.configs))
    depths = list(dict.fromkeys(config.depth for config in plan.configs))
    rates = ", ".join(f"×{factor:g}" for factor in protocol.factors)
    beyond = f"; where the best is at the edge, up to {protocol.more} more" if protocol.more else ""
    least, most = map(in_words, plan.seconds)
    speeds = ", ".join(f"{seconds:.2g} s at {depth}" for depth, seconds in sorted(plan.step_seconds.items()))
    time = f"about {least}" + (f", at most {most}" if most != least else "")
    first = plan.configs[0]
    return [
        f"{first.recipe}: {counted(len(variants), 'variant')} ({', '.join(variants)}), "
        f"{', '.join(map(str, depths))} block{'' if depths == [1] else 's'}; "
        f"each run {protocol.steps} steps, batch {first.batch_size}.",
        f"1. Choosing rates on validation data: {len(protocol.factors)} each ({rates} of its own), seed 0: "
        f"{count * len(protocol.factors)} runs{beyond}.",
        f"2. Measuring on test data: {len(protocol.seeds)} fresh seeds each at the chosen rate: "
        f"{count * len(protocol.seeds)} runs.",
        f"A step takes {speeds} block{'' if [*plan.step_seconds] == [1] else 's'}; "
        f"{counted(launch.jobs, 'run')} at a time.",
        *(f"{note[0].upper()}{note[1:]}." for note in plan.notes),
        f"In all {time}" + (f"; the budget is {in_words(budget)}." if budget is not None else "."),
    ]


def list_runs(cells: Sequence[Cell], launch: Launch) -> None:
    """The folders of what a dry run would train."""
    for cell in cells:
        print(visible(str(launch.run_folder(cell))))
    print(f"{counted(len(cells), 'run')}; nothing was trained")


def runs_as_json(cells: Sequence[Cell], launch: Launch) -> dict[str, Any]:
    """The same for JSON."""
    return {cell.name: {"folder": str(launch.run_folder(cell)), "config": cell.config.as_json()} for cell in cells}


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


def _as_words(row: dict[str, Any], grid: bool, fair: bool, edge: bool) -> dict[str, str]:
    """A cell of the comparison, by the headings of its columns; in a `grid` the best learning rate has a mark."""
    return {
        "variant": row["variant"],
        "blocks": str(row["depth"]),
        "lr": f"{row['lr']:g}" + (" *" if grid and row["best_lr"] else "") + (" !" if edge else ""),
        "warm-up": str(row["warmup_steps"]),
        "runs": ", ".join([str(row["runs"]), *(f"{row[end]} {end}" for end in ("failed", "stopped") if row[end])]),
    } | {name.replace("_", " "): _number(row, name, fair) for name in row if f"{name}_std" in row}


def _number(row: dict[str, Any], name: str, fair: bool) -> str:
    """With its interval, or its spread over the seeds."""
    if row[name] is None:
        return "–"
    low, high, spread = (row.get(f"{name}_{bound}") for bound in ("low", "high", "std"))
    if fair:
        return f"{row[name]:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None else "")
    return f"{row[name]:.3f}" + (f" ± {spread:.3f}" if spread is not None else "")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["variant"], row["depth"], row["warmup_steps"]
