"""Every token as the centre in turn: all differences x_i − x_k, each with its own relative precision. Ours.

`theory.residuals` carries differences from one shared token. If tokens stand in groups (a layer whose rows attend to
one token or to another makes such groups, of width e^−s if it does so by s nats), the differences inside of a group are
lost beside those of the groups; and a layer whose rows all attend to one group makes the tokens as equal as that group
is narrow. Here a centre stands in every group. It costs n times the memory and time.

Each x_k is carried by itself. In a network that is chaotic in x they drift apart by their own roundings, and the
differences around one are then not exactly those around another.

Pairs are `SplitTokens` with one more axis: shared x_k (…, n, d), residual x_i − x_k (…, n, n, d), k before i. Weights
need the same axis: (…, 1, h, d, d_qk), (…, 1, d, f).
"""

from __future__ import annotations

from depthscope.theory.residuals import (
    Heads,
    Mlp,
    SplitTokens,
    activate_uncentred,
    attend_by,
    linear,
    most_attended,
    scores_of,
)


def around_each(tokens: SplitTokens) -> SplitTokens:
    """The pairs of some tokens."""
    r = tokens.residual
    return SplitTokens(tokens.tokens, r.unsqueeze(-3) - r.unsqueeze(-2))


def around_mean(pairs: SplitTokens) -> SplitTokens:
    """The tokens of some pairs: x̄, and r_i = Σ_k(x_i − x_k)/n."""
    return SplitTokens(pairs.shared.mean(dim=-2), pairs.residual.mean(dim=-3))


def attend_pairs(pairs: SplitTokens, heads: Heads) -> SplitTokens:
    """Attention: row i less row k is Σ_j(p_ij − p_kj)(x_j − x_j*)W, j* the token that row k attends to most."""
    most = most_attended(pairs, heads)  # (…, n, h, 1, 1)
    n, h = most.shape[-4:-2]
    apart = pairs.residual.take_along_dim(most.flatten(-4, -3), dim=-3).unflatten(-3, (n, h))  # (…, n, h, n, d)
    return attend_by(scores_of(pairs, heads, apart=apart), pairs, heads)


def feed_forward_pairs(pairs: SplitTokens, mlp: Mlp) -> SplitTokens:
    """φ(XW₁ + 1b₁ᵀ)W₂ + 1b₂ᵀ."""
    hidden = activate_uncentred(linear(pairs, mlp.expand, mlp.expand_bias), mlp.activation)
    return linear(hidden, mlp.contract, mlp.contract_bias)
