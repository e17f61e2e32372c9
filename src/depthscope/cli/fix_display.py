"""`fix`: what `--full` adds, and the picture of before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from depthscope.cli.display import format_value, show_table

if TYPE_CHECKING:
    from depthscope.diagnosis import Fixed

MEASURES = ("token_similarity", "direction_similarity", "effective_rank")
NEEDS_TRAINING = "The weights are trained: put a remedy in and train on, it does not mend them by itself"


def notes_of(fixed: Fixed) -> list[str]:
    """What a reader must not miss."""
    found = [f"{NEEDS_TRAINING}."] if fixed.trained and fixed.remedies else []
    if fixed.losses is not None:
        before, after = fixed.losses
        found.append(f"loss on this text: {before:.4f} before, {after:.4f} after ({after - before:+.4f}).")
    spared = getattr(fixed.remedies[0], "leave_alone", ()) if fixed.remedies else ()
    if spared:
        named = ", ".join(map(str, spared))
        found.append(f"left alone: token {named}, an outlier in most samples (an attention sink).")
    return found


def show_before_and_after(fixed: Fixed) -> None:
    """Every choice with its line of code, and every block before and after."""
    show_table(["choice", "line of code"], [[c.name, c.line or ""] for c in fixed.choices], words=(0, 1))
    names, rows = _names(fixed), []
    for part, (first, last) in fixed.before.parts.items():
        curves = [profile.curve(name, part=part) for name in names for profile in (fixed.before, fixed.after)]
        for place in range(last - first + 2):
            label = f"{part} {first - 1 + place if place else 'in'}" if part else str(place)
            rows.append([label, *(format_value("", curve[place]) for curve in curves)])
    headings = [f"{name.replace('_', chr(10), 1)}\n{when}" for name in names for when in ("before", "after")]
    show_table(["block", *headings], rows)


def draw(fixed: Fixed) -> Any:
    """A matplotlib figure: a panel per measure, before and after."""
    from depthscope.drawing import AFTER, BEFORE, Curve, draw_by_block

    shown = (("before", fixed.before, BEFORE), ("after", fixed.after, AFTER))
    curves = {
        name: [
            Curve(range(first - 1, last + 1), profile.curve(name, part=part), colour, when if first == 1 else None)
            for when, profile, colour in shown
            for part, (first, last) in profile.parts.items()
        ]
        for name in _names(fixed)
    }
    put_in = str(fixed.recommendation.line).partition("(model, ")[2].removesuffix(")")
    return draw_by_block(
        curves, title=f"{fixed.before.metadata.get('model', '')}, {fixed.before.depth} blocks: {put_in}"
    )


def _names(fixed: Fixed) -> list[str]:
    return [name for name in MEASURES if name in fixed.before.names()]
