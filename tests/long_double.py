"""The measures of tokens, written naively in 80-bit floating point: what the fast forms in float32 are held against.

Every function takes the real tokens of one sequence, (n, d), as `numpy.longdouble`; its exponents reach 4932, so that
no square of a float64 under- or overflows. `expected` says nan where the documentation says nan.
"""

import numpy as np

Array = np.ndarray
NAN = np.longdouble(np.nan)
LARGEST = np.finfo(np.float64).max
NORMAL = np.finfo(np.float64).tiny


def energy(x: Array) -> np.longdouble:
    return (x * x).sum()


def split(x: Array) -> tuple[Array, Array]:
    """Π₁X and Π⊥X; equal tokens are equal to their mean."""
    shifted = x - x[:1]
    deviations = shifted - shifted.mean(axis=0)
    return np.broadcast_to(x[:1] + shifted.mean(axis=0), x.shape), deviations


def similarity(x: Array) -> np.longdouble:
    return energy(split(x)[0]) / energy(x)


def diversity(x: Array) -> np.longdouble:
    return energy(split(x)[1]) / energy(x)


def lengths(x: Array) -> Array:
    return np.sqrt((x * x).sum(axis=1))


def directions(x: Array) -> Array:
    """Zero tokens have none."""
    x = x[lengths(x) != 0]
    return x / lengths(x)[:, None]


def outliers(x: Array) -> Array:
    """More than ten times the lower median of the lengths; nothing is one if that is 0 or the length not finite."""
    long = lengths(x)
    known = np.sort(long[~np.isnan(long)])
    median = known[(len(known) - 1) // 2] if len(known) else NAN
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.isfinite(long / median) & (long / median > 10)


def mean_cosine(x: Array) -> np.longdouble:
    u = directions(x)
    pairs = [u[i] @ u[j] for i in range(len(u)) for j in range(i)]
    return np.mean(pairs) if pairs else NAN


def singular_values(x: Array) -> Array:
    """By one-sided Jacobi rotations, descending, relative to ‖X‖."""
    columns = (x if x.shape[0] >= x.shape[1] else x.T) / np.sqrt(energy(x))
    for _ in range(40):
        largest = np.longdouble(0)
        for i in range(columns.shape[1]):
            for j in range(i):
                a, b = columns[:, i], columns[:, j]
                aa, bb, ab = a @ a, b @ b, a @ b
                if abs(ab) <= 1e-18 * np.sqrt(aa * bb):
                    continue
                largest = max(largest, abs(ab) / np.sqrt(aa * bb))
                zeta = (bb - aa) / (2 * ab)
                t = (1 if zeta >= 0 else -1) / (abs(zeta) + np.sqrt(1 + zeta * zeta))
                c = 1 / np.sqrt(1 + t * t)
                columns[:, i], columns[:, j] = c * a - c * t * b, c * t * a + c * b
        if largest < 1e-17:
            break
    return np.sort(lengths(columns.T))[::-1]


def effective_rank(x: Array) -> np.longdouble:
    sigma = singular_values(x)
    p = (sigma / sigma.sum())[sigma > 0]
    return np.exp(-(p * np.log(p)).sum())


def leading_vector(x: Array) -> Array:
    """u₁ by power iteration on XXᵀ: the matrix is squared, which doubles the iterations each time."""
    gram = x @ x.T / energy(x)
    for _ in range(40):
        gram = gram @ gram
        gram = gram / np.trace(gram)
    return np.sqrt(np.diagonal(gram)) * np.sign(gram[np.argmax(np.diagonal(gram))])


def composite(x: Array) -> np.longdouble:
    def norm(y: Array) -> np.longdouble:
        return np.sqrt(np.abs(y).sum(axis=0).max() * np.abs(y).sum(axis=1).max())

    return norm(split(x)[1]) / norm(x)


def angles(x: Array, y: Array) -> Array:
    """∠(x_i, y_i) of the tokens that are zero neither before nor after."""
    both = (lengths(x) != 0) & (lengths(y) != 0)
    u, v = x[both] / lengths(x)[both][:, None], y[both] / lengths(y)[both][:, None]
    return 2 * np.arctan2(lengths(u - v), lengths(u + v))


def energy_shares(sequences: list[tuple[Array, Array]], positions: int) -> Array:
    """Of all sequences' unit tokens: what is explained by one vector, then the sequence, then the position.

    A sequence is its real tokens (n, d) and their positions (n). Projections onto a basis by Gram-Schmidt.
    """
    tokens, of_sequence, of_position = [], [], []
    for s, (x, places) in enumerate(sequences):
        kept = lengths(x) != 0
        tokens.append(directions(x))
        of_sequence += [s] * int(kept.sum())
        of_position += places[kept].tolist()
    u = np.concatenate(tokens)
    if len(set(of_sequence)) < 2 or not np.isfinite(u).all():
        return np.full(4, NAN)
    basis: list[Array] = []
    shares = []
    groups = (
        [np.ones(len(u))],
        [np.array(of_sequence) == s for s in range(len(sequences))],
        [np.array(of_position) == p for p in range(positions)],
    )
    for columns in groups:
        share = np.longdouble(0)
        for column in columns:
            e = column.astype(np.longdouble)
            for _ in range(2):
                for b in basis:
                    e = e - b * (b @ e)
            if np.sqrt(e @ e) > 1e-12:
                basis.append(e / np.sqrt(e @ e))
                share += energy((basis[-1] @ u)[None])
        shares.append(share / len(u))
    return np.array([*shares, 1 - sum(shares)])
