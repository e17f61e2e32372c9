"""The rules of what multiplies by weights and adds a bias: linear maps, experts, norms with their scale frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from depthscope.decomposition.path_tensor import (
    Kind,
    NotFollowed,
    PathTensor,
    consumed,
    log_of,
    plain,
    product_of_tokens,
    tracks_of,
)
from depthscope.decomposition.tracks import Tracks
from depthscope.decomposition.weights import through_weights

Made = tuple[Callable[[], Any], Kind]


def linear(_func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    """XWᵀ and its bias, which is constant."""

    def take(x: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
        return x, weight, bias

    x, weight, bias = take(*args, **_renamed(kwargs))
    if isinstance(weight, PathTensor) or isinstance(bias, PathTensor):
        return product_of_tokens, ""

    def make() -> Tracks:
        whole = returned if bias is None else returned - bias.detach()
        return _with_bias(through_weights(tracks_of(x), weight.detach(), whole, log_of(x).left_over), bias)

    return make, ""


def _with_bias(new: Tracks, bias: Any) -> Tracks:
    return new if bias is None else new.with_constant(bias.detach())


def addmm(_func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    """XW and its bias."""
    bias, x, weight = args
    usual = kwargs.get("beta", 1) == kwargs.get("alpha", 1) == 1
    if isinstance(weight, PathTensor) or isinstance(bias, PathTensor) or not usual:
        return product_of_tokens, ""
    return lambda: _with_bias(tracks_of(x).map(lambda values: values @ weight.detach()), bias), ""


def grouped(_func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    """Rows (s, d) sorted by expert, each by the weights of its own (experts, d, d'): `offs` says where groups end."""

    def take(x: Any, weight: Any, offs: Any = None, bias: Any = None, **_: Any) -> tuple[Any, Any, Any, Any]:
        return x, weight, offs, bias

    x, weight, offs, bias = take(*args, **_renamed(kwargs))
    if isinstance(weight, PathTensor) or isinstance(bias, PathTensor):
        return product_of_tokens, ""
    if x.ndim != 2 or weight.ndim != 3 or offs is None or bias is not None:
        return _other_groups, ""

    def make() -> Tracks:
        ends = offs.tolist()
        starts = [0, *ends[:-1]]

        def by_expert(values: Tensor) -> Tensor:
            parts = [
                values[:, start:end] @ weight[expert].detach().to(values.dtype)
                for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
            ]
            beyond = values.new_zeros(len(values), values.shape[1] - ends[-1], weight.shape[-1])
            return torch.cat([*parts, beyond], dim=1)

        return tracks_of(x).map(by_expert)

    return make, ""


def _other_groups() -> Tracks:
    raise NotFollowed("paths are followed through 'grouped_mm' of rows (s, d) with weights for each group, no bias")


def layer_norm(_func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    """LN with its deviation frozen: (u − mean(u))·γ/σ₀, and β, which is constant."""

    def take(
        x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, **_: Any
    ) -> tuple[Any, list[int], Any, Any, float]:
        return x, list(normalized_shape), weight, bias, eps

    x, shape, weight, bias, eps = take(*args, **_renamed(kwargs))

    def make() -> Tracks:
        scale = torch.native_layer_norm(plain(x), shape, None, None, eps)[2]  # 1/σ₀
        scale = scale if weight is None else scale * weight.detach()
        axes = tuple(range(-len(shape), 0))

        def overwrite(values: Tensor) -> Tensor:
            return values.sub_(values.mean(dim=axes, keepdim=True)).mul_(scale)

        centred = consumed(x, overwrite, lambda values: (values - values.mean(dim=axes, keepdim=True)).mul_(scale))
        return _with_bias(centred, bias)

    return make, ""


def rms_norm(_func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    """u·γ/rms₀."""

    def take(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> tuple[Any, Any, Any, Any]:
        return x, tuple(range(-len(normalized_shape), 0)), weight, eps

    x, axes, weight, eps = take(*args, **_renamed(kwargs))

    def make() -> Tracks:
        u = plain(x)
        scale = (u.square().mean(dim=axes, keepdim=True) + (torch.finfo(u.dtype).eps if eps is None else eps)).rsqrt()
        scale = scale if weight is None else scale * weight.detach()
        return tracks_of(x).map(lambda values: values * scale)

    return make, ""


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {("x" if key == "input" else key): value for key, value in kwargs.items()}
