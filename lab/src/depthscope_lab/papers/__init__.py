"""Published figures, recomputed: one folder per paper, one file per figure: compute, draw, claims."""

from depthscope_lab.papers.catalogue import STUDIES, Entry, load

__all__ = ["STUDIES", "Entry", "load"]
