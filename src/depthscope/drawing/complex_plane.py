"""Eigenvalues in the complex plane, a panel per block, and how they lie to the left and right of zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from depthscope.drawing.palette import BLUE, GREY, LIGHT_GREY, VERMILION
from depthscope.drawing.panels import label, panels, plain
from depthscope.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 10  # blocks: of a deeper model some are left out, evenly


def draw_spectra(
    by_block: Mapping[int, Sequence[complex]], shares: Mapping[int, Sequence[float]], *, title: str = ""
) -> Figure:
    """The share of negative eigenvalues by block, a histogram of all real parts, and the spectra one by one.

    `by_block` has the eigenvalues of a block, `shares` its negative share and after it those of its heads. Dots to the
    left of 0 push tokens apart, dots to the right pull them together.
    """
    shown = evenly(sorted(by_block), _MOST)
    columns = min(4, len(shown) + 2)
    figure, axes = panels(columns, -(-(len(shown) + 2) // columns), width=3.0, height=2.7, title=title)
    share, histogram, *planes = axes
    for block, (_, *heads) in shares.items():
        share.plot([block] * len(heads), heads, ".", color=LIGHT_GREY, markersize=4)
    blocks = sorted(shares)
    share.plot(blocks, [shares[block][0] for block in blocks], ".-", color=BLUE, linewidth=1.4)
    share.axhline(0.5, color=GREY, linewidth=0.8, linestyle="--")
    share.set_ylim(-0.02, 1.02)
    label(share, "negative share (grey: heads)", "block", "")
    spectra = {block: np.array(values, dtype=complex) for block, values in by_block.items()}
    reach = {block: float(np.abs(values).max(initial=0.0)) or 1.0 for block, values in spectra.items()}
    # Each block by its own largest modulus, so that no block hides the others.
    parts = np.concatenate(
        [np.zeros(0), *(spectra[block].real[spectra[block] != 0] / reach[block] for block in spectra)]
    )
    for colour, side, lie in ((BLUE, (-1, 0), np.less), (VERMILION, (0, 1), np.greater_equal)):
        histogram.hist(parts[lie(parts, 0)], bins=20, range=side, color=colour, alpha=0.8)
        for ax, block in zip(planes, shown, strict=False):
            chosen = spectra[block][lie(spectra[block].real, 0)]
            ax.plot(chosen.real, chosen.imag, ".", color=colour, markersize=2.5, alpha=0.7)
    for ax in (histogram, *planes):
        ax.axvline(0, color=GREY, linewidth=0.8)
    label(histogram, "all blocks: Re λ by the largest |λ|", "", "")
    for ax, block in zip(planes, shown, strict=False):
        label(ax, f"block {block}", "", "")
        ax.set_xlim(-1.08 * reach[block], 1.08 * reach[block])
        ax.set_ylim(-1.08 * reach[block], 1.08 * reach[block])
    for ax in planes[len(shown) :]:
        ax.set_axis_off()
    return figure


def circle(ax: Any, centre: float, radius: float, *, colour: str, name: str) -> None:
    """A circle around a point of the real axis."""
    patches: Any = require("matplotlib.patches", "figures")
    ax.add_patch(patches.Circle((centre, 0), radius, fill=False, color=colour, linewidth=1.4, label=plain(name)))


def evenly(blocks: list[int], most: int) -> list[int]:
    """At most so many of them, the first and the last among them."""
    if len(blocks) <= most:
        return blocks
    return [blocks[round(place * (len(blocks) - 1) / (most - 1))] for place in range(most)]
