"""The colours of the house: what a reader has learnt in one picture holds in the next."""

from __future__ import annotations

# Okabe & Ito 2008: distinguishable with every common colour blindness, and in grey by lightness.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#F0E442", "#000000"
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK)
GREY = "#777777"  # reference lines and what the paper says
LIGHT_GREY = "#CCCCCC"  # bands of reference, and cells without a value
GRID_GREY = "#DDDDDD"

HEAT = "viridis"  # the colour map of heat maps: from dark to bright with the value, also in grey

# What a model is: as it is or post-norm (it collapses), repaired or de-escalated, pre-norm.
VARIANT_COLOURS = {"post": VERMILION, "pre": BLUE, "deescalated": GREEN}
BEFORE, AFTER = VERMILION, GREEN
