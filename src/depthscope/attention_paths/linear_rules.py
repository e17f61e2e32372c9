"""The rules of what multiplies by weights and adds a bias: linear maps, experts, norms with their scale frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.attention_paths.path_tensor import (
    TOLERANCE,
    Made,
    NotFollowed,
    PathTensor,
    consumed,
    given,
    log_of,
    plain,
    product_of_tokens,
    refused,
    terms_of,
)
from depthscope.attention_paths.terms import Terms

FEWEST = 4  # terms for which leaving one out is worth while
ROWS = 8  # of the term that is left over, which are computed to check it


def linear(_func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    """XWᵀ and its bias, which is constant."""

    x, weight, bias = given("input weight bias", args, kwargs)
    if isinstance(weight, PathTensor) or isinstance(bias, PathTensor):
        return product_of_tokens()

    def make() -> Terms:
        whole = returned if bias is None else returned - bias.detach()
        return _with_bias(through_weights(terms_of(x), weight.detach(), whole, log_of(x).left_over), bias)

    return make, ""


def through_weights(terms: Terms, weight: Tensor, whole: Tensor, left_over: int | None) -> Terms:
    """A_k Wᵀ of every term; `whole` is what the model computed, XWᵀ without its bias.

    Since Σ_k A_k = X, one of the products is known from the others: the one at `left_over`, the largest term, so that
    the rounding of the others is small beside it. Some of its rows are computed all the same: if they are not what is
    left over, that is refused.
    """
    values = terms.values
    count, width, made = len(values), weight.shape[1], weight.shape[0]
    known = whole.dtype == values.dtype == weight.dtype and values.dtype in TOLERANCE
    if left_over is None or count < FEWEST or not known or values.requires_grad:
        return terms.map(lambda each: F.linear(each, weight.to(each.dtype)))
    place = min(left_over, count - 1)
    entering, result = values.reshape(count, -1, width), values.new_empty(count, whole.numel() // made, made)
    rest = whole.reshape(-1, made).clone()
    for part in (slice(0, place), slice(place + 1, count)):
        if len(entering[part]):
            torch.mm(entering[part].flatten(0, 1), weight.T, out=result[part].view(-1, made))
            rest -= result[part].sum(dim=0)
    result[place] = rest
    rows = torch.linspace(0, len(rest) - 1, min(ROWS, len(rest)), device=rest.device).long()
    error = float((rest[rows] - entering[place, rows] @ weight.T).abs().amax())
    if not error <= TOLERANCE[values.dtype] * float(result[:, rows].abs().amax()):
        raise NotFollowed(f"'linear' does not add up: what is left of it is {error:.1e} from the term itself")
    return Terms(result.view(count, *whole.shape), terms.start)


def _with_bias(new: Terms, bias: Any) -> Terms:
    return new if bias is None else new.with_constant(bias.detach())


def addmm(_func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    """XW and its bias."""
    bias, x, weight = args
    usual = kwargs.get("beta", 1) == kwargs.get("alpha", 1) == 1
    if isinstance(weight, PathTensor) or isinstance(bias, PathTensor) or not usual:
        return product_of_tokens()
    return lambda: _with_bias(terms_of(x).map(lambda values: values @ weight.detach()), bias), ""


def grouped(_func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    """Rows (s, d) sorted by expert, each by the weights of its own (experts, d, d'): `offs` says where groups end."""

    x, weight, offs, bias = given("input weight offs bias", args, kwargs)
    if isinstance(weight, PathTensor) or isinstance(bias, PathTensor):
        return product_of_tokens()
    if x.ndim != 2 or weight.ndim != 3 or offs is None or bias is not None:
        return refused("paths are followed through 'grouped_mm' of rows (s, d) with weights for each group, no bias")

    def make() -> Terms:
        ends = offs.tolist()
        starts = [0, *ends[:-1]]

        def by_expert(values: Tensor) -> Tensor:
            parts = [
                values[:, start:end] @ weight[expert].detach().to(values.dtype)
                for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
            ]
            beyond = values.new_zeros(len(values), values.shape[1] - ends[-1], weight.shape[-1])
            return torch.cat([*parts, beyond], dim=1)

        return terms_of(x).map(by_expert)

    return make, ""


def layer_norm(_func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    """LN with its deviation frozen: (u − mean(u))·γ/σ₀, and β, which is constant."""

    x, shape, weight, bias, eps = given("input normalized_shape weight bias eps", args, kwargs)

    def make() -> Terms:
        scale = torch.native_layer_norm(plain(x), list(shape), None, None, 1e-5 if eps is None else eps)[2]  # 1/σ₀
        scale = scale if weight is None else scale * weight.detach()
        axes = tuple(range(-len(shape), 0))

        def overwrite(values: Tensor) -> Tensor:
            return values.sub_(values.mean(dim=axes, keepdim=True)).mul_(scale)

        centred = consumed(x, overwrite, lambda values: (values - values.mean(dim=axes, keepdim=True)).mul_(scale))
        return _with_bias(centred, bias)

    return make, ""


def rms_norm(_func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    """u·γ/rms₀."""

    x, shape, weight, eps = given("input normalized_shape weight eps", args, kwargs)

    def make() -> Terms:
        u, axes = plain(x), tuple(range(-len(shape), 0))
        scale = (u.square().mean(dim=axes, keepdim=True) + (torch.finfo(u.dtype).eps if eps is None else eps)).rsqrt()
        scale = scale if weight is None else scale * weight.detach()
        return terms_of(x).map(lambda values: values * scale)

    return make, ""
