"""A model's output split into what came on attention paths of each length (Dong et al. 2021), exactly."""

from depthscope.attention_paths.driver import paths
from depthscope.attention_paths.shares import CONSTANT, PathShares

__all__ = ["CONSTANT", "PathShares", "paths"]
