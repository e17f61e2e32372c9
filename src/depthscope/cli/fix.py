"""`depthscope fix MODEL`: what a remedy does to a model, before and after, and the line of Python that puts it in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.command import Finished, as_command, call, prepared
from depthscope.cli.options import FixOptions
from depthscope.interruption import notes as of_interruption

if TYPE_CHECKING:
    import pandas as pd

    from depthscope.diagnosis import Fixed

_SHOWN = ("token_similarity", "direction_similarity", "effective_rank")


@as_command
def fix(options: FixOptions) -> Finished:
    """Rank what can be done about a collapse, show the first choice before and after, and print its line of code."""
    from depthscope.diagnosis.summary import of_fix

    asked = {"tau": options.tau, "alpha": options.alpha}
    fixed = _fix(options, asked)
    return Finished(
        document=as_json(fixed),
        summary=of_fix(fixed, notes_of(fixed)),
        save=lambda folder: _save(fixed, folder),
        python=call("fix", "model, inputs", {**asked, **options.hints}),
        tables=tables(fixed),
    )


def _fix(options: FixOptions, asked: dict[str, Any]) -> Fixed:
    with prepared(options) as ready:
        fixed = ready.scope.fix(**asked, progress=lambda what: ready.progress(what, None), about=ready.about)
    seen = fixed.before.metadata.get("notes", [])
    return replace(fixed, notes=(*seen, *ready.loaded.notes, *ready.inputs.notes, *fixed.notes, *of_interruption()))


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


def notes_of(fixed: Fixed) -> list[str]:
    """What a reader must not miss."""
    found = []
    if fixed.trained and fixed.remedies:
        found.append("The weights are trained: put a remedy in and train on, it does not mend them by itself.")
    if fixed.losses is not None:
        before, after = fixed.losses
        found.append(f"loss on this text: {before:.4f} before, {after:.4f} after ({after - before:+.4f}).")
    if left_alone := getattr(fixed.remedies[0], "leave_alone", ()) if fixed.remedies else ():
        named = ", ".join(map(str, left_alone))
        found.append(f"left alone: token {named}, an outlier in most samples (an attention sink).")
    return found


def tables(fixed: Fixed) -> dict[str, pd.DataFrame]:
    """What `--full` adds: every choice with its line of code, and every block before and after."""
    import pandas as pd

    parts = []
    for part, (first, last) in fixed.before.parts.items():
        rows = {
            f"{name} {when}": profile.curve(name, part=part)
            for name in _SHOWN
            if name in fixed.before.names()
            for when, profile in (("before", fixed.before), ("after", fixed.after))
        }
        blocks = [f"{part} {block}" if part else str(block) for block in ("in", *range(first, last + 1))]
        parts.append(pd.DataFrame(rows, index=blocks))
    found = {"every block before and after": pd.concat(parts)}
    if fixed.choices:
        lines = pd.DataFrame({"line of code": {choice.name: choice.line or "" for choice in fixed.choices}})
        return {"every choice": lines, **found}
    return found


def _save(fixed: Fixed, folder: Path) -> None:
    """All of it or none: both profiles and what `--json` prints belong to one run."""
    from depthscope.cli.documents import document
    from depthscope.files import write_folder
    from depthscope.probing.saved import MADE_OF_A_PROFILE, writers
    from depthscope.sealed import with_record

    profiles = {"before": fixed.before, "after": fixed.after}
    files: dict[str, Callable[[Path], object]] = {
        f"{when}/{name}": write
        for when, profile in profiles.items()
        for name, write in writers(profile.frame, profile.sinks, profile.metadata).items()
    }
    files = with_record(files, "fix.json", "fix", 1, document("fix", as_json(fixed)))
    write_folder(
        folder, files, obsolete=["fix.png", *(f"{when}/{name}" for when in profiles for name in MADE_OF_A_PROFILE)]
    )
