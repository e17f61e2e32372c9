"""`depthscope fix MODEL`: what a remedy does to a model, before and after, and the line of Python that puts it in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.options import FixOptions
from depthscope.cli.reporting import call
from depthscope.cli.running import Finished, as_command, prepared
from depthscope.interruption import notes as of_interruption

if TYPE_CHECKING:
    from depthscope.diagnosis import Fixed


@as_command
def fix(options: FixOptions) -> Finished:
    """Rank what can be done about a collapse, show the first choice before and after, and print its line of code."""
    if options.level is not None and options.tau not in (None, "recommended"):
        raise ValueError(f"--level {options.level} chooses a τ; give it or --tau {options.tau}, not both")
    fixed = _fix(options)
    return Finished(
        document=lambda: as_json(fixed),
        show=lambda: _show(fixed, full=options.full),
        save=lambda folder: _save(fixed, folder),
        python=call("fix", "model, inputs", {**_wishes(options), **options.hints}, {}),
    )


def _wishes(options: FixOptions) -> dict[str, Any]:
    """What `Scope.fix` is asked for."""
    return {name: getattr(options, name) for name in ("tau", "level", "alpha", "at", "mixing")}


def _fix(options: FixOptions) -> Fixed:
    with prepared(options) as ready:
        fixed = ready.scope.fix(**_wishes(options), progress=lambda what: ready.progress(what, None), about=ready.about)
    seen = fixed.before.metadata.get("notes", [])
    notes = (*seen, *ready.loaded.notes, *ready.inputs.notes, *fixed.notes, *of_interruption())
    return replace(fixed, notes=notes)


def as_json(fixed: Fixed) -> dict[str, Any]:
    """What `--json` prints: curves and verdict before and after, the remedies and why."""
    from depthscope.remedies.record import to_dict

    found: dict[str, Any] = {
        "model": fixed.before.metadata["model"],
        "remedies": [to_dict(remedy) for remedy in fixed.remedies],
        "reason": fixed.recommendation.reason,
        "python": fixed.python,
        "choices": [choice.to_dict() for choice in fixed.choices],
        "loss": None if fixed.losses is None else dict(zip(("before", "after"), fixed.losses, strict=True)),
        "trained": fixed.trained,
        "notes": list(fixed.notes),
    }
    for when, profile, verdict in zip(("before", "after"), (fixed.before, fixed.after), fixed.verdicts, strict=True):
        curves = {name: profile.curve(name) for name in profile.names()}
        found[when] = {"profile": curves, "diagnosis": verdict.to_dict()}
    return found


def _show(fixed: Fixed, *, full: bool) -> None:
    from depthscope.cli.display import show
    from depthscope.cli.fix_display import notes_of, show_before_and_after
    from depthscope.diagnosis.summary import of_fix

    show(of_fix(fixed, notes_of(fixed)), full=full, rest="every block before and after")
    if full:
        show_before_and_after(fixed)


def _save(fixed: Fixed, folder: Path) -> None:
    """All of it or none: both profiles, the picture and what `--json` prints belong to one run."""
    from depthscope.cli.documents import document
    from depthscope.cli.fix_display import draw
    from depthscope.files import write_folder
    from depthscope.probing.saved import MADE_OF_A_PROFILE, writers
    from depthscope.sealed import with_record

    profiles = {"before": fixed.before, "after": fixed.after}
    files: dict[str, Callable[[Path], object]] = {
        f"{when}/{name}": write
        for when, profile in profiles.items()
        for name, write in writers(profile.frame, profile.sinks, profile.metadata).items()
    }
    files["fix.png"] = lambda path: draw(fixed).savefig(path, dpi=160)
    files = with_record(files, "fix.json", "fix", 1, document("fix", as_json(fixed)))
    write_folder(folder, files, obsolete=[f"{when}/{name}" for when in profiles for name in MADE_OF_A_PROFILE])
