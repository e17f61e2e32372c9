"""The rules of attention: paths through it are one longer, since P is frozen and what it mixes is linear in the tokens.

P is what a softmax gave. Where it mixes what does not come from the tokens (a decoder's encoder, an earlier cache),
that is constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.attention_paths.path_tensor import (
    Attended,
    Log,
    Made,
    NotFollowed,
    PathTensor,
    log_of,
    plain,
    product_of_tokens,
    terms_of,
)
from depthscope.attention_paths.terms import Terms, with_axes
from depthscope.hooks.attention import attention_by_head


def mixed(attention: Tensor, terms: Terms, log: Log) -> Terms:
    """P V of each term, attention (batch, h, n, m) or (batch·h, n, m): every path is one longer."""
    by_column = terms.values.movedim(0, -2)  # (…, m, k, d_v): one product for all terms
    count, width = by_column.shape[-2:]
    context = (attention @ by_column.flatten(-2)).unflatten(-1, (count, width)).movedim(-2, 0)  # (k, …, n, d_v)
    return noted(Terms(context, terms.start), attention, log)


def noted(context: Terms, attention: Tensor, log: Log) -> Terms:
    """What the heads give, one step longer; kept by head where that is wanted."""
    values = context.values
    together = values.ndim == 4  # (k, batch·h, n, d_v)
    count = values.shape[1] // log.batch if together else values.shape[2]
    log.seen.append(Attended(count, values.shape[-2], context.start, attention.square().sum(dim=(-2, -1))))
    if log.contexts is None:
        return context.longer()
    by_head = values.unflatten(1, (log.batch, -1)) if together else values
    if by_head.ndim != 5 or by_head.shape[1] != log.batch:
        raise NotFollowed(f"heads cannot be separated in attention of shape {tuple(values.shape[1:])}")
    log.contexts.append(Terms(by_head, context.start))
    return Terms(by_head.flatten(1, 2) if together else by_head, context.start).longer()


def product(func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    """A product of matrices: by P it is attention, by a matrix of weights it is linear."""
    if func is Tensor.__rmatmul__:
        args = (args[1], args[0])
    a, b = args[0], args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("mat2"))
    if _is_attention(a):
        if not isinstance(b, PathTensor):  # of an encoder
            return lambda: Terms.constant(plain(returned)), ""
        return lambda: mixed(plain(a), terms_of(b), a.state.log), ""
    if isinstance(a, PathTensor) and isinstance(b, PathTensor):
        return product_of_tokens()
    if isinstance(a, PathTensor):
        return lambda: terms_of(a).map(lambda values: with_axes(values, b.ndim) @ b.detach()), ""
    return lambda: terms_of(b).map(lambda values: a.detach() @ with_axes(values, a.ndim)), ""


def _is_attention(operand: Any) -> bool:
    """Whether it is what a softmax gave, while attention runs: that of a router is none."""
    return isinstance(operand, PathTensor) and operand.state.kind == "weights" and operand.state.log.attends()


def einsum(func: Any, args: Any, _kwargs: Any, _returned: Any) -> Made:
    """As `product`, with the axes of P in the order (batch, h, n, m)."""
    equation, operands = args[0], list(args[1:] if len(args) > 2 or isinstance(args[1], Tensor) else args[1])
    split = [operand for operand in operands if isinstance(operand, PathTensor)]
    if len(split) == 1 and split[0].state.kind != "weights":
        return lambda: _by_term(func, equation, operands, split[0]), ""
    if len(operands) != 2 or not _is_attention(operands[0]):
        return product_of_tokens()
    attention, values = operands
    left, right = equation.replace(" ", "").split("->")
    of_attention, of_values = left.split(",")
    log = log_of(operands)

    def make() -> Terms:
        if len(of_attention) != 4 or not isinstance(values, PathTensor):
            raise NotFollowed(f"heads cannot be separated in einsum {equation!r}")
        width = (set(of_values) - set(of_attention)).pop()
        ordered = of_attention[:3] + width  # (batch, h, n, d_v)
        terms = terms_of(values)
        context = torch.einsum(f"{of_attention},Z{of_values}->Z{ordered}", plain(attention), terms.values)
        longer = noted(Terms(context, terms.start), plain(attention), log)
        return longer.map(lambda each: torch.einsum(f"Z{ordered}->Z{right}", each))

    return make, ""


def _by_term(func: Any, equation: str, operands: list[Any], split: Tensor) -> Terms:
    def one(term: Tensor) -> Tensor:
        return func(equation, *(term if operand is split else operand.detach() for operand in operands))

    return terms_of(split).map(torch.vmap(one))


def fused(_func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    """`scaled_dot_product_attention`."""

    def take(query: Any, key: Any, value: Any, *others: Any, **named: Any) -> tuple[Any, Any, Any, Any, Any]:
        return query, key, value, others, named

    query, key, value, others, named = take(*args, **kwargs)
    if not isinstance(value, PathTensor):  # of an encoder
        return lambda: Terms.constant(plain(returned)), ""

    def make() -> Terms:
        heads = attention_by_head(plain(query), plain(key), *plain(others), **plain(named))
        attention = torch.stack([head.attention.dense() for head in heads], dim=-3).to(query.dtype)
        attention = torch.where(attention.isnan(), 0, attention)  # rows that may look at nothing give 0
        repeats = query.shape[-3] // value.shape[-3]
        terms = terms_of(value)
        if repeats > 1:
            terms = terms.map(lambda values: values.repeat_interleave(repeats, dim=-3))
        return mixed(attention, terms, log_of(value))

    return make, ""


_OF_TORCH = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias"),
    *("bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias"),
)


def of_torch(func: Any, args: Any, kwargs: Any, returned: Any) -> Made:
    """`multi_head_attention_forward`, what PyTorch's `nn.MultiheadAttention` calls, tokens first: (n, batch, d)."""
    given = dict(zip(_OF_TORCH, args, strict=False)) | kwargs
    value, heads = given["value"], given["num_heads"]
    if not isinstance(value, PathTensor):
        return lambda: [Terms.constant(plain(returned[0])), None], ""

    def make() -> list[Terms | None]:
        if given.get("bias_v") is not None or given.get("add_zero_attn"):
            raise NotFollowed("nn.MultiheadAttention with bias_kv or add_zero_attn: heads are not followed")
        asked = plain(kwargs) | {"need_weights": True, "average_attn_weights": False}
        with torch.no_grad():
            attention = func(*plain(args), **asked)[1]  # (batch, h, n, m), without a batch (h, n, m)
        weight, bias = given.get("v_proj_weight"), given.get("in_proj_bias")
        weight = given["in_proj_weight"].chunk(3)[2] if weight is None else weight
        values = terms_of(value).map(lambda each: F.linear(each, weight.detach()))
        values = values if bias is None else values.with_constant(bias.detach().chunk(3)[2])
        alone = value.ndim == 2
        split = values.map(lambda each: _by_head(each.unsqueeze(2) if alone else each, heads))
        attention = attention.unsqueeze(0) if alone else attention
        context = Terms((attention @ split.values), split.start)
        longer = noted(context, attention, log_of(value))
        joined = longer.map(lambda each: each.movedim(3, 1).flatten(-2))  # (k, n, batch, d)
        output = joined.map(lambda each: F.linear(each, given["out_proj_weight"].detach()))
        output = output if given["out_proj_bias"] is None else output.with_constant(given["out_proj_bias"].detach())
        return [output.map(lambda each: each.squeeze(2)) if alone else output, None]

    return make, ""


def _by_head(values: Tensor, heads: int) -> Tensor:
    return values.unflatten(-1, (heads, -1)).permute(0, 2, 3, 1, 4)  # (k, m, batch, d) → (k, batch, h, m, d_v)


def heads_passed(seen: Sequence[Attended], tokens: int, grown: int, *, may_have_none: bool) -> int:
    """The heads of a block in which these calls of attention were passed, and paths became longer by `grown`.

    Several calls side by side are one attention whose heads are computed in turn: their numbers add up, if each mixes
    all tokens and no two have the same P. Anything else is not the block of the theorem, at which a path takes one head
    or none, and is refused: queries in pieces, the same attention twice, one attention behind another. So is a block
    that mixes tokens, if at all, in a way that is not P V with P of a softmax, unless it is known to have no attention.
    """
    if not seen:
        if may_have_none:
            return 0
        raise NotFollowed(
            "it was not seen to multiply values by what a softmax gave of its tokens: if tokens are mixed in it, it is "
            "not known how, and no lengths of paths can be told"
        )
    if grown != 1:
        raise NotFollowed(
            f"expected one self-attention, found {len(seen)} calls of it one behind another: paths through it would "
            f"be {grown} longer, not 1; name smaller blocks with blocks="
        )
    if len(seen) > 1 and not _are_heads_in_turn(seen, tokens):
        raise NotFollowed(
            f"expected one self-attention, or its heads in turn, found {len(seen)} calls of it that are not different "
            "heads for all tokens (queries in pieces, or the same attention twice): its heads cannot be counted"
        )
    return sum(each.heads for each in seen)


def _are_heads_in_turn(seen: Sequence[Attended], tokens: int) -> bool:
    alike = all(each.start == seen[0].start and each.queries == tokens for each in seen)
    if not alike or any(each.sizes.numel() % each.heads for each in seen):
        return False
    hints = [set(each.sizes.reshape(-1, each.heads).sum(dim=0).tolist()) for each in seen]
    return len(set.union(*hints)) == sum(map(len, hints))
