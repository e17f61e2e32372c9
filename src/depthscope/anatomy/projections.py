"""Projections per head, where three layers make queries, keys and values, or one, in the orders that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from depthscope.anatomy.structure import Piece, Projections, Role, Spot

_LATENT_QUERIES = ("q_proj", "q_a_proj", "q_b_proj")  # one layer, or a narrow one and a wide one

Roles = dict[Role, tuple[Piece, ...]]
Order = Literal["stacked", "interleaved"]
Split = Callable[[Tensor], tuple[Tensor, ...]]  # queries, keys and values among rows by head, (h + 2g, …)


class HiddenWeights(ValueError):
    """A layer that a wrapper, such as an adapter of one's own, stands in the place of: its matrix is not known. What
    its parameters are for is known all the same."""

    def __init__(self, layer: nn.Module, roles: Mapping[Role, tuple[Piece, ...]]):
        kind, advice = (
            type(layer).__name__,
            "merge the adapter into the weights, or give the wrapper a property `weight`",
        )
        if ".quantized" in type(layer).__module__:
            kind, advice = f"a quantized {kind}", "take the model as it was before it was quantized"
        super().__init__(f"expected a linear layer with a weight, got {kind}: {advice}")
        self.roles, self.layer = roles, layer


def weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """What a linear layer multiplies by and adds, as it stores them; with an adapter around it (PEFT's LoRA and DoRA,
    not merged), W + Σ s·B A, the weight that is in force. Refuses a layer whose weight is not known."""
    base = getattr(layer, "base_layer", None)
    if base is None:
        if not isinstance(getattr(layer, "weight", None), Tensor):
            raise HiddenWeights(layer, {})
        return _with_numbers(layer, layer.weight), layer.bias  # type: ignore[arg-type,return-value]
    weight, bias = weight_and_bias(base)
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False):
        return weight, bias
    ours, theirs = getattr(layer, "lora_A", None), getattr(layer, "lora_B", None)
    if ours is None or theirs is None or not weight.is_floating_point():
        raise HiddenWeights(layer, {})
    turned = bool(getattr(layer, "fan_in_fan_out", False))  # stored (d, out), as in a Conv1D
    active = getattr(layer, "active_adapters", list(ours))
    for name in [adapter for adapter in active if adapter in ours]:
        down, up, scaling = ours[name], theirs[name], layer.scaling[name]  # type: ignore[index]
        whole = (weight.T if turned else weight).detach() + scaling * (up.weight @ down.weight).detach()
        magnitudes = getattr(layer, "lora_magnitude_vector", None)
        if magnitudes is not None and name in magnitudes:  # DoRA
            whole = (magnitudes[name].weight / whole.norm(dim=1)).detach().unsqueeze(1) * whole
        if getattr(up, "bias", None) is not None:
            bias = scaling * up.bias if bias is None else bias + scaling * up.bias
        weight = whole.T if turned else whole
    return weight, bias


def _with_numbers(layer: nn.Module, weight: Tensor) -> Tensor:
    """The weight; of one that is kept in another form (torchao's int8) what it stands for."""
    if not has_own_operations(weight) or hasattr(weight, "device_mesh"):
        return weight
    try:
        return weight.dequantize()
    except (NotImplementedError, RuntimeError, AttributeError):
        raise HiddenWeights(layer, {}) from None


def has_own_operations(weight: Tensor) -> bool:
    """Whether a tensor is of a class that says itself what it can do, which may be little more than a linear layer."""
    return bool(type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__)


def linear_projections(
    query: nn.Linear,
    key: nn.Linear,
    value: nn.Linear,
    output: nn.Linear | None,
    heads: int,
    groups: int | None = None,
) -> Projections:
    """Separate linear layers, the common layout; `groups` < heads for grouped queries."""
    groups = groups or heads
    roles: Roles = {"queries_keys": _pieces(query, key), "values_output": _pieces(value, output)}
    try:
        inwards = [weight_and_bias(layer) for layer in (query, key, value)]
        outwards = None if output is None else weight_and_bias(output)
    except HiddenWeights as hidden:
        raise HiddenWeights(hidden.layer, roles) from None
    counts = heads, groups, groups
    w_q, w_k, w_v = (
        _repeated(_by_head(weight, own).mT, heads) for (weight, _), own in zip(inwards, counts, strict=True)
    )
    b_q, b_k, b_v = (
        None if bias is None else _repeated(_by_head(bias, own), heads)
        for (_, bias), own in zip(inwards, counts, strict=True)
    )
    w_o, b_o = (None, None) if outwards is None else (_by_head(outwards[0].T, heads), _detached(outwards[1]))
    return Projections(w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, roles=roles)


def fused_projections(
    weight: Tensor,
    bias: Tensor | None,
    output: Tensor,
    output_bias: Tensor | None,
    heads: int,
    groups: int | None = None,
    order: Order = "stacked",
    *,
    columns: bool = False,
) -> Projections:
    """One layer for query, key and value: weight ((h + 2g)·k, d) and output (d, h·k), as nn.Linear stores them; with
    `columns` both are transposed, as in a Conv1D.

    `order` is that of the layer's rows: "stacked", all queries, then all keys, then all values; or "interleaved", group
    by group the queries of its heads, its key, its value. With as many groups as heads that is query, key, value head
    by head (GPT-NeoX, Bloom); with one group it is multi-query attention (Falcon).
    """
    groups = groups or heads
    rows, split = heads + 2 * groups, _split(order, heads, groups)
    own = (weight,) if bias is None else (weight, bias)

    def pieces(first: int, last: int) -> tuple[Piece, ...]:
        cut = partial(_cut_rows, rows=rows, split=split, first=first, last=last, columns=columns)
        return tuple(Piece(parameter, cut) for parameter in own)

    q, k, v = split(_by_head(weight.T if columns else weight, rows))
    biases = (None, None, None) if bias is None else split(_by_head(bias, rows))
    b_q, b_k, b_v = (None if part is None else _repeated(part, heads) for part in biases)
    writes = (Piece(output),) if output_bias is None else (Piece(output), Piece(output_bias))
    return Projections(
        q.mT,
        _repeated(k, heads).mT,
        _repeated(v, heads).mT,
        _by_head(output if columns else output.T, heads),
        b_q,
        b_k,
        b_v,
        _detached(output_bias),
        roles={"queries_keys": pieces(0, 2), "values_output": (*pieces(2, 3), *writes)},
    )


def latent_projections(attention: Any) -> Projections:
    """DeepSeek's latent attention: one narrow projection, a norm, and keys and values of every head from what is left.

    The norm stands between the tokens and the values, so that there is no W_V of tokens: it acts on the normed latent.
    Queries and keys are two parts, one with a norm of its own and one that is rotated and shared: neither is a matrix.
    What the narrow projection makes for both keys and values has no one role.
    """
    heads, width = attention.config.num_attention_heads, attention.v_head_dim
    queries = [layer for name in _LATENT_QUERIES if (layer := getattr(attention, name, None)) is not None]
    both, narrow = _own(attention.kv_b_proj), _own(attention.kv_a_proj_with_mqa)
    turned = attention.qk_rope_head_dim  # last rows of the narrow projection: a key that is rotated, and no value
    rows = _by_head(weight_and_bias(attention.kv_b_proj)[0], heads)  # (h, k + v, rank)
    output, output_bias = weight_and_bias(attention.o_proj)
    return Projections(
        query=None,
        key=None,
        value=rows[:, -width:].mT,
        output=_by_head(output.T, heads),
        output_bias=_detached(output_bias),
        latent=Spot(attention.kv_a_layernorm, "out"),
        roles={
            "queries_keys": (
                *_pieces(*queries),
                *(Piece(p, partial(_of_latent, heads=heads, width=width, values=False)) for p in both),
                *(Piece(p, partial(_ends, size=turned, last=True)) for p in narrow),
            ),
            "values_output": (
                *(Piece(p, partial(_of_latent, heads=heads, width=width, values=True)) for p in both),
                *_pieces(attention.o_proj),
            ),
            "other": tuple(Piece(p, partial(_ends, size=turned, last=False)) for p in narrow),
        },
    )


def fused_values(returned: Tensor, order: Order, heads: int, groups: int) -> Tensor:
    """What `fused_projections` calls values, of what the fused layer returns: (…, n, (h + 2g)·k) → (…, n, g·k)."""
    by_head = returned.unflatten(-1, (heads + 2 * groups, -1)).movedim(-2, 0)
    return _split(order, heads, groups)(by_head)[2].movedim(0, -2).flatten(-2)


def latent_values(returned: Tensor, heads: int, width: int) -> Tensor:
    """What `latent_projections` calls values: (batch, n, h·(k + v)) → (batch, n, h·v); an axis of one head may stand
    before n, since the narrow keys and values are shared by all."""
    one_head = returned.squeeze(1) if returned.ndim == 4 else returned
    return one_head.unflatten(-1, (heads, -1))[..., -width:].flatten(-2)


def _split(order: Order, heads: int, groups: int) -> Split:
    return partial(_interleaved if order == "interleaved" else _stacked, heads=heads, groups=groups)


def _stacked(rows: Tensor, heads: int, groups: int) -> tuple[Tensor, ...]:
    return rows.split([heads, groups, groups])


def _interleaved(rows: Tensor, heads: int, groups: int) -> tuple[Tensor, ...]:
    by_group = rows.unflatten(0, (groups, heads // groups + 2))
    return by_group[:, :-2].flatten(0, 1), by_group[:, -2], by_group[:, -1]


def _cut_rows(values: Tensor, rows: int, split: Split, first: int, last: int, columns: bool) -> tuple[Tensor, ...]:
    return split((values.T if columns and values.ndim == 2 else values).unflatten(0, (rows, -1)))[first:last]


def _of_latent(rows: Tensor, heads: int, width: int, values: bool) -> tuple[Tensor, ...]:
    by_head = rows.unflatten(0, (heads, -1))
    return (by_head[:, -width:],) if values else (by_head[:, :-width],)


def _ends(values: Tensor, size: int, last: bool) -> tuple[Tensor, ...]:
    cut = values.shape[0] - size
    return (values[cut:],) if last else (values[:cut],)


def _pieces(*layers: nn.Module | None) -> tuple[Piece, ...]:
    """All parameters of layers, also those that an adapter has put into them."""
    return tuple(Piece(parameter) for layer in layers if layer is not None for parameter in layer.parameters())


def _own(layer: nn.Module) -> tuple[Tensor, ...]:
    """The weight and the bias of a layer, without an adapter's."""
    own: Any = getattr(layer, "base_layer", layer)
    return (own.weight,) if own.bias is None else (own.weight, own.bias)


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Rows (h·k, …) → (h, k, …)."""
    return values.detach().unflatten(0, (heads, -1))


def _repeated(part: Tensor, heads: int) -> Tensor:
    """Of as many heads as there are of queries."""
    return part.repeat_interleave(heads // part.shape[0], dim=0)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()
