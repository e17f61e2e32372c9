"""A wiring: attention and FFN side by side."""

from typing import Any

from torch import Tensor

from depthscope.models import Wiring


def run_parallel(block: Any, x: Tensor, given: Any) -> Tensor:
    """x + attention(LN(x)) + FFN(LN(x))."""
    return x + block.attend(x, given, block.norm1) + block.ffn(block.norm2(x))


PARALLEL = Wiring("parallel", run_parallel, final_norm=True)
