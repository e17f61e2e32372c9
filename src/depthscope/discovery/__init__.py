"""What is true of a model of no known family, found by trying: its blocks, its token axis, who sees whom."""

from depthscope.discovery.blocks import depth_of
from depthscope.discovery.causality import (
    are_apart,
    hidden_tokens_reach_others,
    is_causal,
    pieces_of,
    unpacked,
    with_sight,
)
from depthscope.discovery.hints import Hints, anatomy_with_hints, check_hints, refuse_tensor
from depthscope.discovery.masking import entrance_of, is_wrapped
from depthscope.discovery.token_axis import find_token_axis

__all__ = [
    "Hints",
    "anatomy_with_hints",
    "are_apart",
    "check_hints",
    "depth_of",
    "entrance_of",
    "find_token_axis",
    "hidden_tokens_reach_others",
    "is_causal",
    "is_wrapped",
    "pieces_of",
    "refuse_tensor",
    "unpacked",
    "with_sight",
]
