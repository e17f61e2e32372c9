"""What becomes of the paths of a tensor in the functions of PyTorch that Transformers are made of: one rule each.

A rule is given the call and what it returned, and says how the terms of the result are made of those of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from depthscope.attention_paths import attention_rules, linear_rules
from depthscope.attention_paths.path_tensor import (
    Kind,
    Made,
    NotFollowed,
    PathTensor,
    State,
    consumed,
    given,
    plain,
    product_of_tokens,
    refused,
    terms_of,
    wrapped,
)
from depthscope.attention_paths.terms import Terms, added, together, with_axes


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Linear in their one tensor, whatever the shape: applied to each term as it is.
VIEWS = _names("""
    view reshape transpose permute chunk split tensor_split split_with_sizes unbind flatten unflatten squeeze unsqueeze
    expand __getitem__ narrow select T mT H swapaxes swapdims movedim view_as reshape_as expand_as diagonal unfold
    broadcast_to
""")
LINEAR = VIEWS | _names(
    "repeat repeat_interleave tile index_select gather take_along_dim roll flip mean sum pad cumsum"
)
LINEAR |= {"neg", "__neg__"}
# The same numbers, but for rounding.
PASSED_ON = _names("to type type_as float double half bfloat16 clone contiguous detach alias positive requires_grad_")
PASSED_ON |= _names("dropout dropout1d dropout2d feature_dropout alpha_dropout")  # in eval mode
ACTIVATIONS = _names("gelu relu silu leaky_relu elu celu selu mish hardswish relu6 tanh prelu threshold softsign")
CLAMPS = _names("clamp clip clamp_min clamp_max hardtanh")
GATES = _names("sigmoid exp softplus logsigmoid erf hardsigmoid topk max min sort amax log")
SCALES = _names("rsqrt sqrt reciprocal norm linalg_vector_norm vector_norm var std frobenius_norm")
ROUNDINGS = 64  # in a row that may add up in one direction, as in a norm

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Made]


def name_of(func: Any) -> str:
    """Of a function, a method or a property of tensors."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name


@cache
def rule_for(name: str) -> Rule:
    """The rule of a function of this name."""
    if name in LINEAR:
        return _linear_in_one
    if name in PASSED_ON:
        return _passed_on
    if name in ACTIVATIONS or name in CLAMPS:
        return _activation
    return RULES.get(name.strip("_"), _unknown)


def _kind(value: Any) -> Kind:
    return value.state.kind if isinstance(value, PathTensor) else ""


def _unknown(func: Any, args: tuple[Any, ...], _kwargs: Any, _returned: Any) -> Made:
    name = name_of(func)
    kind: Kind = "gate" if name in GATES else "scale" if name in SCALES else ""
    return refused(f"{name!r} is not linear in the tokens, or not known: paths are not followed through it", kind)


def _linear_in_one(func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    source, others = args[0], plain(args[1:])
    if any(isinstance(leaf, PathTensor) for leaf in tree_leaves((args[1:], kwargs))) and func not in _SHAPE_OF_ANOTHER:
        return _unknown(func, args, kwargs, None)
    if func is F.pad and (kwargs.get("value") or (len(args) > 3 and args[3])):
        return _unknown(func, args, kwargs, None)
    function = Tensor.reshape if func is Tensor.view else func

    def make() -> Any:
        terms = terms_of(source)
        mapped = torch.vmap(lambda term: function(term, *others, **plain(kwargs)))(terms.values)
        return (
            Terms(mapped, terms.start) if isinstance(mapped, Tensor) else [Terms(each, terms.start) for each in mapped]
        )

    return make, _kind(source)


_SHAPE_OF_ANOTHER = (Tensor.view_as, Tensor.reshape_as, Tensor.expand_as)


def _passed_on(func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    source = args[0] if args else kwargs["input"]
    if "dropout" in name_of(func):
        return lambda: _not_dropped(source, returned), _kind(source)
    return lambda: _cast(terms_of(source), plain(source), returned), _kind(source)


def _not_dropped(source: Tensor, returned: Tensor) -> Terms:
    if not torch.equal(returned, plain(source)):
        raise NotFollowed("dropout is at work, although the model is in eval mode")
    return terms_of(source)


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


def _as_wide(tensor: Tensor, returned: Tensor) -> Terms:
    """The terms of a tensor that becomes as wide as the result of an operation with a wider one."""
    terms, before = terms_of(tensor), plain(tensor)
    return terms if before.dtype == returned.dtype else _cast(terms, before, before.to(returned.dtype))


def _activation(func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    """φ(u) = (φ(u₀)/u₀)·u with the gate φ(u₀)/u₀ frozen. Where u₀ = 0, φ(0) is constant, and the gate 0."""
    source = args[0] if args else kwargs["input"]

    def make() -> Terms:
        u = plain(source)
        gate, zero = returned / u, u == 0
        some = bool(zero.any())
        gate = gate.masked_fill(zero, 0) if some else gate
        scaled = consumed(source, lambda values: values.mul_(gate), lambda values: values * gate)
        return scaled.with_constant(returned.masked_fill(~zero, 0)) if some else scaled

    return make, _kind(source) if name_of(func) in CLAMPS else "gate"


def _sum(sign: int) -> Rule:
    def rule(_func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
        a, b = given("input other", args, kwargs)
        weight = sign * kwargs.get("alpha", 1)
        kinds = {_kind(x) for x in (a, b) if isinstance(x, PathTensor)}

        def part(x: Any, factor: float) -> Terms:
            if not isinstance(x, PathTensor):
                return Terms.constant((factor * torch.as_tensor(x, dtype=returned.dtype)).expand(returned.shape))
            terms = _as_wide(x, returned).map(lambda each: with_axes(each, returned.ndim).expand(-1, *returned.shape))
            return terms if factor == 1 else terms.map(lambda values: factor * values)

        def make() -> Terms:
            if isinstance(a, PathTensor) and isinstance(b, PathTensor):
                return added(part(a, 1), part(b, weight))
            tensor, other, factor = (a, b, 1) if isinstance(a, PathTensor) else (b, a, weight)
            return part(tensor, factor).plus(part(other, weight if tensor is a else 1).values[0])

        return make, kinds.pop() if len(kinds) == 1 else ""

    return rule


def _reversed(rule: Rule) -> Rule:
    return lambda func, args, kwargs, returned: rule(func, (args[1], args[0]), kwargs, returned)


def _times(_func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    a, b = given("input other", args, kwargs)
    if not (isinstance(a, PathTensor) and isinstance(b, PathTensor)):
        tensor, factor = (a, b) if isinstance(a, PathTensor) else (b, a)
        return lambda: _scaled(tensor, factor, returned), _kind(tensor)
    kinds = _kind(a), _kind(b)
    if a is b:
        return lambda: _scaled(a, plain(a), returned), "gate"
    for tensor, factor, (of_tensor, of_factor) in ((a, b, kinds), (b, a, kinds[::-1])):
        if of_factor == "scale" and of_tensor != "scale":
            return lambda t=tensor, f=factor: _scaled(t, plain(f), returned), of_tensor
        spreads = of_factor == "weights" and returned.numel() > tensor.numel()
        if spreads and of_tensor == "" and factor.state.log.attends():
            return refused(
                "tokens are spread and weighted by what a softmax gave, which may be attention that is not written as "
                "a product of matrices: paths are not followed through it"
            )
        if of_factor in ("gate", "weights") and of_tensor == "":
            return lambda t=tensor, f=factor: _scaled(t, plain(f), returned), "gate"
    return product_of_tokens(kinds[0])


def _scaled(tensor: Tensor, factor: Any, returned: Tensor) -> Terms:
    factor = factor.detach() if isinstance(factor, Tensor) else factor
    return _as_wide(tensor, returned).map(lambda values: with_axes(values, returned.ndim) * factor)


def _over(func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    a, b = given("input other", args, kwargs)
    if not isinstance(b, PathTensor):
        inverse = 1 / b if not isinstance(b, Tensor) else b.reciprocal()
        return lambda: _scaled(a, inverse, returned), _kind(a)
    if not isinstance(a, PathTensor):
        return _unknown(func, args, kwargs, returned)[0], _kind(b)
    inverse = wrapped(plain(b).reciprocal(), State(product_of_tokens()[0], b.state.log, "div", b.state.kind))
    return _times(func, (a, inverse), {}, returned)


def _power(func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    """uᵖ = u₀^(p−1)·u for whole p ≥ 1; a root is what a norm divides by."""
    power = 2 if name_of(func) == "square" else given("input exponent", args, kwargs)[1]
    if not isinstance(args[0], PathTensor) or isinstance(power, Tensor) or power < 1 or power != int(power):
        return _unknown(func, args, kwargs, returned)[0], "scale"
    return lambda: _scaled(args[0], plain(args[0]) ** (int(power) - 1), returned), "gate"


def _joined(func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    parts, others = list(args[0] if args else kwargs["tensors"]), args[1:]
    rest = {key: value for key, value in kwargs.items() if key != "tensors"}
    kinds = {_kind(part) for part in parts if isinstance(part, PathTensor)}

    def make() -> Terms:
        return together(lambda *terms: func(terms, *others, **rest), *map(terms_of, parts))

    return make, kinds.pop() if len(kinds) == 1 else ""


def _masked_fill(_func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    x, mask, value = given("input mask value", args, kwargs)

    def make() -> Terms:
        kept = terms_of(x).map(lambda values: values.masked_fill(mask, 0))
        return kept.plus(torch.where(mask, value, 0).to(returned.dtype))

    return make, _kind(x)


def _where(func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    if func is Tensor.where:
        args = (args[1], args[0], *args[2:])
    condition, a, b = given("condition input other", args, kwargs)
    kinds = {_kind(x) for x in (a, b) if isinstance(x, PathTensor)}

    def part(x: Any, chosen: Tensor) -> Terms:
        terms = terms_of(x if isinstance(x, Tensor) else torch.tensor(x, dtype=returned.dtype))
        return terms.map(lambda values: torch.where(chosen, with_axes(values, returned.ndim), 0))

    return lambda: added(part(a, condition), part(b, ~condition)), kinds.pop() if len(kinds) == 1 else ""


def _like(_func: Any, _args: Any, _kwargs: Any, returned: Any) -> Made:
    return lambda: Terms.constant(returned), ""


def _index_add(_func: Any, args: Any, kwargs: Any, _returned: Any) -> Made:
    target, dim, index, source = given("input dim index source", args, kwargs)

    def make() -> Terms:
        return together(lambda a, b: a.index_add(dim, index, b), terms_of(target), terms_of(source))

    return make, ""


def _softmax(_func: Any, _args: Any, _kwargs: Any, _returned: Any) -> Made:
    return refused("what a softmax gives is not linear in the tokens: paths are not followed through it", "weights")


RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "radd"), _sum(1)),
    **dict.fromkeys(("sub", "subtract"), _sum(-1)),
    "rsub": _reversed(_sum(-1)),
    **dict.fromkeys(("mul", "rmul", "multiply"), _times),
    **dict.fromkeys(("div", "truediv", "true_divide", "divide"), _over),
    **dict.fromkeys(("rdiv", "rtruediv"), _reversed(_over)),
    **dict.fromkeys(("pow", "square"), _power),
    "linear": linear_rules.linear,
    "addmm": linear_rules.addmm,
    **dict.fromkeys(("grouped_mm", "grouped_mm_fallback"), linear_rules.grouped),
    "layer_norm": linear_rules.layer_norm,
    "rms_norm": linear_rules.rms_norm,
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
    "masked_fill": _masked_fill,
    "where": _where,
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"), _like),
    "index_add": _index_add,
    "softmax": _softmax,
    **dict.fromkeys(("matmul", "rmatmul", "bmm", "mm"), attention_rules.product),
    "einsum": attention_rules.einsum,
    "scaled_dot_product_attention": attention_rules.fused,
    "multi_head_attention_forward": attention_rules.of_torch,
}
