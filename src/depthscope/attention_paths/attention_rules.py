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
    PRODUCT,
    Attended,
    Call,
    Log,
    NotFollowed,
    PathTensor,
    paths_in,
    plain,
    terms_of,
)
from depthscope.attention_paths.terms import Terms, with_axes
from depthscope.hooks.attention import attention_by_head


def _longer(context: Terms, attention: Tensor, log: Log) -> Terms:
    """What the heads give, (k, batch, h, n, d_v) or (k, batch·h, n, d_v): every path is one longer."""
    values = context.values
    heads = values.shape[1] // log.batch if values.ndim == 4 else values.shape[2]
    log.seen.append(Attended(heads, values.shape[-2], context.start, attention.square().sum(dim=(-2, -1))))
    return context.longer()


def _mixed(attention: Tensor, terms: Terms, log: Log) -> Terms:
    """P V of each term, P (batch, h, n, m) or (batch·h, n, m)."""
    by_column = terms.values.movedim(0, -2)  # (…, m, k, d_v): one product for all terms
    context = (attention @ by_column.flatten(-2)).unflatten(-1, by_column.shape[-2:]).movedim(-2, 0)
    return _longer(Terms(context, terms.start), attention, log)  # (k, …, n, d_v)


def _is_attention(call: Call, operand: Any) -> bool:
    """Whether it is what a softmax gave, while attention runs: that of a router is none."""
    return isinstance(operand, PathTensor) and operand.state.kind == "weights" and call.attends


def product(call: Call) -> Terms:
    """A product of matrices: by P it is attention, by a matrix of weights it is linear."""
    args = call.args[::-1] if call.func is Tensor.__rmatmul__ else call.args
    a: Any = args[0]
    b: Any = args[1] if len(args) > 1 else call.kwargs.get("other", call.kwargs.get("mat2"))
    if _is_attention(call, a):
        if not isinstance(b, PathTensor):  # of an encoder
            return Terms.constant(call.returned)
        return _mixed(plain(a), terms_of(b), a.state.log)
    if isinstance(a, PathTensor) and isinstance(b, PathTensor):
        raise NotFollowed(PRODUCT)
    if isinstance(a, PathTensor):
        return terms_of(a).map(lambda values: with_axes(values, b.ndim) @ b.detach())
    return terms_of(b).map(lambda values: a.detach() @ with_axes(values, a.ndim))


def einsum(call: Call) -> Terms:
    """As `product`, with the axes of P in the order (batch, h, n, m)."""
    equation, *operands = call.args
    operands = operands if isinstance(operands[0], Tensor) else list(operands[0])
    split = paths_in(operands)
    if len(split) == 1 and split[0].state.kind != "weights":

        def one(term: Tensor) -> Tensor:
            return call.func(equation, *(term if operand is split[0] else operand.detach() for operand in operands))

        return terms_of(split[0]).map(torch.vmap(one))
    if len(operands) != 2 or not _is_attention(call, operands[0]):
        raise NotFollowed(PRODUCT)
    attention, values = operands
    left, right = equation.replace(" ", "").split("->")
    of_attention, of_values = left.split(",")
    if len(of_attention) != 4 or not isinstance(values, PathTensor):
        raise NotFollowed(f"heads cannot be separated in einsum {equation!r}")
    ordered = of_attention[:3] + (set(of_values) - set(of_attention)).pop()  # (batch, h, n, d_v)
    terms = terms_of(values)
    context = torch.einsum(f"{of_attention},Z{of_values}->Z{ordered}", plain(attention), terms.values)
    longer = _longer(Terms(context, terms.start), plain(attention), call.log)
    return longer.map(lambda each: torch.einsum(f"Z{ordered}->Z{right}", each))


def fused(call: Call) -> Terms:
    """`scaled_dot_product_attention`."""
    names = ("query", "key", "value")
    found = dict(zip(names, call.args, strict=False)) | call.kwargs
    query, key, value = (found[name] for name in names)
    if not isinstance(value, PathTensor):  # of an encoder
        return Terms.constant(call.returned)
    named = {name: plain(x) for name, x in call.kwargs.items() if name not in names}
    heads = attention_by_head(plain(query), plain(key), *plain(call.args[3:]), **named)
    attention = torch.stack([head.attention.dense() for head in heads], dim=-3).to(query.dtype)
    attention = torch.where(attention.isnan(), 0, attention)  # rows that may look at nothing give 0
    repeats = query.shape[-3] // value.shape[-3]
    terms = terms_of(value)
    if repeats > 1:
        terms = terms.map(lambda values: values.repeat_interleave(repeats, dim=-3))
    return _mixed(attention, terms, call.log)


def of_torch(call: Call) -> list[Terms | None]:
    """`multi_head_attention_forward`, what PyTorch's `nn.MultiheadAttention` calls, tokens first: (n, batch, d)."""
    _, _, value, _, count, joint, bias, _, bias_v, adds_zero, _, out, out_bias = call.named(
        "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn "
        "dropout_p out_proj_weight out_proj_bias"
    )
    if not isinstance(value, PathTensor):
        return [Terms.constant(call.returned[0]), None]
    if bias_v is not None or adds_zero:
        raise NotFollowed("nn.MultiheadAttention with bias_kv or add_zero_attn: heads are not followed")
    asked = plain(call.kwargs) | {"need_weights": True, "average_attn_weights": False}
    with torch.no_grad():
        attention = call.func(*plain(call.args), **asked)[1]  # (batch, h, n, m), without a batch (h, n, m)
    own = call.kwargs.get("v_proj_weight")
    weight = joint.chunk(3)[2] if own is None else own
    values = terms_of(value).map(lambda each: F.linear(each, weight.detach()))
    values = values if bias is None else values.with_constant(bias.detach().chunk(3)[2])
    alone = value.ndim == 2
    attention = attention.unsqueeze(0) if alone else attention

    def by_head(each: Tensor) -> Tensor:
        each = each.unsqueeze(2) if alone else each  # (k, m, batch, d)
        return attention @ each.unflatten(-1, (count, -1)).permute(0, 2, 3, 1, 4)  # (k, batch, h, n, d_v)

    longer = _longer(values.map(by_head), attention, call.log)
    output = longer.map(lambda each: F.linear(each.movedim(3, 1).flatten(-2), out.detach()))  # (k, n, batch, d)
    output = output if out_bias is None else output.with_constant(out_bias.detach())
    return [output.map(lambda each: each.squeeze(2)) if alone else output, None]


def heads_passed(seen: Sequence[Attended], tokens: int, grown: int, *, may_have_none: bool) -> int:
    """The heads of a block in which these calls of attention were passed, and paths became longer by `grown`.

    Several calls side by side are one attention whose heads are computed in turn: their numbers add up, if each mixes
    all tokens and no two have the same P. Anything else is not the block of the theorem, at which a path takes one head
    or none, and is refused: queries in pieces, the same attention twice, one attention after another. So is a block
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
            f"expected one self-attention, found {len(seen)} calls of it one after another: paths through it would "
            f"be {grown} longer, not 1; name smaller blocks with blocks="
        )
    alike = all(each.start == seen[0].start and each.queries == tokens for each in seen)
    in_turn = alike and not any(each.sizes.numel() % each.heads for each in seen)
    if in_turn:
        sizes = [set(each.sizes.reshape(-1, each.heads).sum(dim=0).tolist()) for each in seen]
        in_turn = len(set.union(*sizes)) == sum(map(len, sizes))  # no two have the same P
    if len(seen) > 1 and not in_turn:
        raise NotFollowed(
            f"expected one self-attention, or its heads in turn, found {len(seen)} calls of it that are not different "
            "heads for all tokens (queries in pieces, or the same attention twice): its heads cannot be counted"
        )
    return sum(each.heads for each in seen)
