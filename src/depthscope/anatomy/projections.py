"""Projections per head, where three layers make queries, keys and values, or one, in the orders that there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from depthscope.anatomy.structure import Piece, Projections, Role, Spot

Roles = dict[Role, tuple[Piece, ...]]
Order = Literal["stacked", "interleaved"]
Split = Callable[[Tensor], tuple[Tensor, ...]]  # queries, keys and values among rows by head, (h + 2g, …)


class HiddenWeights(ValueError):
    """A layer that a wrapper, such as an adapter of one's own, stands in the place of: its matrix is not known. What
    its parameters are for is known all the same."""

    def __init__(self, layer: nn.Module, roles: Mapping[Role, tuple[Piece, ...]]):
        kind = type(layer).__name__
        advice = "merge the adapter into the weights, or give the wrapper a property `weight`"
        if ".quantized" in type(layer).__module__:
            kind, advice = f"a quantized {kind}", "take the model as it was before it was quantized"
        super().__init__(f"expected a linear layer with a weight, got {kind}: {advice}")
        self.roles, self.layer = roles, layer


def weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """What a linear layer multiplies by and adds, as it stores them; with an adapter around it (PEFT's LoRA and DoRA,
    not merged), W + Σ s·B A, the weight that is in force. Refuses a layer whose weight is not known."""
    base = getattr(layer, "base_layer", None)
    if base is None:
        weight: Any = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor):
            raise HiddenWeights(layer, {})
        if has_own_operations(weight) and not hasattr(weight, "device_mesh"):
            try:  # what is kept in another form (torchao's int8) stands for these numbers
                weight = weight.dequantize()
            except (NotImplementedError, RuntimeError, AttributeError):
                raise HiddenWeights(layer, {}) from None
        return weight, layer.bias  # type: ignore[return-value]
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
    roles: Roles = {"queries_keys": _pieces(query, key), "values_output": _pieces(value, output)}
    try:
        inwards = [weight_and_bias(layer) for layer in (query, key, value)]
        written, bias = (None, None) if output is None else weight_and_bias(output)
    except HiddenWeights as hidden:
        raise HiddenWeights(hidden.layer, roles) from None
    counted = list(zip(inwards, (heads, groups or heads, groups or heads), strict=True))
    weights = [_by_head(weight, own) for (weight, _), own in counted]
    biases = [None if bias is None else _by_head(bias, own) for (_, bias), own in counted]
    return _per_head(weights, biases, None if written is None else written.T, bias, heads, roles)


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
    read = [parameter for parameter in (weight, bias) if parameter is not None]
    written = [Piece(parameter) for parameter in (output, output_bias) if parameter is not None]

    def pieces(first: int, last: int) -> tuple[Piece, ...]:
        cut = partial(_cut_rows, rows=rows, split=split, first=first, last=last, columns=columns)
        return tuple(Piece(parameter, cut) for parameter in read)

    weights = split(_by_head(weight.T if columns else weight, rows))
    biases = (None, None, None) if bias is None else split(_by_head(bias, rows))
    roles: Roles = {"queries_keys": pieces(0, 2), "values_output": (*pieces(2, 3), *written)}
    return _per_head(weights, biases, output if columns else output.T, output_bias, heads, roles)


def _per_head(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    output: Tensor | None,
    output_bias: Tensor | None,
    heads: int,
    roles: Roles,
) -> Projections:
    """Of queries, keys and values by head or group, (h or g, k, d) and (h or g, k), and the output (h·k, d)."""
    q, k, v = (weight.repeat_interleave(heads // len(weight), dim=0).mT for weight in weights)
    b_q, b_k, b_v = (None if bias is None else bias.repeat_interleave(heads // len(bias), dim=0) for bias in biases)
    b_o = None if output_bias is None else output_bias.detach()
    return Projections(q, k, v, None if output is None else _by_head(output, heads), b_q, b_k, b_v, b_o, roles=roles)


def latent_projections(attention: Any) -> Projections:
    """DeepSeek's latent attention: one narrow projection, a norm, and keys and values of every head from what is left.

    The norm stands between the tokens and the values, so that there is no W_V of tokens: it acts on the normed latent.
    Queries and keys are two parts, one with a norm of its own and one that is rotated and shared: neither is a matrix.
    What the narrow projection makes for both keys and values has no one role.
    """
    heads, width = attention.config.num_attention_heads, attention.v_head_dim
    queries = [getattr(attention, name, None) for name in ("q_proj", "q_a_proj", "q_b_proj")]  # one, or narrow and wide
    layers: list[Any] = [attention.kv_b_proj, attention.kv_a_proj_with_mqa]
    own = [getattr(layer, "base_layer", layer) for layer in layers]  # without an adapter's
    both, narrow = ([p for p in (layer.weight, layer.bias) if p is not None] for layer in own)
    turned = attention.qk_rope_head_dim  # last rows of the narrow projection: a key that is rotated, and no value
    keys, values = (partial(_of_latent, heads=heads, width=width, values=which) for which in (False, True))
    shared, rotated = (partial(_ends, size=turned, last=last) for last in (False, True))
    output, output_bias = weight_and_bias(attention.o_proj)
    return Projections(
        query=None,
        key=None,
        value=_by_head(weight_and_bias(attention.kv_b_proj)[0], heads)[:, -width:].mT,  # of (h, k + v, rank)
        output=_by_head(output.T, heads),
        output_bias=None if output_bias is None else output_bias.detach(),
        latent=Spot(attention.kv_a_layernorm, "out"),
        roles={
            "queries_keys": (*_pieces(*queries), *(Piece(p, keys) for p in both), *(Piece(p, rotated) for p in narrow)),
            "values_output": (*(Piece(p, values) for p in both), *_pieces(attention.o_proj)),
            "other": tuple(Piece(p, shared) for p in narrow),
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


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Rows (h·k, …) → (h, k, …)."""
    return values.detach().unflatten(0, (heads, -1))
