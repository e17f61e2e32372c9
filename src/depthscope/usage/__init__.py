"""How much of its depth a model uses: branches, sinks, the logit lens, skipped blocks."""

from depthscope.usage.driver import depth_use
from depthscope.usage.result import DepthUse
from depthscope.usage.verdict import Finding

__all__ = ["DepthUse", "Finding", "depth_use"]
