"""The layers of a Transformer with 400 digits, on whole tokens, written as they are defined: what no float can hold.

Matrices are lists of rows of mpmath numbers; weights are taken from tensors exactly as they are stored.
"""

import mpmath
from mpmath import mp, mpf
from torch import Tensor

DIGITS = 400  # differences of 1e-300 keep 100 of them
Matrix = list[list[mpf]]


def exact(x: Tensor) -> Matrix:
    return [[mpf(value) for value in row] for row in x.tolist()]


def times(a: Matrix, b: Matrix) -> Matrix:
    return [[mp.fdot(zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def plus(a: Matrix, b: Matrix) -> Matrix:
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def plus_row(a: Matrix, row: Tensor | None) -> Matrix:
    return a if row is None else [[x + mpf(y) for x, y in zip(own, row.tolist(), strict=True)] for own in a]


def attention(x: Matrix, heads, causal: bool = False) -> Matrix:
    total = None
    for h in range(len(heads.query)):
        bias = None if heads.query_bias is None else heads.query_bias[h]
        q, k = plus_row(times(x, exact(heads.query[h])), bias), times(x, exact(heads.key[h]))
        p = []
        for i, row in enumerate(q):
            seen = k[: i + 1] if causal else k
            scores = [mp.exp(mp.fdot(zip(row, other, strict=True)) / mp.sqrt(len(row))) for other in seen]
            p.append([score / mp.fsum(scores) for score in scores] + [mpf(0)] * (len(k) - len(seen)))
        y = times(times(p, x), exact(heads.value[h]))
        total = y if total is None else plus(total, y)
    assert total is not None
    return plus_row(total, heads.bias)


def layer_norm(x: Matrix, gain: Tensor, bias: Tensor, eps: float) -> Matrix:
    rows = []
    for row in x:
        mean = mp.fsum(row) / len(row)
        centred = [value - mean for value in row]
        deviation = mp.sqrt(mp.fsum(value**2 for value in centred) / len(row) + mpf(eps))
        rows.append([value / deviation * mpf(g) for value, g in zip(centred, gain.tolist(), strict=True)])
    return plus_row(rows, bias)


ACTIVATIONS = {
    "relu": lambda a: max(a, mpf(0)),
    "tanh": mp.tanh,
    "sine": mp.sin,
    "gelu": lambda a: a * mp.ncdf(a),
}


def mlp(x: Matrix, weights) -> Matrix:
    hidden = plus_row(times(x, exact(weights.expand)), weights.expand_bias)
    phi = ACTIVATIONS[weights.activation]
    return plus_row(times([[phi(a) for a in row] for row in hidden], exact(weights.contract)), weights.contract_bias)


def mean(x: Matrix) -> list[float]:
    return [float(mp.fsum(column) / len(x)) for column in zip(*x, strict=True)]


def deviations(x: Matrix) -> list[list[float]]:
    """X − 1x̄ᵀ, rounded only now."""
    means = [mp.fsum(column) / len(x) for column in zip(*x, strict=True)]
    return [[float(value - mean) for value, mean in zip(row, means, strict=True)] for row in x]


workdps = mpmath.workdps
