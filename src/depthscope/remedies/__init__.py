"""What can be done about a collapse: one file per remedy."""

from depthscope.remedies.deescalation import deescalate

__all__ = ["deescalate"]
