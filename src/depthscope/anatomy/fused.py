"""Projections per head where one layer makes queries, keys and values, in the orders that decoders have them in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from depthscope.anatomy.pieces import Piece, Role, pieces_of_layers
from depthscope.anatomy.structure import Projections, Spot

_LATENT_QUERIES = ("q_proj", "q_a_proj", "q_b_proj")  # one layer, or a narrow one and a wide one


def stacked_projections(fused: nn.Linear, output: nn.Linear, heads: int, groups: int) -> Projections:
    """All queries, then all keys, then all values; `groups` < heads for grouped queries (Phi-3)."""
    split = partial(_stacked, heads=heads, groups=groups)
    rows = _rows(fused, heads + 2 * groups)  # (h + 2g, k, d)
    made = _projections(*(part for row in rows for part in split(row)), output=output)
    return replace(made, roles=_roles(fused, output, heads + 2 * groups, split))


def interleaved_projections(fused: nn.Linear, output: nn.Linear, heads: int, groups: int) -> Projections:
    """Group by group: the queries of its heads, its key, its value.

    With as many groups as heads that is query, key, value head by head (GPT-NeoX, Bloom); with one group it is
    multi-query attention (Falcon).
    """

    split = partial(_interleaved, heads=heads, groups=groups)
    rows = _rows(fused, heads + 2 * groups)
    made = _projections(*(part for row in rows for part in split(row)), output=output)
    return replace(made, roles=_roles(fused, output, heads + 2 * groups, split))


def latent_projections(attention: Any) -> Projections:
    """DeepSeek's latent attention: one narrow projection, a norm, and keys and values of every head from what is left.

    The norm stands between the tokens and the values, so that there is no W_V of tokens: it acts on the normed latent.
    Queries and keys are two parts, one with a norm of its own and one that is rotated and shared: neither is a matrix.
    What the narrow projection makes for both keys and values has no one role.
    """
    heads, width = attention.config.num_attention_heads, attention.v_head_dim
    queries = [layer for name in _LATENT_QUERIES if (layer := getattr(attention, name, None)) is not None]
    both, narrow = parameters_of(attention.kv_b_proj), parameters_of(attention.kv_a_proj_with_mqa)
    turned = attention.qk_rope_head_dim  # last rows of the narrow projection: a key that is rotated, and no value
    (rows,) = _rows(attention.kv_b_proj, heads)  # (h, k + v, rank)
    return Projections(
        query=None,
        key=None,
        value=rows[:, -width:].mT,
        output=_output(attention.o_proj, heads),
        output_bias=_bias(attention.o_proj),
        latent=Spot(attention.kv_a_layernorm, "out"),
        roles={
            "queries_keys": (
                *pieces_of_layers(*queries),
                *(Piece(p, partial(_of_latent, heads=heads, width=width, values=False)) for p in both),
                *(Piece(p, partial(_ends, size=turned, last=True)) for p in narrow),
            ),
            "values_output": (
                *(Piece(p, partial(_of_latent, heads=heads, width=width, values=True)) for p in both),
                *pieces_of_layers(attention.o_proj),
            ),
            "other": tuple(Piece(p, partial(_ends, size=turned, last=False)) for p in narrow),
        },
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


def _stacked(rows: Tensor, heads: int, groups: int) -> tuple[Tensor, ...]:
    """Queries, keys and values among rows by head, (h + 2g, …)."""
    return rows.split([heads, groups, groups])


def _interleaved(rows: Tensor, heads: int, groups: int) -> tuple[Tensor, ...]:
    by_group = rows.unflatten(0, (groups, heads // groups + 2))
    return by_group[:, :-2].flatten(0, 1), by_group[:, -2], by_group[:, -1]


def _roles(
    fused: nn.Linear, output: nn.Linear, heads: int, split: Callable[[Tensor], tuple[Tensor, ...]]
) -> dict[Role, tuple[Piece, ...]]:
    def pieces(first: int, last: int) -> tuple[Piece, ...]:
        cut = partial(_split_rows, heads=heads, split=split, first=first, last=last)
        return tuple(Piece(parameter, cut) for parameter in parameters_of(fused))

    return {"queries_keys": pieces(0, 2), "values_output": (*pieces(2, 3), *pieces_of_layers(output))}


def _split_rows(
    values: Tensor, heads: int, split: Callable[[Tensor], tuple[Tensor, ...]], first: int, last: int
) -> tuple[Tensor, ...]:
    return split(values.unflatten(0, (heads, -1)))[first:last]


def _of_latent(rows: Tensor, heads: int, width: int, values: bool) -> tuple[Tensor, ...]:
    by_head = rows.unflatten(0, (heads, -1))
    return (by_head[:, -width:],) if values else (by_head[:, :-width],)


def _ends(values: Tensor, size: int, last: bool) -> tuple[Tensor, ...]:
    cut = values.shape[0] - size
    return (values[cut:],) if last else (values[:cut],)


def parameters_of(layer: nn.Linear) -> tuple[Tensor, ...]:
    """Weight and, if there is one, bias."""
    return (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)


def _rows(layer: nn.Linear, heads: int) -> tuple[Tensor, ...]:
    """Weight (heads, k, d) and, if there is one, bias (heads, k), by head."""
    return tuple(part.detach().unflatten(0, (heads, -1)) for part in parameters_of(layer))


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
