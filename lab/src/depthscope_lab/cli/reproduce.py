"""`depthscope reproduce`: published figures recomputed, each claim with its verdict and its number."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthscope.cli.documents import print_document
from depthscope.cli.values import counted, folder
from depthscope.cli.values import data as data_folder
from depthscope.cli.values import seed as seed_of
from depthscope.exit_codes import ExitCode, code_of
from depthscope.extras import MissingExtra, require
from depthscope.files import require_writable
from depthscope.naming import unknown_name, visible
from depthscope.progress import Share, bar
from depthscope_lab.cli import completion
from depthscope_lab.papers import STUDIES

if TYPE_CHECKING:
    from depthscope.cli.console import Screen
    from depthscope_lab.papers.study import Claim, Study

ALL = "all"
_DEFAULT_OUT = Path("depthscope-studies")
_COLOURS = {"reproduced": "green", "not reproduced": "red", "not testable here": "yellow"}


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Studies, or all; without a name, they are listed.", autocompletion=completion.studies
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=folder, help="Where every study gets a folder.  [depthscope-studies]"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, in seconds; same claims where they fit.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 if a claim is not reproduced.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Compute also what is already there.")] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="N", parser=seed_of, help="Seed of weights and tokens.  [0]")
    ] = None,
    trials: Annotated[int | None, counted("Random trials, where a study has them.", least=2)] = None,
    scale: Annotated[
        str | None, typer.Option(help="paper: the paper's own size, for a study that trains; needs a GPU.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            parser=data_folder,
            help="Data for a study that trains: cifar-10-batches-bin, or a folder of WikiText.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Recompute the figures of the papers and judge their claims: reproduced, not reproduced, not testable here."""
    if not names:
        if any((out, quick, strict, again, scale, data)) or seed is not None or trials is not None:
            raise ValueError(f"expected a study, or {ALL}; `depthscope reproduce` alone lists them")
        _list(as_json)
        return
    chosen, place = _choose(names), out or _DEFAULT_OUT
    require("matplotlib.figure", "figures")  # every study draws: better now than after minutes of computing
    require_writable(place)
    console = _console(as_json)
    named = {name for name in names if name != ALL}
    found: dict[str, list[Claim]] = {}
    try:
        changes = {"trials": trials, "scale": scale, "data": data}
        configured = _configure(chosen, named, console, changes, quick=quick, seed=seed)
        for study, config in configured:
            with redirect_stdout(sys.stderr) if as_json else nullcontext():  # a library's prints are no JSON
                count = f"{len(found) + 1}/{len(chosen)}"
                found[study.name] = _run(study, config, place, again, count, console)
            if not as_json:
                _show(console, study.name, found[study.name])
    except KeyboardInterrupt as interrupt:
        there = f"{len(found)} of {len(chosen)} studies are in {visible(str(place))}"
        print(f"depthscope: interrupted; {there}, and the same command goes on from there", file=sys.stderr)
        sys.exit(code_of(interrupt))  # past the line that the program itself would print
    _write_pages(place, list(found))
    kept = "a folder per study with data, figure, config and claims"
    console.print(f"\nresults are in {place}: {kept}", markup=False, soft_wrap=True)
    if as_json:
        studies = {
            name: {"title": STUDIES[name].title, "claims": [asdict(claim) for claim in claims]}
            for name, claims in found.items()
        }
        print_document("reproduce", {"out": str(place), "studies": studies})
    failed = sum(claim.verdict == "not reproduced" for claims in found.values() for claim in claims)
    if strict and failed:
        print(f"depthscope: {failed} claim{'s' if failed > 1 else ''} not reproduced", file=sys.stderr)
        raise typer.Exit(ExitCode.GATE)


def _write_pages(place: Path, names: list[str]) -> None:
    """A page for every study, and an index of all that are in the folder."""
    from depthscope.cli.reporting import note_command, say_damaged, say_missing
    from depthscope.report import write_index

    for name in names:
        note_command(place / name, "reproduce", "")
    try:
        write_index(place, say=say_damaged)
    except MissingExtra as error:
        say_missing(error)


def _choose(names: list[str]) -> list[str]:
    """The names in the order given, each once; `all` is every study."""
    for name in names:
        if name != ALL and name not in STUDIES:
            raise unknown_name("study", name, STUDIES, f"{ALL} or some of", besides=[ALL])
    return list(dict.fromkeys(study for name in names for study in (STUDIES if name == ALL else [name])))


def _configure(
    names: list[str], named: set[str], console: Screen, changes: dict[str, Any], *, quick: bool, seed: int | None
) -> list[tuple[Study, Any]]:
    """Every study with its configuration, before the first is computed: a mistake costs no time.

    With --trials, --scale or --data, a study that has none keeps its own form and says so; if it was `named`, it
    refuses.
    """
    from depthscope_lab.papers import load
    from depthscope_lab.papers.study import configure

    configured: list[tuple[Study, Any]] = []
    without: dict[str, list[str]] = {}
    for name in names:
        study = load(name)
        known = {field.name for field in fields(study.full)} | ({"scale"} if study.scales else set())
        fitting = {}
        for change, value in changes.items():
            if value is not None and (name in named or change in known):
                fitting[change] = value
            elif value is not None:
                without.setdefault(change, []).append(name)
        configured.append((study, configure(study, quick=quick, seed=seed, **fitting)))
    for change, studies in without.items():
        console.print(f"--{change} does not concern {', '.join(studies)}, which have none", markup=False)
    return configured


def _run(study: Study, config: Any, out: Path, again: bool, count: str, console: Screen) -> list[Claim]:
    """The claims of a study, computed or, if the very same run is complete, read."""
    from depthscope_lab.papers.study import earlier, run

    there = earlier(study, config, out)
    if there.claims is not None and not again:
        same = "same configuration, code and data"
        console.print(f"\n{study.name}: already there, {same} (--again computes it anew)", markup=False)
        return there.claims
    reason = "--again was given" if there.claims is not None else there.refused
    if reason:
        what = "judged and drawn" if there.frame is not None and not again else "computed"
        console.print(f"\n{study.name}: {what} again: {reason}", markup=False, soft_wrap=True)
    computed: list[Claim] = []
    try:
        with _bar(f"{count} {study.name}") as progress:
            return run(study, config, out, progress, computed.extend, None if again else there.frame)
    except Exception:
        if computed:  # what was computed is not lost with what could not be drawn or written
            _show(console, study.name, computed)
        raise


@contextmanager
def _bar(description: str) -> Iterator[Share]:
    """A function that takes the share of the work done. The bar is on stderr, and only on a terminal."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with bar(*columns) as display:
        task = display.add_task(description, total=1.0)
        yield lambda share: display.update(task, completed=share)


def _console(as_json: bool) -> Screen:
    """Where people read: stdout, or stderr if stdout belongs to JSON."""
    from depthscope.cli.console import Screen

    return Screen(stderr=as_json)


def _list(as_json: bool) -> None:
    if as_json:
        available = {name: {"title": entry.title, "cost": entry.cost} for name, entry in STUDIES.items()}
        print_document("reproduce", {"available": available})
        return
    from rich.table import Table

    console = _console(as_json)
    table = Table("study", "what it shows", "full form", box=None, header_style="bold", pad_edge=False)
    for name, entry in STUDIES.items():
        table.add_row(name, entry.title, entry.cost)
    console.print(table)
    console.print("\ndepthscope reproduce NAME… (or all) computes them; --quick in seconds each.", markup=False)


def _show(console: Screen, name: str, claims: list[Claim]) -> None:
    """The table of claims, and how many of each verdict."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "claim", "paper", "ours", "verdict", box=None, header_style="bold", pad_edge=False, padding=(0, 2, 1, 0)
    )
    table.columns[3].no_wrap = True
    for claim in claims:
        ours = Text(console.legible(claim.ours))
        if claim.note:
            ours.append(console.legible(f"\n{claim.note}"), style="dim")
        verdict = Text(claim.verdict, style=_COLOURS[claim.verdict])
        table.add_row(*(Text(console.legible(said)) for said in (claim.claim, claim.paper)), ours, verdict)
    console.print(f"\n[bold]{name}[/bold]  {STUDIES[name].title}\n", markup=True)
    console.print(table)
    counted = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in _COLOURS}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counted.items() if count), markup=False)
