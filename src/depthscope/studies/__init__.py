"""Published figures, recomputed: one folder per paper, one file per figure: compute, draw, claims."""

from depthscope.studies.catalogue import ENTRIES, Entry, load

__all__ = ["ENTRIES", "Entry", "load"]
