"""Projections per head where one layer makes queries, keys and values, in the orders that decoders have them in."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from depthscope.anatomy.structure import Projections, Spot


def stacked_projections(fused: nn.Linear, output: nn.Linear, heads: int, groups: int) -> Projections:
    """All queries, then all keys, then all values; `groups` < heads for grouped queries (Phi-3)."""
    rows = _rows(fused, heads + 2 * groups)  # (h + 2g, k, d)
    return _projections(*(part for row in rows for part in row.split([heads, groups, groups])), output=output)


def interleaved_projections(fused: nn.Linear, output: nn.Linear, heads: int, groups: int) -> Projections:
    """Group by group: the queries of its heads, its key, its value.

    With as many groups as heads that is query, key, value head by head (GPT-NeoX, Bloom); with one group it is
    multi-query attention (Falcon).
    """

    def split(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        by_group = rows.unflatten(0, (groups, heads // groups + 2))
        return by_group[:, :-2].flatten(0, 1), by_group[:, -2], by_group[:, -1]

    rows = _rows(fused, heads + 2 * groups)
    return _projections(*(part for row in rows for part in split(row)), output=output)


def latent_projections(attention: Any) -> Projections:
    """DeepSeek's latent attention: one narrow projection, a norm, and keys and values of every head from what is left.

    The norm stands between the tokens and the values, so that there is no W_V of tokens: it acts on the normed latent.
    Queries and keys are two parts, one with a norm of its own and one that is rotated and shared: neither is a matrix.
    """
    heads, width = attention.config.num_attention_heads, attention.v_head_dim
    (rows,) = _rows(attention.kv_b_proj, heads)  # (h, k + v, rank)
    return Projections(
        query=None,
        key=None,
        value=rows[:, -width:].mT,
        output=_output(attention.o_proj, heads),
        output_bias=_bias(attention.o_proj),
        latent=Spot(attention.kv_a_layernorm, "out"),
    )


def stacked_values(returned: Tensor, heads: int, groups: int) -> Tensor:
    """What `stacked_projections` calls values, of what the fused layer returns: (…, n, (h + 2g)·k) → (…, n, g·k)."""
    return returned.unflatten(-1, (heads + 2 * groups, -1))[..., -groups:, :].flatten(-2)


def interleaved_values(returned: Tensor, heads: int, groups: int) -> Tensor:
    """What `interleaved_projections` calls values: (…, n, (h + 2g)·k) → (…, n, g·k)."""
    return returned.unflatten(-1, (groups, heads // groups + 2, -1))[..., -1, :].flatten(-2)


def latent_values(returned: Tensor, heads: int, width: int) -> Tensor:
    """What `latent_projections` calls values: (batch, n, h·(k + v)) → (batch, n, h·v); an axis of one head may stand
    before n, since the narrow keys and values are shared by all."""
    one_head = returned.squeeze(1) if returned.ndim == 4 else returned
    return one_head.unflatten(-1, (heads, -1))[..., -width:].flatten(-2)


def _rows(layer: nn.Linear, heads: int) -> tuple[Tensor, ...]:
    """Weight (heads, k, d) and, if there is one, bias (heads, k), by head."""
    parts = (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)
    return tuple(part.detach().unflatten(0, (heads, -1)) for part in parts)


def _projections(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor, output: nn.Linear) -> Projections:
    """From rows by head, weights (h, k, d) and biases (h, k), with keys and values of fewer groups."""
    heads = q.shape[0]

    def repeated(part: Tensor) -> Tensor:
        return part.repeat_interleave(heads // part.shape[0], dim=0)

    b_q, b_k, b_v = map(repeated, biases) if biases else (None, None, None)
    values = repeated(v).mT
    return Projections(q.mT, repeated(k).mT, values, _output(output, heads), b_q, b_k, b_v, _bias(output))


def _output(layer: nn.Linear, heads: int) -> Tensor:
    return layer.weight.detach().T.unflatten(0, (heads, -1))  # (h, v, d)


def _bias(layer: nn.Linear) -> Tensor | None:
    return None if layer.bias is None else layer.bias.detach()
