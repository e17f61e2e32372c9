"""One sweep over the tokens of a station, as plain loops: `kernel.py` compiles them, and a test runs them as they are.

Everything is summed in float64, which holds the square of any float32 number, so that nothing overflows, nothing
vanishes, and no case needs a second look. Tokens are shifted by one of their own before they are summed: equal tokens
give exactly 0. What is subtracted afterwards, n‖s̄‖² from Σ‖s_i‖², leaves at least a part in n of it, since the token
that was subtracted is one of the n; float64 has the digits for that.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def sweep_rows(
    x: Any,  # (batch, n, d) float32
    real: Any,  # (batch, n) bool; empty: all are real
    before: Any,  # (batch, n, d) float32, the tokens that these are compared with; empty: there are none
    norms_before: Any,  # (batch, n) float64, 0 where a token has no direction
    kept: Any,  # (batch, n, d) float32, where the tokens are copied to; empty: nowhere
    outlier_factor: float,
    norms: Any,  # (batch, n) float64, out: ‖x_i‖, 0 at padding
    out: Any,  # (fields, batch) float64, out: as in `FIELDS` of the package
    first_sample: int,
    last_sample: int,  # the sequences before this one
) -> None:
    _, n, d = x.shape
    work, keep = np.empty((6, d)), np.empty(n, np.bool_)
    masked, compares, copies = real.size > 0, before.size > 0, kept.size > 0
    shift, total, unit_shift, unit_total = work[0], work[1], work[2], work[3]
    # Unit tokens are rounded before they are subtracted: a fused multiplication and subtraction of equal ones is not 0.
    unit, unit_before = work[4], work[5]
    for b in range(first_sample, last_sample):
        count = 0
        first = first_direction = -1
        least, most, largest = math.inf, 0.0, 0.0
        for i in range(n):
            keep[i] = not masked or real[b, i]
            if not keep[i]:
                norms[b, i] = 0.0
                continue
            square = 0.0
            for j in range(d):
                value = np.float64(x[b, i, j])
                square += value * value
            norm = math.sqrt(square)
            norms[b, i] = norm
            if first < 0:
                first = i
            if first_direction < 0 and norm != 0:
                first_direction = i
            count += 1
            if norm < least:
                least = norm
            if norm > most:
                most = norm
            if norm > largest or math.isnan(norm):  # nothing is larger than nan, which then stays
                largest = norm

        # --- all real tokens, and those that have a direction ---------------------------------------
        for j in range(d):
            total[j] = unit_total[j] = 0.0
            shift[j] = np.float64(x[b, max(first, 0), j])
            unit_shift[j] = 0.0
        if first_direction >= 0:
            inverse = 1.0 / norms[b, first_direction]
            for j in range(d):
                unit_shift[j] = np.float64(x[b, first_direction, j]) * inverse
        squares = unit_squares = angles = 0.0
        directed = compared = 0
        for i in range(n):
            if not keep[i]:
                continue
            square = unit_square = turn = 0.0
            norm = norms[b, i]
            if norm == 0:
                for j in range(d):
                    s = np.float64(x[b, i, j]) - shift[j]
                    total[j] += s
                    square += s * s
            else:
                inverse = 1.0 / norm
                for j in range(d):
                    unit[j] = np.float64(x[b, i, j]) * inverse
                for j in range(d):
                    s = np.float64(x[b, i, j]) - shift[j]
                    total[j] += s
                    square += s * s
                    u = unit[j] - unit_shift[j]
                    unit_total[j] += u
                    unit_square += u * u
                directed += 1
            if compares and norm != 0 and norms_before[b, i] != 0:
                inverse = 1.0 / norms_before[b, i]
                for j in range(d):
                    unit_before[j] = np.float64(before[b, i, j]) * inverse
                for j in range(d):
                    u = unit[j] - unit_before[j]
                    turn += u * u
                half = 0.5 * math.sqrt(turn)
                angles += 2.0 * math.asin(1.0 if half > 1.0 else half)
                compared += 1
            squares += square
            unit_squares += unit_square
            if copies:
                for j in range(d):
                    kept[b, i, j] = x[b, i, j]

        mean_square = spread = unit_mean_square = unit_spread = 0.0
        for j in range(d):
            offset = total[j] / max(count, 1)
            spread += offset * offset
            mean = shift[j] + offset
            mean_square += mean * mean
            offset = unit_total[j] / max(directed, 1)
            unit_spread += offset * offset
            mean = unit_shift[j] + offset
            unit_mean_square += mean * mean
        spread = squares - count * spread
        unit_spread = unit_squares - directed * unit_spread
        out[0, b] = count
        out[1, b] = math.sqrt(count * mean_square) if count > 0 else math.nan
        out[2, b] = math.sqrt(0.0 if spread < 0 else spread) if count > 0 else math.nan
        out[3, b] = directed
        out[4, b] = math.sqrt(directed * unit_mean_square) if directed > 0 else math.nan
        out[5, b] = math.sqrt(0.0 if unit_spread < 0 else unit_spread) if directed > 0 else math.nan
        out[9, b] = largest
        out[11, b] = angles / compared if compared > 0 else math.nan

        # --- without outliers ------------------------------------------------------------------------
        outliers = 0
        if most > outlier_factor * least:  # the median is not smaller than the least: else there can be none
            known = 0
            sorted_norms = np.empty(count)
            for i in range(n):
                if keep[i] and not math.isnan(norms[b, i]):
                    sorted_norms[known] = norms[b, i]
                    known += 1
            sorted_norms = np.sort(sorted_norms[:known])
            median = sorted_norms[(known - 1) // 2]
            for i in range(n):
                if keep[i] and median > 0 and norms[b, i] < math.inf and norms[b, i] / median > outlier_factor:
                    outliers += 1
                    keep[i] = False
        out[10, b] = outliers
        if outliers == 0:
            out[6, b], out[7, b], out[8, b] = out[3, b], out[4, b], out[5, b]
            continue
        first_direction, directed, unit_squares = -1, 0, 0.0
        for i in range(n):
            if not keep[i] or norms[b, i] == 0:
                continue
            inverse, unit_square = 1.0 / norms[b, i], 0.0
            if first_direction < 0:
                first_direction = i
                for j in range(d):
                    unit_shift[j] = np.float64(x[b, i, j]) * inverse
                    unit_total[j] = 0.0
            for j in range(d):
                unit[j] = np.float64(x[b, i, j]) * inverse
            for j in range(d):
                u = unit[j] - unit_shift[j]
                unit_total[j] += u
                unit_square += u * u
            unit_squares += unit_square
            directed += 1
        unit_mean_square = unit_spread = 0.0
        for j in range(d):
            offset = unit_total[j] / max(directed, 1)
            unit_spread += offset * offset
            mean = unit_shift[j] + offset
            unit_mean_square += mean * mean
        unit_spread = unit_squares - directed * unit_spread
        out[6, b] = directed
        out[7, b] = math.sqrt(directed * unit_mean_square) if directed > 0 else math.nan
        out[8, b] = math.sqrt(0.0 if unit_spread < 0 else unit_spread) if directed > 0 else math.nan
