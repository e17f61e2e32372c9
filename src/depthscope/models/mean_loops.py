"""Y = X − τ·mean as plain loops over float32 tokens: compiled where numba is, and run as they are by a test.

Each number is read from memory once or twice and written once. Totals are in float64, so that equal tokens leave
exactly 0 of a full mean at τ = 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def subtract_full(
    x: Any,  # (batch, n, d) float32
    tau: float,
    y: Any,  # (batch, n, d) float32, out
    first: int,
    last: int,  # the sequences before this one
) -> None:
    """y = x − τ·mean over the tokens. Eight tokens are added in pairs before float64: eight equal ones exactly."""
    _, n, d = x.shape
    total, shift = np.empty(d), np.empty(d, np.float32)
    in_eights = n - n % 8
    for b in range(first, last):
        for j in range(d):
            total[j] = 0.0
        for i in range(0, in_eights, 8):
            for j in range(d):
                left = (x[b, i, j] + x[b, i + 1, j]) + (x[b, i + 2, j] + x[b, i + 3, j])
                right = (x[b, i + 4, j] + x[b, i + 5, j]) + (x[b, i + 6, j] + x[b, i + 7, j])
                total[j] += np.float64(left + right)
        for i in range(in_eights, n):
            for j in range(d):
                total[j] += np.float64(x[b, i, j])
        for j in range(d):
            shift[j] = np.float32(tau * (total[j] / n))
        for i in range(n):
            for j in range(d):
                y[b, i, j] = x[b, i, j] - shift[j]


def subtract_causal(
    x: Any,  # (batch, n, d) float32
    beta: float,
    gives: Any,  # (n,) float64, how much of a token goes into the totals
    takes: Any,  # (n,) float64, how much of the totals is taken from a token
    backwards: bool,  # from the last token to the first: the transpose
    y: Any,  # (batch, n, d) float32, out
    first: int,
    last: int,  # the sequences before this one
) -> None:
    """total ← β·total + gives·x and y = x − takes·total, token by token.

    Backwards in fours: processors guess which memory is wanted next, and do that badly for rows in falling order.
    """
    _, n, d = x.shape
    total = np.empty(d)
    in_fours = n - n % 4 if backwards else 0
    for b in range(first, last):
        for j in range(d):
            total[j] = 0.0
        for t in range(0, in_fours, 4):
            i = n - 1 - t
            g0, g1, g2, g3 = gives[i], gives[i - 1], gives[i - 2], gives[i - 3]
            k0, k1, k2, k3 = takes[i], takes[i - 1], takes[i - 2], takes[i - 3]
            for j in range(d):
                value = np.float64(x[b, i, j])
                s = beta * total[j] + g0 * value
                y[b, i, j] = np.float32(value - k0 * s)
                value = np.float64(x[b, i - 1, j])
                s = beta * s + g1 * value
                y[b, i - 1, j] = np.float32(value - k1 * s)
                value = np.float64(x[b, i - 2, j])
                s = beta * s + g2 * value
                y[b, i - 2, j] = np.float32(value - k2 * s)
                value = np.float64(x[b, i - 3, j])
                s = beta * s + g3 * value
                y[b, i - 3, j] = np.float32(value - k3 * s)
                total[j] = s
        for t in range(in_fours, n):
            i = n - 1 - t if backwards else t
            g, k = gives[i], takes[i]
            for j in range(d):
                value = np.float64(x[b, i, j])
                s = beta * total[j] + g * value
                total[j] = s
                y[b, i, j] = np.float32(value - k * s)
