"""Eigenvalues in the complex plane, a panel per block, and how they lie to the left and right of zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from depthscope.drawing.palette import BLUE, GREY, LIGHT_GREY, VERMILION
from depthscope.drawing.panels import LARGE, SMALL, label, panels, plain
from depthscope.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 10  # blocks: of a deeper model some are left out, evenly


def draw_spectra(
    by_block: Mapping[int, Sequence[complex]], shares: Mapping[int, Sequence[float]], *, title: str = ""
) -> Figure:
    """The share of negative eigenvalues by block, a histogram of all real parts, and the spectra one by one.

    `by_block` has the eigenvalues of a block, `shares` its negative share and after it those of its heads.
    """
    shown = evenly(sorted(by_block), _MOST)
    columns = min(4, len(shown) + 2)
    rows = -(-(len(shown) + 2) // columns)
    figure, axes = panels(columns, rows, width=3.0, height=2.7)
    _draw_shares(axes[0], shares)
    _draw_histogram(axes[1], by_block)
    for ax, block in zip(axes[2:], shown, strict=False):
        _draw_plane(ax, by_block[block], f"block {block}")
    for ax in axes[len(shown) + 2 :]:
        ax.set_axis_off()
    if title:
        figure.suptitle(plain(title), fontsize=LARGE + 1)
    return figure


def _draw_shares(ax: Any, shares: Mapping[int, Sequence[float]]) -> None:
    blocks = sorted(shares)
    ax.axhline(0.5, color=GREY, linewidth=0.8, linestyle="--")
    for block in blocks:
        ax.plot([block] * (len(shares[block]) - 1), shares[block][1:], ".", color=LIGHT_GREY, markersize=4)
    ax.plot(blocks, [shares[block][0] for block in blocks], ".-", color=BLUE, linewidth=1.4)
    ax.set_ylim(-0.02, 1.02)
    label(ax, "negative share (grey: heads)", "block", "")


def _draw_histogram(ax: Any, by_block: Mapping[int, Sequence[complex]]) -> None:
    """Real parts of all blocks, each by the largest modulus of its own block, so that no block hides the others."""
    parts = []
    for values in by_block.values():
        reach = max((abs(value) for value in values), default=0.0)
        parts += [value.real / reach for value in values if reach > 0]
    for colour, chosen in ((BLUE, [p for p in parts if p < 0]), (VERMILION, [p for p in parts if p >= 0])):
        ax.hist(chosen, bins=20, range=(-1, 0) if colour == BLUE else (0, 1), color=colour, alpha=0.8)
    ax.axvline(0, color=GREY, linewidth=0.8)
    label(ax, "all blocks: Re λ by the largest |λ|", "", "")


def _draw_plane(ax: Any, values: Sequence[complex], title: str) -> None:
    """Dots to the left of 0 push tokens apart, dots to the right pull them together."""
    for colour, chosen in (
        (BLUE, [value for value in values if value.real < 0]),
        (VERMILION, [value for value in values if value.real >= 0]),
    ):
        ax.plot([v.real for v in chosen], [v.imag for v in chosen], ".", color=colour, markersize=2.5, alpha=0.7)
    ax.axvline(0, color=GREY, linewidth=0.8)
    ax.set_title(plain(title), fontsize=SMALL + 1, loc="left")
    reach = 1.08 * max((abs(value) for value in values), default=1.0) or 1.0
    ax.set_xlim(-reach, reach)
    ax.set_ylim(-reach, reach)


def circle(ax: Any, centre: float, radius: float, *, colour: str, name: str) -> None:
    """A circle around a point of the real axis."""
    patches: Any = require("matplotlib.patches", "figures")
    ax.add_patch(patches.Circle((centre, 0), radius, fill=False, color=colour, linewidth=1.4, label=plain(name)))


def evenly(blocks: list[int], most: int) -> list[int]:
    """At most so many of them, the first and the last among them."""
    if len(blocks) <= most:
        return blocks
    return [blocks[round(place * (len(blocks) - 1) / (most - 1))] for place in range(most)]
