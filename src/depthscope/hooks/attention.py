"""Sees the attention of any model, fused or not, without switching its implementation.

A `TorchFunctionMode` sees `scaled_dot_product_attention` (each head is handed on as what its matrix is made of: query,
key and mask) and the softmax of eager implementations. PyTorch's own
`nn.MultiheadAttention` hides its call inside `multi_head_attention_forward`, where modes do not reach:
the two functions are patched for the duration of that one call; other threads that call them then are not heard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from depthscope.measures import AttentionOperator, DenseAttention, ScoredAttention
from depthscope.safety import undone


class Head(NamedTuple):
    """One head: its attention (batch, n, m), and which group of keys and values it reads."""

    number: int
    group: int
    attention: AttentionOperator
    complete: bool = True  # whether its rows sum to 1: a sink that is no token takes some of the weight
    scores: Tensor | None = None  # (batch, n, m), what an eager softmax read; of a fused one `attention` makes them
    among: int = 1  # how many heads there are


# Called with the heads one after the other, and the values (batch, groups, m, d_v), or None if not seen.
OnHeads = Callable[[Iterator[Head], Tensor | None], None]

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_fused = torch._C._nn.scaled_dot_product_attention


class AttentionListener(TorchFunctionMode):
    """While it is entered, reports every attention that `wanted(shape)` accepts, shape = (batch, h, n, m)."""

    def __init__(self, wanted: Callable[[tuple[int, ...]], bool], on_attention: OnHeads):
        super().__init__()
        self.wanted = wanted
        self.on_attention = on_attention
        self.thread = get_ident()

    def close(self) -> None:
        """Leaves the mode, if it was entered; with it go the modes that were entered after it."""
        while any(mode is self for mode in _get_current_function_mode_stack()):
            _pop_mode()

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
        if get_ident() == self.thread and self.wanted(shape):
            self.on_attention(attention_by_head(query, key, *args, **kwargs), value)
        return output

    def _see_softmax(self, func: Any, scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = func(scores, *args, **kwargs)
        dim = args[0] if args else kwargs.get("dim", -1)
        if output.ndim == 4 and dim in (-1, 3) and self.wanted(tuple(output.shape)):
            self.on_attention(_dense_heads(output, scores), None)
        return output

    @contextmanager
    def _inside_multi_head_attention(self) -> Iterator[None]:
        fused, plain = F.scaled_dot_product_attention, F.softmax  # somebody may have patched them before us

        def softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            output = plain(scores, *args, **kwargs)
            heads = self._heads_of(output) if get_ident() == self.thread else None
            if heads is not None:  # (batch·h, n, m) when the weights are asked for
                by_head = output.unflatten(0, (-1, heads))
                if self.wanted(tuple(by_head.shape)):
                    self.on_attention(_dense_heads(by_head, scores.unflatten(0, (-1, heads))), None)
            return output

        def unpatch() -> None:
            F.scaled_dot_product_attention, F.softmax = fused, plain

        with undone(unpatch):
            F.scaled_dot_product_attention = partial(self._see_fused, fused)
            F.softmax = softmax  # type: ignore[assignment]
            yield

    def _heads_of(self, output: Tensor) -> int | None:
        """Heads h such that (batch·h, n, m) is wanted as (batch, h, n, m)."""
        if output.ndim != 3:
            return None
        rows = output.shape[0]
        fits = (h for h in range(1, rows + 1) if rows % h == 0 and self.wanted((rows // h, h, *output.shape[1:])))
        return next(fits, None)


def _dense_heads(attention: Tensor, scores: Tensor) -> Iterator[Head]:
    """The heads of an eager softmax; both (batch, h, n, m)."""
    for head in range(attention.shape[1]):
        yield Head(head, head, DenseAttention(attention[:, head]), scores=scores[:, head], among=attention.shape[1])


def attention_by_head(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Iterator[Head]:
    """The heads of P = softmax(QKᵀ·scale + mask), one after the other.

    The signature is that of `scaled_dot_product_attention` without the values. Half precision is widened to float32.
    """
    n, m = query.shape[-2], key.shape[-2]
    heads, groups = query.shape[-3], key.shape[-3]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    working = torch.promote_types(query.dtype, torch.float32)
    for head in range(heads):
        group = head * groups // heads
        mask = None if attn_mask is None else attn_mask.expand(*query.shape[:-2], n, m)[..., head, :, :]
        q, k = query[..., head, :, :].to(working), key[..., group, :, :].to(working)
        yield Head(head, group, ScoredAttention(q, k, factor, mask, is_causal), among=heads)
