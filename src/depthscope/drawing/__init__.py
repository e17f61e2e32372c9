"""Every picture of the house: one palette, small multiples, heat maps. Numbers in, a matplotlib figure out.

This room computes nothing but what a picture needs: a mean and a spread over seeds, the borders of cells. It needs
matplotlib (`pip install 'depthscope[figures]'`), and imports it on first use.
"""

from depthscope.drawing.by_block import Curve, ReferenceBand, draw_by_block
from depthscope.drawing.complex_plane import circle, draw_spectra
from depthscope.drawing.heat_map import colour_limits, draw_depth_use, draw_heat_map, paint_plane
from depthscope.drawing.palette import (
    AFTER,
    BEFORE,
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT_GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY,
    VARIANT_COLOURS,
    VERMILION,
    YELLOW,
)
from depthscope.drawing.panels import (
    band,
    block_axis,
    empty,
    label,
    legend_below,
    legend_inside,
    line_with_band,
    panels,
    second_axis,
    shared_legend,
    similarity_axis,
)
from depthscope.drawing.path_shares import draw_path_shares
from depthscope.drawing.training_curves import draw_training_curves

__all__ = [
    "AFTER",
    "BEFORE",
    "BLACK",
    "BLUE",
    "GREEN",
    "GREY",
    "LIGHT_GREY",
    "ORANGE",
    "PALETTE",
    "PURPLE",
    "SKY",
    "VARIANT_COLOURS",
    "VERMILION",
    "YELLOW",
    "Curve",
    "ReferenceBand",
    "band",
    "block_axis",
    "circle",
    "colour_limits",
    "draw_by_block",
    "draw_depth_use",
    "draw_heat_map",
    "draw_path_shares",
    "draw_spectra",
    "draw_training_curves",
    "empty",
    "label",
    "legend_below",
    "legend_inside",
    "line_with_band",
    "paint_plane",
    "panels",
    "second_axis",
    "shared_legend",
    "similarity_axis",
]
