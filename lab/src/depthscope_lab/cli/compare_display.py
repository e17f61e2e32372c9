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
    from depthscope_lab.training.config import TrainingConfig
    from depthscope_lab.training.protocol import Protocol


@contextmanager
def show_bar(launch: Launch) -> Iterator[Callable[[str, int, Sequence[Cell], int], None]]:
    """On stderr: what is being done, how many runs are done, and where the running ones stand."""
    with bar() as display:
        task = display.add_task("", total=None)

        def show(doing: str, done: int, running: Sequence[Cell], total: int) -> None:
            where = [doing] if doing else []
            for cell in running:
                row = last_step(cell, launch)
                where.append(f"{cell.name}: " + (f"step {row['step']}, loss {row['loss']:.3f}" if row else "starting"))
            display.update(task, completed=done, total=total, description=f"{done}/{total} {'; '.join(where)}")

        yield show


def show_summary(summary: dict[str, Any], out: Path) -> None:
    """The table of a comparison; of a fair one also the verdict."""
    import pandas as pd

    from depthscope.cli.console import Screen
    from depthscope.cli.display import show_table

    rows, console, fair = summary["cells"], Screen(), "verdict" in summary
    grid = not fair and any(not row["best_lr"] for row in rows)
    place = ("variant", "depth", "warmup_steps")
    edges = [[choice[name] for name in place] for choice in summary.get("choices", []) if choice["edge"]]
    shown = []
    for row in rows:
        edge = [row[name] for name in place] in edges
        lr = f"{row['lr']:g}{' *' if grid and row['best_lr'] else ''}{' !' if edge else ''}"
        ends = [str(row["runs"]), *(f"{row[end]} {end}" for end in ("failed", "stopped") if row[end])]
        about = {"variant": row["variant"], "blocks": row["depth"], "lr": lr, "warm-up": row["warmup_steps"]}
        numbers = {name.replace("_", " "): _number(row, name, fair) for name in row if f"{name}_std" in row}
        shown.append(about | {"runs": ", ".join(ends)} | numbers)
    show_table(pd.DataFrame(shown))
    spread = "in brackets: the least and the greatest of the seeds" if fair else "±: over the seeds"
    console.say(f"loss: training loss over the last tenth of the steps; {spread}")
    if edges:
        console.say("! a rate at the edge of those that were tried")
    if grid:
        console.say("* the learning rate with the least training loss")
    for sentence in summary.get("verdict", ()):
        console.say(sentence)
    for name, run in summary["runs"].items():
        if why := run["failed"] or run["stopped"]:
            console.say(f"{name}: {why}")
    console.print(f"curves.png, curves.parquet, summary.json and the runs are in {out}", soft_wrap=True)


def _number(row: dict[str, Any], name: str, fair: bool) -> str:
    """With its range, or its spread, over the seeds."""
    if row[name] is None:
        return "–"
    low, high, spread = (row[f"{name}_{bound}"] for bound in ("low", "high", "std"))
    if fair:
        return f"{row[name]:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None else "")
    return f"{row[name]:.3f}" + (f" ± {spread:.3f}" if spread is not None else "")


def show_plan(configs: Sequence[TrainingConfig], protocol: Protocol, launch: Launch, *, on_stderr: bool) -> None:
    """What will be run, before it is."""
    from depthscope.cli.console import Screen

    first, count = configs[0], len(configs)
    variants = list(dict.fromkeys(config.variant for config in configs))
    depths = list(dict.fromkeys(config.depth for config in configs))
    rates = ", ".join(f"×{factor:g}" for factor in protocol.factors)
    beyond = f"; where the best is at the edge, up to {protocol.more} more" if protocol.more else ""
    console = Screen(stderr=on_stderr)
    for line in (
        f"{first.recipe}: {counted(len(variants), 'variant')} ({', '.join(variants)}), "
        f"{', '.join(map(str, depths))} block{'' if depths == [1] else 's'}; "
        f"each run {protocol.steps} steps, batch {first.batch_size}; {counted(launch.jobs, 'run')} at a time.",
        f"1. Choosing rates on validation data: {len(protocol.factors)} each ({rates} of its own), seed 0: "
        f"{count * len(protocol.factors)} runs{beyond}.",
        f"2. Measuring on test data: {len(protocol.seeds)} fresh seeds each at the chosen rate: "
        f"{count * len(protocol.seeds)} runs.",
    ):
        console.say(line)
    console.file.flush()


def list_runs(cells: Sequence[Cell], launch: Launch) -> None:
    """The folders of what a dry run would train."""
    for cell in cells:
        print(visible(str(launch.run_folder(cell))))
    print(f"{counted(len(cells), 'run')}; nothing was trained")


def runs_as_json(cells: Sequence[Cell], launch: Launch) -> dict[str, Any]:
    """The same for JSON."""
    return {cell.name: {"folder": str(launch.run_folder(cell)), "config": cell.config.as_json()} for cell in cells}
