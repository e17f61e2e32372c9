"""What a block does between its products, as plain loops: compiled where numba is, and run as they are by a test.

All matrices are (features, tokens), so that the innermost loop runs over many tokens and adds nothing up across the
lanes of the processor. Token i of sequence b is column i·batch + b.

Attention is kept by distance: row t of a head says for every token i how much it sees of token (i + t) mod n, which
stands t·batch columns further on. What is read at a distance is written twice, one behind the other, so that no loop
has to turn round. Four products are added at a time: of more rows the compiler does not find out that they are apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TERMS = 13  # of the series of exp: enough for float64 where |r| ≤ ln 2 / 2


def meet(
    left: Any,  # (d, m)
    right: Any,  # (d, m)
    heads: int,
    scale: Any,
    out: Any,  # (heads·n, m)
    first: int,
    last: int,  # the heads before this one
) -> None:
    """out[h, t] = scale · ⟨left of a token, right of the token t further on⟩, in each head: scores by distance."""
    m, n, w = left.shape[1], len(out) // heads, len(left) // heads
    step = m // n
    twice = np.empty((w, 2 * m), left.dtype)
    for h in range(first, last):
        for c in range(w):
            again = twice[c, m:]
            for x in range(m):
                twice[c, x] = right[h * w + c, x] * scale
            for x in range(m):
                again[x] = twice[c, x]
        for t in range(n):
            row, at = h * n + t, t * step
            for x in range(m):
                out[row, x] = 0
            for c in range(0, w - 3, 4):
                i = h * w + c
                r0, r1 = twice[c, at : at + m], twice[c + 1, at : at + m]
                r2, r3 = twice[c + 2, at : at + m], twice[c + 3, at : at + m]
                for x in range(m):
                    out[row, x] += (left[i, x] * r0[x] + left[i + 1, x] * r1[x]) + (
                        left[i + 2, x] * r2[x] + left[i + 3, x] * r3[x]
                    )
            for c in range(w - w % 4, w):
                r0 = twice[c, at : at + m]
                for x in range(m):
                    out[row, x] += left[h * w + c, x] * r0[x]


def gather(
    p: Any,  # (heads·n, m) by distance
    source: Any,  # (d, m)
    heads: int,
    back: bool,  # from tokens that see to those that are seen: the transpose
    out: Any,  # (d, m)
    first: int,
    last: int,  # the heads before this one
) -> None:
    """out of a token = Σ_t p[h, t] · source of the token t further on, in each head."""
    m, n, w = p.shape[1], len(p) // heads, len(source) // heads
    step = m // n
    twice, turned = np.empty((w, 2 * m), p.dtype), np.empty((n, m), p.dtype)
    begin, move = (m, -step) if back else (0, step)
    for h in range(first, last):
        rows, top = (turned, 0) if back else (p, h * n)
        for t in range(n if back else 0):
            at = t * step
            ahead, rest = turned[t, at:], p[h * n + t, m - at :]
            for x in range(m - at):
                ahead[x] = p[h * n + t, x]
            for x in range(at):
                turned[t, x] = rest[x]
        for c in range(w):
            again = twice[c, m:]
            for x in range(m):
                twice[c, x] = source[h * w + c, x]
            for x in range(m):
                again[x] = twice[c, x]
        for c in range(w):
            row = h * w + c
            for x in range(m):
                out[row, x] = 0
            for t in range(0, n - 3, 4):
                at, r = begin + t * move, top + t
                s0, s1 = twice[c, at : at + m], twice[c, at + move : at + move + m]
                at += 2 * move
                s2, s3 = twice[c, at : at + m], twice[c, at + move : at + move + m]
                for x in range(m):
                    out[row, x] += (rows[r, x] * s0[x] + rows[r + 1, x] * s1[x]) + (
                        rows[r + 2, x] * s2[x] + rows[r + 3, x] * s3[x]
                    )
            for t in range(n - n % 4, n):
                at = begin + t * move
                s0 = twice[c, at : at + m]
                for x in range(m):
                    out[row, x] += rows[top + t, x] * s0[x]


def softmax(
    p: Any,  # (heads·n, m) scores by distance, and then attention
    heads: int,
    series: Any,  # both from `block_kernels.exponential`
    exponents: Any,
    first: int,
    last: int,  # the heads before this one
) -> None:
    """Scores to attention, in place: exp(u) = 2^k · exp(r), where u = k·ln 2 + r.

    It is as exact as u is rounded, to a few (1 + |u|)·ε.
    """
    m, n = p.shape[1], len(p) // heads
    least, per_ln2, ln2, half, one = series[0], series[1], series[2], series[3], series[4]
    offset, unit = exponents[0], exponents[1]
    top, total, bits = np.empty(m, p.dtype), np.empty(m, p.dtype), np.empty(m, exponents.dtype)
    power = bits.view(p.dtype)  # the bits of an exponent, read as the number 2^k
    for h in range(first, last):
        for x in range(m):
            top[x] = p[h * n, x]
            total[x] = 0
        for t in range(1, n):
            for x in range(m):
                top[x] = p[h * n + t, x] if p[h * n + t, x] > top[x] else top[x]
        for t in range(n):
            row = h * n + t
            for x in range(m):
                u = p[row, x] - top[x]
                u = least if u < least else u
                k = exponents.dtype.type(u * per_ln2 - half)  # u ≤ 0, and what is behind the point is cut off
                r = u - p.dtype.type(k) * ln2
                y = series[5]
                for g in range(6, 5 + TERMS):
                    y = y * r + series[g]
                bits[x] = (k + offset) * unit
                p[row, x] = y
            for x in range(m):
                p[row, x] *= power[x]
                total[x] += p[row, x]
        for x in range(m):
            total[x] = one / total[x]
        for t in range(n):
            for x in range(m):
                p[h * n + t, x] *= total[x]


def softmax_backward(
    p: Any,  # (heads·n, m)
    g: Any,  # (heads·n, m) the gradient of p, and then that of the scores
    heads: int,
    scale: Any,
    first: int,
    last: int,  # the heads before this one
) -> None:
    m, n = p.shape[1], len(p) // heads
    shared = np.empty(m, p.dtype)
    for h in range(first, last):
        for x in range(m):
            shared[x] = 0
        for t in range(n):
            for x in range(m):
                shared[x] += p[h * n + t, x] * g[h * n + t, x]
        for t in range(n):
            for x in range(m):
                g[h * n + t, x] = p[h * n + t, x] * (g[h * n + t, x] - shared[x]) * scale


def norm(
    y: Any,  # (d, m)
    bias: Any,  # (d,) is added to y in place
    weight: Any,  # (d,)
    shift: Any,  # (d,)
    eps: Any,
    stats: Any,  # (2, m) out: mean and 1/deviation of each token
    out: Any,  # (d, m)
) -> None:
    """Layer norm of y + bias over the features of each token."""
    d, m = y.shape
    mean, scale = stats[0], stats[1]
    one = weight.dtype.type(1)
    share = one / weight.dtype.type(d)
    for x in range(m):
        mean[x] = 0
        scale[x] = 0
    for c in range(d):
        for x in range(m):
            y[c, x] += bias[c]
            mean[x] += y[c, x]
    for x in range(m):
        mean[x] *= share
    for c in range(d):
        for x in range(m):
            scale[x] += (y[c, x] - mean[x]) * (y[c, x] - mean[x])
    for x in range(m):
        scale[x] = one / np.sqrt(scale[x] * share + eps)
    for c in range(d):
        for x in range(m):
            out[c, x] = (y[c, x] - mean[x]) * scale[x] * weight[c] + shift[c]


def norm_backward(
    g: Any,  # (d, m) the gradient of what was normed
    y: Any,  # (d, m)
    stats: Any,  # (2, m)
    weight: Any,  # (d,)
    beside: Any,  # (d, m) is added to the result, or (0, m)
    out: Any,  # (d, m) the gradient of y
    sums: Any,  # (3, d) out: the gradients of weight and shift, and the sum of `out` over the tokens
) -> None:
    d, m = y.shape
    mean, scale = stats[0], stats[1]
    along, across = np.zeros(m, y.dtype), np.zeros(m, y.dtype)
    share = weight.dtype.type(1) / weight.dtype.type(d)
    for c in range(d):
        of_weight = of_shift = weight.dtype.type(0)
        for x in range(m):
            normed = (y[c, x] - mean[x]) * scale[x]
            of_weight += g[c, x] * normed
            of_shift += g[c, x]
            along[x] += g[c, x] * weight[c] * normed
            across[x] += g[c, x] * weight[c]
        sums[0, c], sums[1, c] = of_weight, of_shift
    for x in range(m):
        along[x] *= share
        across[x] *= share
    for c in range(d):
        total = weight.dtype.type(0)
        for x in range(m):
            normed = (y[c, x] - mean[x]) * scale[x]
            value = (g[c, x] * weight[c] - across[x] - normed * along[x]) * scale[x]
            out[c, x] = value
            total += value
        if len(beside):
            total = weight.dtype.type(0)
            for x in range(m):
                out[c, x] += beside[c, x]
                total += out[c, x]
        sums[2, c] = total


def relu(
    hidden: Any,  # (f, m) in place
    bias: Any,  # (f,)
) -> None:
    """Adds the bias, and cuts off what is below 0; nan stays nan."""
    f, m = hidden.shape
    zero = bias.dtype.type(0)
    for c in range(f):
        for x in range(m):
            value = hidden[c, x] + bias[c]
            hidden[c, x] = zero if value < zero else value


def relu_backward(
    g: Any,  # (f, m) in place
    hidden: Any,  # (f, m) what left it
    sums: Any,  # (f,) out: the gradient of its bias
) -> None:
    f, m = hidden.shape
    zero = sums.dtype.type(0)
    for c in range(f):
        total = zero
        for x in range(m):
            value = zero if hidden[c, x] <= zero else g[c, x]
            g[c, x] = value
            total += value
        sums[c] = total


def subtract_mean(
    x: Any,  # (d, m) in place
    n: int,
    tau: Any,
) -> None:
    """x − τ·mean over the n tokens of each sequence."""
    d, m = x.shape
    batch = m // n
    total = np.empty(batch, x.dtype)
    share = tau / x.dtype.type(n)
    for c in range(d):
        for b in range(batch):
            total[b] = 0
        for i in range(n):
            row = x[c, i * batch : (i + 1) * batch]
            for b in range(batch):
                total[b] += row[b]
        for i in range(n):
            row = x[c, i * batch : (i + 1) * batch]
            for b in range(batch):
                row[b] -= total[b] * share
