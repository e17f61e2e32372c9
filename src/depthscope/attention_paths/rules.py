"""What becomes of the paths of a tensor in the functions of PyTorch that Transformers are made of: one table.

A rule says of a call how the terms of its result are made of those of its arguments, when somebody asks for them, and
what the result stands for in a product (`Kind`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.attention_paths import attention_rules
from depthscope.attention_paths.path_tensor import (
    PRODUCT,
    Call,
    Kind,
    NotFollowed,
    PathTensor,
    paths_in,
    plain,
    terms_of,
)
from depthscope.attention_paths.terms import Terms, added, together, with_axes

ROUNDINGS = 64  # in a row that may add up in one direction, as in a norm


class Rule(NamedTuple):
    """How terms are made, or a NotFollowed; and the kind of the result."""

    terms: Callable[[Call], Any]
    kind: Callable[[Call], Kind]


def rule_for(name: str) -> Rule:
    """The rule of a function, a method or a property of this name."""
    return RULES.get(name.strip("_"), UNKNOWN)


# --- kinds --------------------------------------------------------------------------------------------


def _kind(value: Any) -> Kind:
    return value.state.kind if isinstance(value, PathTensor) else ""


def _of_source(call: Call) -> Kind:
    return _kind(call.source)


def _of_all(call: Call) -> Kind:
    kinds = {leaf.state.kind for leaf in paths_in((call.args, call.kwargs))}
    return kinds.pop() if len(kinds) == 1 else ""


def _always(kind: Kind) -> Callable[[Call], Kind]:
    return lambda _call: kind


# --- linear in one tensor -----------------------------------------------------------------------------


def _unknown(call: Call) -> Any:
    raise NotFollowed(call.not_known)


def _is_linear(call: Call) -> bool:
    of_shape = call.func in (Tensor.view_as, Tensor.reshape_as, Tensor.expand_as)  # read the shape of another alone
    pads = call.func is F.pad and bool(call.kwargs.get("value") or (len(call.args) > 3 and call.args[3]))
    return (of_shape or not paths_in((call.args[1:], call.kwargs))) and not pads


def _linear_in_one(call: Call) -> Any:
    if not _is_linear(call):
        _unknown(call)
    function = Tensor.reshape if call.func is Tensor.view else call.func
    terms, others, named = terms_of(call.args[0]), plain(call.args[1:]), plain(call.kwargs)
    mapped = torch.vmap(lambda term: function(term, *others, **named))(terms.values)
    return Terms(mapped, terms.start) if isinstance(mapped, Tensor) else [Terms(each, terms.start) for each in mapped]


def _passed_on(call: Call) -> Terms:
    return _cast(terms_of(call.source), plain(call.source), call.returned)


def _dropout(call: Call) -> Terms:
    if not torch.equal(call.returned, plain(call.source)):
        raise NotFollowed("dropout is at work, although the model is in eval mode")
    return terms_of(call.source)


def _cast(terms: Terms, before: Tensor, after: Tensor) -> Terms:
    """Where a model rounds for a while (norms in float32 inside a float64 model), its terms are not rounded with it.

    What the rounding has added is constant: it is taken in when the tensor becomes wide again, if it is no more than
    rounding.
    """
    wide = torch.promote_types(terms.values.dtype, after.dtype)
    terms = Terms(terms.values.to(after.device, wide), terms.start)
    narrower = torch.finfo(before.dtype).eps > torch.finfo(wide).eps
    if not narrower or after.dtype != wide:
        return terms
    rounding = after - terms.whole()
    small = bool(rounding.abs().amax() <= ROUNDINGS * torch.finfo(before.dtype).eps * after.abs().amax())
    return terms.plus(rounding) if small else terms


def _activation(call: Call) -> Terms:
    """φ(u) = (φ(u₀)/u₀)·u with the gate φ(u₀)/u₀ frozen. Where u₀ = 0, φ(0) is constant, and the gate 0."""
    u = plain(call.source)
    zero = u == 0
    gate = (call.returned / u).masked_fill(zero, 0)
    return terms_of(call.source).map(lambda values: values * gate).with_constant(call.returned.masked_fill(~zero, 0))


# --- sums ---------------------------------------------------------------------------------------------


def _as_wide(tensor: Tensor, returned: Tensor) -> Terms:
    """The terms of a tensor that becomes as wide as the result of an operation with a wider one."""
    terms, before = terms_of(tensor), plain(tensor)
    return terms if before.dtype == returned.dtype else _cast(terms, before, before.to(returned.dtype))


def _sum(sign: int, first: int = 0) -> Callable[[Call], Terms]:
    """a + sign·b, where a stands at `first`."""

    def rule(call: Call) -> Terms:
        pair, returned = call.named("input other"), call.returned

        def part(x: Any, factor: float) -> Terms:
            if not isinstance(x, PathTensor):
                return Terms.constant((factor * torch.as_tensor(x).to(returned)).expand(returned.shape))
            terms = _as_wide(x, returned).map(lambda each: with_axes(each, returned.ndim).expand(-1, *returned.shape))
            return terms if factor == 1 else terms.map(lambda values: factor * values)

        return added(part(pair[first], 1), part(pair[1 - first], sign * call.kwargs.get("alpha", 1)))

    return rule


def _joined(call: Call) -> Terms:
    parts, others = list(call.args[0] if call.args else call.kwargs["tensors"]), call.args[1:]
    rest = {key: value for key, value in call.kwargs.items() if key != "tensors"}
    return together(lambda *terms: call.func(terms, *others, **rest), *map(terms_of, parts))


def _masked_fill(call: Call) -> Terms:
    x, mask, value = call.named("input mask value")
    kept = terms_of(x).map(lambda values: values.masked_fill(mask, 0))
    return kept.plus(torch.where(mask, value, 0).to(call.returned.dtype))


def _where(call: Call) -> Terms:
    condition, a, b = call.named("condition input other")
    if call.func is Tensor.where:
        condition, a = a, condition

    def part(x: Any, chosen: Tensor) -> Terms:
        terms = terms_of(x if isinstance(x, Tensor) else torch.tensor(x, dtype=call.returned.dtype))
        return terms.map(lambda values: torch.where(chosen, with_axes(values, call.returned.ndim), 0))

    return added(part(a, condition), part(b, ~condition))


def _constant(call: Call) -> Terms:
    return Terms.constant(call.returned)


def _index_add(call: Call) -> Terms:
    target, dim, index, source = call.named("input dim index source")
    return together(lambda a, b: a.index_add(dim, index, b), terms_of(target), terms_of(source))


# --- products -----------------------------------------------------------------------------------------


def _frozen(call: Call) -> tuple[Any, Any, Kind, str]:
    """Of a product or a quotient: what stays split, what is frozen beside it, the kind, and why not, if so."""
    a, b = call.named("input other")
    if call.name in ("__rdiv__", "__rtruediv__"):
        a, b = b, a
    below = b if "div" in call.name else None  # what is divided by is never split
    if not (isinstance(a, PathTensor) and isinstance(b, PathTensor)):
        tensor, factor = (a, b) if isinstance(a, PathTensor) else (b, a)
        return tensor, factor, _kind(tensor), call.not_known if tensor is below else ""
    if a is b and below is None:
        return a, b, "gate", ""
    for tensor, factor in ((a, b), (b, a)):
        of_tensor, of_factor, why = _kind(tensor), _kind(factor), PRODUCT if tensor is below else ""
        if of_factor == "scale" and of_tensor != "scale":
            return tensor, factor, of_tensor, why
        spreads = of_factor == "weights" and call.returned.numel() > tensor.numel()
        if spreads and of_tensor == "" and call.attends:
            return tensor, factor, "", _SPREAD
        if of_factor in ("gate", "weights") and of_tensor == "":
            return tensor, factor, "gate", why
    return a, b, _kind(a), PRODUCT


_SPREAD = (
    "tokens are spread and weighted by what a softmax gave, which may be attention that is not written as a product of "
    "matrices: paths are not followed through it"
)


def _times(call: Call) -> Terms:
    tensor, factor, _, why = _frozen(call)
    if why:
        raise NotFollowed(why)
    factor = plain(factor).detach() if isinstance(factor, Tensor) else factor
    if "div" in call.name:
        factor = factor.reciprocal() if isinstance(factor, Tensor) else 1 / factor
    return _scaled(tensor, factor, call.returned)


def _scaled(tensor: Tensor, factor: Any, returned: Tensor) -> Terms:
    return _as_wide(tensor, returned).map(lambda values: with_axes(values, returned.ndim) * factor)


def _power_in(call: Call) -> int:
    """p of uᵖ, if that is frozen as a gate; 0 for a root, which is what a norm divides by, and anything else."""
    power = 2 if call.name == "square" else call.named("input exponent")[1]
    whole = isinstance(call.args[0], PathTensor) and not isinstance(power, Tensor) and power >= 1
    return int(power) if whole and power == int(power) else 0


def _power(call: Call) -> Terms:
    """uᵖ = u₀^(p−1)·u for whole p ≥ 1."""
    if not (power := _power_in(call)):
        _unknown(call)
    return _scaled(call.args[0], plain(call.args[0]) ** (power - 1), call.returned)


# --- weights and norms --------------------------------------------------------------------------------


def _refuse_tokens_as(*weights: Any) -> None:
    if any(isinstance(weight, PathTensor) for weight in weights):
        raise NotFollowed(PRODUCT)


def _biased(terms: Terms, bias: Tensor | None) -> Terms:
    return terms if bias is None else terms.with_constant(bias.detach())


def _linear(call: Call) -> Terms:
    """XWᵀ and its bias, which is constant."""
    x, weight, bias = call.named("input weight bias")
    _refuse_tokens_as(weight, bias)
    return _biased(terms_of(x).map(lambda values: F.linear(values, weight.detach().to(values.dtype))), bias)


def _addmm(call: Call) -> Terms:
    """XW and its bias."""
    bias, x, weight = call.args
    _refuse_tokens_as(weight, bias)
    if not call.kwargs.get("beta", 1) == call.kwargs.get("alpha", 1) == 1:
        _unknown(call)
    return _biased(terms_of(x).map(lambda values: values @ weight.detach()), bias)


def _grouped(call: Call) -> Terms:
    """Rows (s, d) sorted by expert, each by the weights of its own (experts, d, d'): `offs` says where groups end."""
    x, weight, offs, bias = call.named("input weight offs bias")
    _refuse_tokens_as(weight, bias)
    if x.ndim != 2 or weight.ndim != 3 or offs is None or bias is not None:
        raise NotFollowed("paths are followed through 'grouped_mm' of rows (s, d) with weights for each group, no bias")
    ends = offs.tolist()

    def by_expert(values: Tensor) -> Tensor:  # (k, s, d)
        groups = [values[:, start:end] for start, end in zip([0, *ends], ends, strict=False)]
        parts = [group @ own.detach().to(values.dtype) for group, own in zip(groups, weight, strict=True)]
        return F.pad(torch.cat(parts, dim=1), (0, 0, 0, values.shape[1] - ends[-1]))

    return terms_of(x).map(by_expert)


def _layer_norm(call: Call) -> Terms:
    """LN with its deviation frozen: (u − mean(u))·γ/σ₀, and β, which is constant."""
    x, shape, weight, bias, eps = call.named("input normalized_shape weight bias eps")
    scale = torch.native_layer_norm(plain(x), list(shape), None, None, 1e-5 if eps is None else eps)[2]  # 1/σ₀
    scale, axes = scale if weight is None else scale * weight.detach(), tuple(range(-len(shape), 0))
    return _biased(terms_of(x).map(lambda v: (v - v.mean(dim=axes, keepdim=True)).mul_(scale)), bias)


def _rms_norm(call: Call) -> Terms:
    """u·γ/rms₀."""
    x, shape, weight, eps = call.named("input normalized_shape weight eps")
    u, axes = plain(x), tuple(range(-len(shape), 0))
    scale = (u.square().mean(dim=axes, keepdim=True) + (torch.finfo(u.dtype).eps if eps is None else eps)).rsqrt()
    return terms_of(x).map(lambda values: values * (scale if weight is None else scale * weight.detach()))


def _softmax(_call: Call) -> Terms:
    raise NotFollowed("what a softmax gives is not linear in the tokens: paths are not followed through it")


# --- the table ----------------------------------------------------------------------------------------

UNKNOWN = Rule(_unknown, _always(""))
_VIEWS = """
    view reshape transpose permute chunk split tensor_split split_with_sizes unbind flatten unflatten squeeze unsqueeze
    expand getitem narrow select T mT H swapaxes swapdims movedim view_as reshape_as expand_as diagonal unfold
    broadcast_to
"""
VIEWS = frozenset(_VIEWS.split())
RULES: dict[str, Rule] = {}


def add_rules(names: str, terms: Callable[[Call], Any], kind: Callable[[Call], Kind]) -> None:
    """These functions, by names without the underscores around them, have this rule."""
    RULES.update(dict.fromkeys(names.split(), Rule(terms, kind)))


_same = "repeat repeat_interleave tile index_select gather take_along_dim roll flip mean sum pad cumsum neg"
add_rules(_VIEWS + _same, _linear_in_one, lambda call: _of_source(call) if _is_linear(call) else "")
add_rules("to type type_as float double half bfloat16 clone contiguous detach alias positive", _passed_on, _of_source)
add_rules("requires_grad", _passed_on, _of_source)
add_rules("dropout dropout1d dropout2d feature_dropout alpha_dropout", _dropout, _of_source)
add_rules("gelu relu silu leaky_relu elu celu selu mish hardswish relu6", _activation, _always("gate"))
add_rules("tanh prelu threshold softsign", _activation, _always("gate"))
add_rules("clamp clip clamp_min clamp_max hardtanh", _activation, _of_source)
add_rules("sigmoid exp softplus logsigmoid erf hardsigmoid topk max min sort amax log", _unknown, _always("gate"))
add_rules("rsqrt sqrt reciprocal norm linalg_vector_norm vector_norm var std", _unknown, _always("scale"))
add_rules("frobenius_norm", _unknown, _always("scale"))
add_rules("softmax", _softmax, _always("weights"))
add_rules("add radd", _sum(1), _of_all)
add_rules("sub subtract", _sum(-1), _of_all)
add_rules("rsub", _sum(-1, first=1), _of_all)
add_rules("cat concat concatenate stack", _joined, _of_all)
add_rules("where", _where, _of_all)
add_rules("masked_fill", _masked_fill, _of_source)
add_rules("index_add", _index_add, _always(""))
add_rules(
    "zeros_like ones_like full_like new_zeros new_ones new_full", lambda c: Terms.constant(c.returned), _always("")
)
add_rules("mul rmul multiply", _times, lambda call: _frozen(call)[2])
add_rules("div truediv true_divide divide rdiv rtruediv", _times, lambda call: _frozen(call)[2])
add_rules("pow square", _power, lambda call: "gate" if _power_in(call) else "scale")
add_rules("linear", _linear, _always(""))
add_rules("addmm", _addmm, _always(""))
add_rules("grouped_mm grouped_mm_fallback", _grouped, _always(""))
add_rules("layer_norm", _layer_norm, _always(""))
add_rules("rms_norm", _rms_norm, _always(""))
add_rules("matmul rmatmul bmm mm", attention_rules.product, _always(""))
add_rules("einsum", attention_rules.einsum, _always(""))
add_rules("scaled_dot_product_attention", attention_rules.fused, _always(""))
add_rules("multi_head_attention_forward", attention_rules.of_torch, _always(""))
