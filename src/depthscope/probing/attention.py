"""Sees the attention of any model, fused or not, without switching its implementation.

A `TorchFunctionMode` sees `scaled_dot_product_attention` (its matrix is recomputed head by head from
query, key and mask, and thrown away) and the softmax of eager implementations. PyTorch's own
`nn.MultiheadAttention` hides its call inside `multi_head_attention_forward`, where modes do not reach:
the two functions are patched for the duration of that one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Head(NamedTuple):
    """One head: its attention matrix (batch, n, m), and which group of keys and values it reads."""

    number: int
    group: int
    matrix: Tensor


# Called with the heads one after the other, and the values (batch, groups, m, d_v), or None if not seen.
OnAttention = Callable[[Iterator[Head], Tensor | None], None]

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_fused = torch._C._nn.scaled_dot_product_attention


class AttentionListener(TorchFunctionMode):
    """While it is entered, reports every attention that `wanted(shape)` accepts, shape = (batch, h, n, m)."""

    def __init__(self, wanted: Callable[[tuple[int, ...]], bool], on_attention: OnAttention):
        super().__init__()
        self.wanted = wanted
        self.on_attention = on_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self._inside_multi_head_attention():
                return func(*args, **kwargs)
        if func is _fused:
            return self._see_fused(_fused, *args, **kwargs)
        if func in _SOFTMAX:
            return self._see_softmax(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _see_fused(self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = func(query, key, value, *args, **kwargs)
        shape = (*query.shape[:-1], key.shape[-2])
        if self.wanted(shape):
            self.on_attention(attention_by_head(query, key, *args, **kwargs), value)
        return output

    def _see_softmax(self, func: Any, scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = func(scores, *args, **kwargs)
        dim = args[0] if args else kwargs.get("dim", -1)
        if output.ndim == 4 and dim in (-1, 3) and self.wanted(tuple(output.shape)):
            self.on_attention((Head(h, h, output[:, h]) for h in range(output.shape[1])), None)
        return output

    @contextmanager
    def _inside_multi_head_attention(self) -> Iterator[None]:
        fused, plain = F.scaled_dot_product_attention, F.softmax  # somebody may have patched them before us

        def softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            output = plain(scores, *args, **kwargs)
            heads = self._heads_of(output)
            if heads is not None:  # (batch·h, n, m) when the weights are asked for
                by_head = output.unflatten(0, (-1, heads))
                if self.wanted(tuple(by_head.shape)):
                    self.on_attention((Head(h, h, by_head[:, h]) for h in range(heads)), None)
            return output

        F.scaled_dot_product_attention = partial(self._see_fused, fused)
        F.softmax = softmax  # type: ignore[assignment]
        try:
            yield
        finally:
            F.scaled_dot_product_attention = fused
            F.softmax = plain

    def _heads_of(self, output: Tensor) -> int | None:
        """Heads h such that (batch·h, n, m) is wanted as (batch, h, n, m)."""
        if output.ndim != 3:
            return None
        rows = output.shape[0]
        fits = (h for h in range(1, rows + 1) if rows % h == 0 and self.wanted((rows // h, h, *output.shape[1:])))
        return next(fits, None)


def attention_by_head(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Iterator[Head]:
    """P = softmax(QKᵀ·scale + mask), one head at a time.

    The signature is that of `scaled_dot_product_attention` without the values. Half precision is
    widened to float32. Rows that may attend to nothing are nan.
    """
    n, m = query.shape[-2], key.shape[-2]
    heads, groups = query.shape[-3], key.shape[-3]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    working = torch.promote_types(query.dtype, torch.float32)
    allowed = torch.ones(n, m, dtype=torch.bool, device=query.device).tril() if is_causal else None
    for head in range(heads):
        group = head * groups // heads
        q, k = query[..., head, :, :].to(working), key[..., group, :, :].to(working)
        scores = q @ k.mT * factor  # (batch, n, m)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        if attn_mask is not None:
            mask = attn_mask.expand(*query.shape[:-2], n, m)[..., head, :, :]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(working)
        yield Head(head, group, torch.softmax(scores, dim=-1))
