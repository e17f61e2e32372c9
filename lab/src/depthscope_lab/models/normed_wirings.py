"""Wirings that differ in where norms and skips stand: sandwich, Peri-LN, res-post, B2T, ResiDual, Mix-LN, HybridNorm.

F is a sub-layer (attention or FFN), L the depth of the stack.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from depthscope.models.wiring import Wiring, post_norm, pre_norm
from depthscope_lab.models.weighted_wirings import attention_branch, norm_like


def run_sandwich(block: Any, x: Tensor, given: Any) -> Tensor:
    """Sandwich-LN (Ding et al. 2021, arXiv:2105.13290): x + LN(F(LN x)).

    Peri-LN (Kim et al. 2025, arXiv:2502.02732) is the same with a norm of what enters the stack.
    """
    at = block.stations
    x = at["input"](x if block.entrance_norm is None else block.entrance_norm(x))
    y = at["after_attention"](x + at["attention_branch"](block.norm3(attention_branch(block, x, given, block.norm1))))
    z = at["after_ffn"](y + at["ffn_branch"](block.norm4(block.ffn(block.enter_ffn(block.norm2(y), given)))))
    return at["output"](z)


def prepare_sandwich(block: Any) -> None:
    """Norms 3 and 4 behind the branches."""
    block.norm3, block.norm4 = norm_like(block.norm1), norm_like(block.norm2)
    block.entrance_norm = None


def prepare_peri(block: Any) -> None:
    """The same, and a norm of what enters the first block, which in a model are the embeddings."""
    prepare_sandwich(block)
    if block.number == 1:
        block.entrance_norm = norm_like(block.norm1)


def run_res_post(block: Any, x: Tensor, given: Any) -> Tensor:
    """Res-post-norm (Liu et al. 2022, Swin V2, arXiv:2111.09883): x + LN(F(x))."""
    at = block.stations
    x = at["input"](x)
    y = at["after_attention"](x + at["attention_branch"](block.norm1(attention_branch(block, x, given))))
    z = at["after_ffn"](y + at["ffn_branch"](block.norm2(block.ffn(block.enter_ffn(y, given)))))
    return at["output"](z)


def run_b2t(block: Any, x: Tensor, given: Any) -> Tensor:
    """B2T (Takase et al. 2022, arXiv:2206.00330): h = LN(x + SA(x)), y = LN(x + h + FFN(h)).

    The bottom-to-top connection takes what enters a block past all its norms but the last.
    """
    at = block.stations
    x = at["input"](x)
    y1 = at["after_attention"](x + at["attention_branch"](attention_branch(block, x, given)))
    h = block.enter_ffn(block.norm1(y1), given)
    y3 = at["after_ffn"](x + h + at["ffn_branch"](block.ffn(h)))
    return at["output"](block.norm2(y3))


def run_residual_twice(block: Any, x: Tensor, given: Any, beside: Tensor) -> tuple[Tensor, Tensor]:
    """ResiDual (Xie et al. 2023, arXiv:2304.14802): x ← LN(x + F(x)), y ← y + F(x), at the end x + LN(y).

    y, the second stream, begins as what enters the stack. The stations show x, the stream that F reads.
    """
    at = block.stations
    x = at["input"](x)
    branch = at["attention_branch"](attention_branch(block, x, given))
    y1, beside = at["after_attention"](x + branch), beside + branch
    y2 = block.enter_ffn(block.norm1(y1), given)
    branch = at["ffn_branch"](block.ffn(y2))
    y3, beside = at["after_ffn"](y2 + branch), beside + branch
    return at["output"](block.norm2(y3)), beside


def prepare_mix(block: Any) -> None:
    """Mix-LN (Li et al. 2024, arXiv:2412.13795): the first quarter of the blocks post-norm, the others pre-norm."""
    block.wiring = post_norm if block.number <= block.depth // 4 else pre_norm


class NormedLinear(nn.Linear):
    """A linear layer and a norm of what it gives, in one. The keys of its weights are those of the linear layer."""

    def __init__(self, linear: nn.Linear, eps: float):
        with_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias=with_bias, device="meta")  # draws nothing
        self.weight, self.bias = linear.weight, linear.bias
        self.norm = nn.LayerNorm(linear.out_features, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def run_hybrid_norm(block: Any, x: Tensor, given: Any) -> Tensor:
    """HybridNorm (Zhuo et al. 2025, arXiv:2503.04598): x ← x + W_O·Attn(n(Q), n(K), n(V)); z = n(x), x ← z + FFN(z).

    The first block of the stack is pre-norm (the authors' HybridNorm*). The norms of queries, keys and values are
    over all heads side by side.
    """
    at = block.stations
    x = at["input"](x)
    y = at["after_attention"](x + at["attention_branch"](attention_branch(block, x, given)))
    z = block.enter_ffn(block.norm2(y), given)
    return at["output"](at["after_ffn"](z + at["ffn_branch"](block.ffn(z))))


def prepare_hybrid_norm(block: Any) -> None:
    """Norms of queries, keys and values in the place of the first norm; pre-norm in the first block."""
    if block.number == 1:
        block.wiring = pre_norm
        return
    for name in ("query", "key", "value"):
        setattr(block.attention, name, NormedLinear(getattr(block.attention, name), block.norm1.eps))
    block.norm1 = nn.Identity()


FOUR_NORMS = ("norm1", "norm3", "norm2", "norm4")
sandwich = Wiring(
    "sandwich", run_sandwich, final_norm=True, placement="sandwich", prepare=prepare_sandwich, norms=FOUR_NORMS
)
peri_norm = Wiring("peri", run_sandwich, final_norm=True, placement="sandwich", prepare=prepare_peri, norms=FOUR_NORMS)
res_post_norm = Wiring("res-post", run_res_post, final_norm=True, placement="branch")
b2t = Wiring("b2t", run_b2t, final_norm=False)
residual_twice = Wiring("resi-dual", run_residual_twice, final_norm=True, placement="post", second_stream=True)
mix_norm = Wiring("mix-ln", pre_norm.forward, final_norm=True, prepare=prepare_mix)
hybrid_norm = Wiring(
    "hybrid-norm", run_hybrid_norm, final_norm=True, placement="post", prepare=prepare_hybrid_norm, norms=("norm2",)
)

WIRINGS = (sandwich, peri_norm, res_post_norm, b2t, residual_twice, mix_norm, hybrid_norm)
