"""`depthscope reproduce`: published figures recomputed, each claim with its verdict and its number."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthscope.cli.completion import beginning
from depthscope.cli.documents import print_document
from depthscope.cli.values import counted, data, folder
from depthscope.exit_codes import ExitCode, code_of
from depthscope.extras import MissingExtra, require
from depthscope.files import require_writable
from depthscope.naming import unknown_name, visible
from depthscope.progress import bar
from depthscope_lab.papers import STUDIES

if TYPE_CHECKING:
    from depthscope.cli.console import Screen
    from depthscope_lab.papers.study import Claim, Study

ALL = "all"
_COLOURS = {"reproduced": "green", "not reproduced": "red", "not testable here": "yellow"}


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Studies, or all; without a name, they are listed.",
            autocompletion=lambda incomplete: beginning([*STUDIES.ours(), ALL], incomplete),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=folder, help="Where every study gets a folder.  [depthscope-studies]"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, in seconds; same claims where they fit.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 if a claim is not reproduced.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Compute also what is already there.")] = False,
    seed: Annotated[int | None, counted("Seed of weights and tokens.  [0]", least=0)] = None,
    trials: Annotated[int | None, counted("Random trials, where a study has them.", least=2)] = None,
    scale: Annotated[str | None, typer.Option(help="paper: the paper's own size, for a study that trains.")] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", parser=data, help="Data for a study that trains: CIFAR-10, WikiText.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Recompute the figures of the papers and judge their claims: reproduced, not reproduced, not testable here."""
    from depthscope.cli.console import Screen

    console = Screen(stderr=as_json)  # stdout belongs to JSON
    if not names:
        if any((out, quick, strict, again, scale, data)) or seed is not None or trials is not None:
            raise ValueError(f"expected a study, or {ALL}; `depthscope reproduce` alone lists them")
        if as_json:
            listed = {name: {"title": entry.title, "cost": entry.cost} for name, entry in STUDIES.items()}
            print_document("reproduce", {"available": listed})
            return
        rows = [(name, entry.title, entry.cost) for name, entry in STUDIES.items()]
        console.show_rows(("study", "what it shows", "full form"), rows)
        console.print("depthscope reproduce NAME… (or all) computes them; --quick in seconds each.")
        return
    for name in names:
        if name != ALL and name not in STUDIES:
            raise unknown_name("study", name, STUDIES, f"{ALL} or some of", besides=[ALL])
    place = out or Path("depthscope-studies")
    require("matplotlib.figure", "figures")  # every study draws: better now than after minutes of computing
    require_writable(place)
    changes = {"trials": trials, "scale": scale, "data": data}
    configured = _configure(names, console, changes, quick=quick, seed=seed)
    found: dict[str, list[Claim]] = {}
    try:
        for study, config in configured:
            count = f"{len(found) + 1}/{len(configured)}"
            with redirect_stdout(sys.stderr) if as_json else nullcontext():  # a library's prints are no JSON
                found[study.name] = _run(study, config, place, again, count, console)
            if not as_json:
                _show(console, study.name, found[study.name])
    except KeyboardInterrupt as interrupt:
        there = f"{len(found)} of {len(configured)} studies are in {visible(str(place))}"
        print(f"depthscope: interrupted; {there}, and the same command goes on from there", file=sys.stderr)
        sys.exit(code_of(interrupt))  # past the line that the program itself would print
    _write_pages(place, list(found))
    console.print(f"results are in {place}: a folder per study with data, figure, config and claims", soft_wrap=True)
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


def _configure(
    names: list[str], console: Screen, changes: dict[str, Any], *, quick: bool, seed: int | None
) -> list[tuple[Study, Any]]:
    """Every study with its configuration, each once, before the first is computed: a mistake costs no time.

    With --trials, --scale or --data, a study that has none keeps its own form and says so; if it was named, it refuses.
    """
    from depthscope_lab.papers import load
    from depthscope_lab.papers.study import configure

    configured: list[tuple[Study, Any]] = []
    without: dict[str, list[str]] = {}
    for name in dict.fromkeys(study for asked in names for study in (STUDIES if asked == ALL else [asked])):
        study = load(name)
        known = {field.name for field in fields(study.full)} | ({"scale"} if study.scales else set())
        asked = {change: value for change, value in changes.items() if value is not None}
        for change in asked.keys() - known if name not in names else ():
            without.setdefault(change, []).append(name)
            del asked[change]
        configured.append((study, configure(study, quick=quick, seed=seed, **asked)))
    for change, studies in without.items():
        console.print(f"--{change} does not concern {', '.join(studies)}, which have none")
    return configured


def _run(study: Study, config: Any, out: Path, again: bool, count: str, console: Screen) -> list[Claim]:
    """The claims of a study, computed or, if the very same run is complete, read."""
    from depthscope_lab.papers.study import earlier, run

    there = earlier(study, config, out)
    if there.claims is not None and not again:
        same = "same configuration, code and data"
        console.print(f"\n{study.name}: already there, {same} (--again computes it anew)")
        return there.claims
    if reason := "--again was given" if there.claims is not None else there.refused:
        console.print(f"\n{study.name}: computed again: {reason}", soft_wrap=True)
    computed: list[Claim] = []
    try:
        with bar() as display:
            task = display.add_task(f"{count} {study.name}", total=1.0)
            return run(study, config, out, lambda share: display.update(task, completed=share), computed.extend)
    except Exception:
        if computed:  # what was computed is not lost with what could not be drawn or written
            _show(console, study.name, computed)
        raise


def _show(console: Screen, name: str, claims: list[Claim]) -> None:
    """The table of claims, and how many of each verdict."""
    from rich.table import Column

    rows = []
    for claim in claims:
        ours = f"{claim.ours}\n{claim.note}" if claim.note else claim.ours
        rows.append((claim.claim, claim.paper, ours, claim.verdict))
    console.print()
    console.say(f"{name}  {STUDIES[name].title}", styles={name: "bold"})
    console.print()
    console.show_rows(("claim", "paper", "ours", Column("verdict", no_wrap=True)), rows, padding=(0, 2, 1, 0))
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in _COLOURS}
    console.say(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count), styles=_COLOURS)


def _write_pages(place: Path, names: list[str]) -> None:
    """A page with every claim of all studies that are in the folder."""
    from depthscope.cli.command import note_command, say_damaged
    from depthscope.report import write

    for name in names:
        note_command(place / name, "reproduce")
    try:
        write(place, place, say=say_damaged)
    except MissingExtra as error:
        print(f"depthscope: no report.html: {visible(str(error))}", file=sys.stderr)
