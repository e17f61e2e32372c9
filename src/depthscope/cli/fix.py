"""`depthscope fix MODEL`: what a remedy does to a model, before and after, and the line of Python that puts it in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from depthscope.cli.options import FixOptions, as_command

if TYPE_CHECKING:
    from depthscope.diagnosis import Fixed

MOST_ALPHA = 1000  # a remedy makes α smaller than 1; beyond this half precision overflows within a few blocks


@as_command
def fix(options: FixOptions) -> None:
    """Rank what can be done about a collapse, show the first choice before and after, and print its line of code."""
    from depthscope.cli.documents import print_document
    from depthscope.cli.reporting import add_report, call
    from depthscope.cli.running import require_writable, say_where

    tau = chosen_tau(options)
    require_alpha(options)
    if options.out is not None:
        require_writable(options.out)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        fixed = _fix(options, tau)
    if options.json:
        print_document("fix", as_json(fixed))
    else:
        _show(fixed, full=options.full)
    if options.out is not None:  # shown first: a save that fails must not cost what was computed
        _save(fixed, options.out)
        asked = {name: getattr(options, name) for name in ("level", "alpha", "at", "mixing")}
        add_report(options.out, "fix", call("fix", "model, inputs", {"tau": tau, **asked, **options.hints}, {}))
        say_where(options.out, options.json)


def _show(fixed: Fixed, *, full: bool) -> None:
    from depthscope.cli.display import show
    from depthscope.cli.fix_display import notes_of, show_before_and_after
    from depthscope.diagnosis.summary import of_fix

    show(of_fix(fixed, notes_of(fixed)), full=full, rest="every block before and after")
    if full:
        show_before_and_after(fixed)


def chosen_tau(options: FixOptions) -> float | Literal["recommended"] | None:
    """The number, or "recommended"; None if no de-escalation was asked for."""
    if options.tau in (None, "recommended"):
        if options.level is not None and not 0 < options.level < 1:
            raise ValueError(f"expected --level between 0 and 1, got {options.level}")
        return "recommended" if options.tau else None
    if options.level is not None:
        raise ValueError(f"--level {options.level} chooses a τ; give it or --tau {options.tau}, not both")
    try:
        tau = float(options.tau)
    except ValueError:
        raise ValueError(f"expected --tau with a number in [0, 1] or recommended, got {options.tau!r}") from None
    if not 0 <= tau <= 1:
        raise ValueError(f"expected --tau in [0, 1], got {options.tau}")
    return tau


def require_alpha(options: FixOptions) -> None:
    """Refused before a model is built, also where no remedy will be put in."""
    if options.alpha is not None and not 0 <= options.alpha <= MOST_ALPHA:
        raise ValueError(f"expected --alpha in [0, {MOST_ALPHA}], got {options.alpha}: it weighs both branches")


def _fix(options: FixOptions, tau: float | Literal["recommended"] | None) -> Fixed:
    from dataclasses import replace

    from depthscope.cli.running import prepared, scope_on
    from depthscope.interruption import notes as of_interruption

    wishes: dict[str, Any] = {
        "level": options.level,
        "alpha": options.alpha,
        "at": options.at,
        "mixing": options.mixing,
    }
    with prepared(options) as (loaded, inputs, progress):
        fixed = scope_on(loaded, inputs, options).fix(
            tau=tau,
            doing=lambda what: progress(what, None),
            about={"model": options.model, "seed": options.seed, **inputs.metadata},
            **wishes,
        )
    seen = fixed.before.metadata.get("notes", [])
    return replace(fixed, notes=(*seen, *loaded.notes, *inputs.notes, *fixed.notes, *of_interruption()))


def as_json(fixed: Fixed) -> dict[str, Any]:
    """What `--json` prints: curves and verdict before and after, the remedies and why."""
    from depthscope.cli.running import finite
    from depthscope.remedies.record import to_dict

    whens = zip(("before", "after"), (fixed.before, fixed.after), fixed.verdicts, strict=True)
    return finite(
        {
            "model": fixed.before.metadata["model"],
            "remedies": [to_dict(remedy) for remedy in fixed.remedies],
            "reason": fixed.recommendation.reason,
            "python": fixed.python,
            "choices": [choice.to_dict() for choice in fixed.choices],
            "loss": None if fixed.losses is None else dict(zip(("before", "after"), fixed.losses, strict=True)),
            "trained": fixed.trained,
            "notes": list(fixed.notes),
        }
        | {
            when: {
                "profile": {name: profile.curve(name) for name in profile.names()},
                "diagnosis": verdict.to_dict(),
            }
            for when, profile, verdict in whens
        }
    )


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
