"""A profile in a few lines of plain letters, for `print`: what was measured, and the first, middle and last block."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from depthscope.measures import MEASURES
from depthscope.naming import visible

if TYPE_CHECKING:
    from depthscope.probing.profile import Profile

KEY = (
    "token_similarity",
    "token_diversity",
    "cosine_similarity",
    "direction_similarity",
    "effective_rank",
    "largest_token_share",
    "frobenius_norm",
    "escalation_rate",
    "output_gradient",
    "queries_keys_gradient",
    "values_output_gradient",
)
_WIDTH = 80


def table_of(profile: Profile) -> str:
    """The headline, a row per key measure, and how many notes there are; at most 80 letters wide."""
    lines = [textwrap.fill(_headline(profile), _WIDTH)]
    station, names = _chosen(profile)
    blocks = sorted({0, profile.depth // 2, profile.depth})
    if names:
        lines.append(f"{'measure':<32}" + "".join(f"{f'block {block}':>12}" for block in blocks))
    for name in names:
        curve = profile.curve(name, station)
        lines.append(f"{name:<32}" + "".join(f"{_number(name, curve[block]):>12}" for block in blocks))
    if notes := profile.metadata.get("notes"):
        lines.append(f'{len(notes)} note{"s" if len(notes) > 1 else ""}: profile.metadata["notes"]')
    return visible("\n".join(lines))


def _headline(profile: Profile) -> str:
    known: dict[str, Any] = profile.metadata
    parts = [
        f"{profile.depth} blocks" + (f" of width {known['width']}" if known.get("width") else ""),
        "" if known.get("placement") in (None, "streams") else f"{known['placement']}-norm",
        f"{known['streams']['number']} streams" if known.get("streams") else "",
        "causal" if known.get("causal") else "",
        f"{known['samples']} x {known['tokens']} tokens" if known.get("samples") else "",
        f"{known['dtype']} on {known.get('device')}" if known.get("dtype") else "",
        f"without {' and '.join(known['without'])}" if known.get("without") else "",
    ]
    return f"{known.get('model') or 'model'}: {', '.join(part for part in parts if part)}"


def _chosen(profile: Profile) -> tuple[str, list[str]]:
    """The station, and its measures of note; attention's, if nothing was measured at the outputs."""
    station = "output" if profile.names("output") else "attention"
    there = profile.names(station)
    return station, [name for name in KEY if name in there] or there[: len(KEY)]


def _number(measure: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    share = measure in MEASURES and MEASURES[measure].is_share and measure != "token_diversity"
    plain = share or value == 0 or 1e-3 <= abs(value) < 1e3
    return f"{value:.3f}" if plain else f"{value:.2e}"
