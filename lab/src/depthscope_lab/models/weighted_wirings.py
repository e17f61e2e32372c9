"""Wirings that weigh trunk against branches: ReZero, LayerScale, 1/√L, LayerNorm scaling, DeepNorm, Admin, KEEL.

L is the depth of the stack, l the number of the block, N = 2L its sub-layers, F a sub-layer (attention or FFN). The
odds t_sim/t_div of new weights grow by about 1 + a² per sub-layer, with a the size of the branch over that of the
trunk: each of these makes a small. The stations of a branch show what is added, weight included.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.models.wiring import Norm, Wired, Wiring, run_pre_norm


def attention_branch(block: Any, x: Tensor, given: Any, norm: Norm | None = None) -> Tensor:
    """What attention gives, times the α of the block's configuration (1 unless it says otherwise)."""
    branch = block.attend(x, given, norm)
    return branch if block.alpha == 1 else block.alpha * branch


def norm_like(norm: nn.LayerNorm, bias: bool = True) -> nn.LayerNorm:
    """One more norm of the same width and ε."""
    return nn.LayerNorm(norm.normalized_shape, eps=norm.eps, bias=bias)


# x ← x + a·F(x)


def run_rezero(block: Any, x: Tensor, given: Any) -> Tensor:
    """ReZero (Bachlechner et al. 2020, arXiv:2003.04887): x + a·F(x) without norms.

    a is one number per block, learned, 0 at the start; attention and FFN share it, as in the authors' code.
    """
    at = block.stations
    x = at["input"](x)
    y = at["after_attention"](x + at["attention_branch"](block.weight * attention_branch(block, x, given)))
    z = at["after_ffn"](y + at["ffn_branch"](block.weight * block.ffn(block.enter_ffn(y, given))))
    return at["output"](z)


def prepare_rezero(block: Any) -> None:
    """a = 0, and no norms."""
    block.weight = nn.Parameter(block.norm1.weight.new_zeros(()))
    block.norm1, block.norm2 = nn.Identity(), nn.Identity()


def run_layer_scale(block: Any, x: Tensor, given: Any) -> Tensor:
    """LayerScale (Touvron et al. 2021, arXiv:2103.17239, eq. 3): x + g ⊙ F(LN x), g learned, one number per feature."""
    at = block.stations
    x = at["input"](x)
    y = at["after_attention"](x + at["attention_branch"](block.gain1 * attention_branch(block, x, given, block.norm1)))
    z = at["after_ffn"](y + at["ffn_branch"](block.gain2 * block.ffn(block.enter_ffn(block.norm2(y), given))))
    return at["output"](z)


def layer_scale_start(depth: int) -> float:
    """Where g starts: 0.1 up to 18 blocks, 10⁻⁵ up to 24, 10⁻⁶ beyond (the authors' choice)."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


def prepare_layer_scale(block: Any) -> None:
    """The two gains of a block."""
    start = torch.full_like(block.norm1.weight.detach(), layer_scale_start(block.depth))
    block.gain1, block.gain2 = nn.Parameter(start), nn.Parameter(start.clone())


class DividedNorm(nn.LayerNorm):
    """LN(x)/√l. Its keys in a state_dict are those of a LayerNorm."""

    divisor: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.divisor


def prepare_layer_norm_scaling(block: Any) -> None:
    """LayerNorm scaling (Sun et al. 2025, arXiv:2502.05795): pre-norm, x + F(LN(x)/√l)."""
    for name in ("norm1", "norm2"):
        given = getattr(block, name)
        norm = DividedNorm(given.normalized_shape, eps=given.eps)
        norm.load_state_dict(given.state_dict())
        norm.divisor = math.sqrt(block.number)
        setattr(block, name, norm)


# x ← LN(α·x + F(x))


def run_over_root_depth(block: Wired, x: Tensor, given: Any) -> Tensor:
    """Post-norm with both branches over √L (Noci et al. 2022, arXiv:2206.03126): LN(x + F(x)/√L)."""
    at, weight = block.stations, 1 / math.sqrt(block.depth)
    x = at["input"](x)
    y1 = at["after_attention"](x + at["attention_branch"](weight * attention_branch(block, x, given)))
    y2 = block.enter_ffn(block.norm1(y1), given)
    y3 = at["after_ffn"](y2 + at["ffn_branch"](weight * block.ffn(y2)))
    return at["output"](block.norm2(y3))


def deep_norm_constants(depth: int) -> tuple[float, float]:
    """DeepNorm's α = (2L)^¼ and β = (8L)^(−¼), for an encoder or a decoder alone (Wang et al. 2022, Fig. 2)."""
    return (2 * depth) ** 0.25, (8 * depth) ** -0.25


def run_deep_norm(block: Wired, x: Tensor, given: Any) -> Tensor:
    """DeepNorm (Wang et al. 2022, arXiv:2203.00555): LN(αx + F(x)), α = (2L)^¼.

    It is computed as LN(α(x + F(x)/α)), the same: the stations then show a trunk and a branch that add up.
    """
    at, (alpha, _) = block.stations, deep_norm_constants(block.depth)
    x = at["input"](x)
    y1 = at["after_attention"](x + at["attention_branch"](attention_branch(block, x, given) / alpha))
    y2 = block.enter_ffn(block.norm1(alpha * y1), given)
    y3 = at["after_ffn"](y2 + at["ffn_branch"](block.ffn(y2) / alpha))
    return at["output"](block.norm2(alpha * y3))


def prepare_deep_norm(block: Any) -> None:
    """The weights of W_V, W_O and the FFN, as they were drawn, times β; biases and W_q, W_k stay."""
    _, beta = deep_norm_constants(block.depth)
    scaled = [block.attention.value, block.attention.output, *block.ffn.modules()]
    with torch.no_grad():
        for linear in scaled:
            if isinstance(linear, nn.Linear):
                linear.weight.mul_(beta)


def admin_weight(depth: int) -> float:
    """Admin's ω in closed form, √((N + 1)/ln(N + 1) − 1) for N = 2L sub-layers, as the authors' code has it."""
    sublayers = 2 * depth
    return math.sqrt((sublayers + 1) / math.log(sublayers + 1) - 1)


def run_admin(block: Any, x: Tensor, given: Any) -> Tensor:
    """Admin (Liu et al. 2020, arXiv:2004.08249): LN(ω ⊙ x + F(x)), ω learned, one number per feature and sub-layer.

    The authors measure where ω starts in a pass over data, or take the closed form of `admin_weight`, which is used
    here: what a model is does not depend on a batch.
    """
    at = block.stations
    x = at["input"](x)
    y1 = at["after_attention"](block.omega1 * x + at["attention_branch"](attention_branch(block, x, given)))
    y2 = block.enter_ffn(block.norm1(y1), given)
    y3 = at["after_ffn"](block.omega2 * y2 + at["ffn_branch"](block.ffn(y2)))
    return at["output"](block.norm2(y3))


def prepare_admin(block: Any) -> None:
    """The two ω of a block."""
    start = torch.full_like(block.norm1.weight.detach(), admin_weight(block.depth))
    block.omega1, block.omega2 = nn.Parameter(start), nn.Parameter(start.clone())


def run_keel(block: Any, x: Tensor, given: Any) -> Tensor:
    """KEEL (Chen & Wei 2026, arXiv:2601.19895): LN(αx + F(LN x)), α = N = 2L; all norms without a bias.

    The first attention of the stack has no outer norm: x ← αx + F(LN x) there.
    """
    at, alpha = block.stations, 2 * block.depth
    x = at["input"](x)
    y = at["after_attention"](alpha * x + at["attention_branch"](attention_branch(block, x, given, block.norm1)))
    y = y if block.norm3 is None else block.norm3(y)
    z = at["after_ffn"](alpha * y + at["ffn_branch"](block.ffn(block.enter_ffn(block.norm2(y), given))))
    return at["output"](block.norm4(z))


def prepare_keel(block: Any) -> None:
    """Inner norms 1 and 2, outer norms 3 and 4."""
    given = block.norm1
    block.norm1, block.norm2, outer1, block.norm4 = (norm_like(given, bias=False) for _ in range(4))
    block.norm3 = None if block.number == 1 else outer1


rezero = Wiring("rezero", run_rezero, final_norm=False, placement="no", prepare=prepare_rezero, norms=())
layer_scale = Wiring("layer-scale", run_layer_scale, final_norm=True, placement="pre", prepare=prepare_layer_scale)
over_root_depth = Wiring("sqrt-depth", run_over_root_depth, final_norm=False, placement="post")
layer_norm_scaling = Wiring(
    "ln-scaling", run_pre_norm, final_norm=True, placement="pre", prepare=prepare_layer_norm_scaling
)
deep_norm = Wiring("deep-norm", run_deep_norm, final_norm=False, placement="post", prepare=prepare_deep_norm)
admin = Wiring("admin", run_admin, final_norm=False, prepare=prepare_admin)
keel = Wiring("keel", run_keel, final_norm=False, prepare=prepare_keel, norms=("norm1", "norm3", "norm2", "norm4"))

WIRINGS = (rezero, layer_scale, over_root_depth, layer_norm_scaling, deep_norm, admin, keel)
