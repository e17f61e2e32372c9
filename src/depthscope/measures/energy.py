"""Where the energy ‖X‖_F² of the tokens sits. Conventions as in `similarity.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.norms import norm_of_rows
from depthscope.measures.tokens import TokenMatrix, Tokens, norms_of


class LargestFeature(NamedTuple):
    """The one of the d features that has the most energy."""

    share: Tensor  # of the energy, in [1/d, 1]
    feature: Tensor  # which one, from 0, as a float64; nan where the share is


class EnergySplit(NamedTuple):
    """Shares of the unit tokens' energy; they add up to 1."""

    shared: Tensor  # the global part (a Python keyword): one direction common to everything (anisotropy)
    sequence: Tensor  # what the tokens of a sequence share beyond that (collapse of context)
    position: Tensor  # what equal positions share
    token: Tensor  # what belongs to the single token


def frobenius_norm(tokens: Tokens, mask: Tensor | None = None) -> Tensor:
    """‖X‖_F over the real tokens. 0 for a zero matrix; nan without real tokens or with a non-finite entry."""
    return norms_of(tokens, mask).norm


def largest_token_share(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """max_i ‖x_i‖² / ‖X‖_F² ∈ [1/n, 1]: near 1, one token carries everything and hides the others."""
    x = TokenMatrix.of(tokens, mask)
    return (x.largest_norm / x.norm).square().clamp(max=1)


def largest_feature(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> LargestFeature:
    """max_j Σ_i x_ij² / ‖X‖_F² ∈ [1/d, 1] and its j, over the tokens that are no outliers.

    Near 1, one feature makes most of every inner product, and all tokens look alike by it (a *rogue dimension*,
    Timkey & van Schijndel 2021). Outlier tokens are left out: their energy sits in few features too, and would
    hide what the others have. nan for a zero matrix, without real tokens, or with an entry that is not finite.
    """
    return TokenMatrix.of(tokens, mask).ordinary.once(_largest_feature)


def _largest_feature(x: TokenMatrix) -> LargestFeature:
    usable = x.norm.isfinite() & (x.norm > 0)
    share, index = (norm_of_rows(x.values.mT) / x.norm[..., None]).square().max(dim=-1)  # over (…, d)
    return LargestFeature(*(torch.where(usable, part, torch.nan) for part in (share.clamp(max=1), index.double())))


def energy_split(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> EnergySplit:
    """Splits the energy of unit tokens over several sequences, (…, S, n, d) → four shares of shape (…).

    Additive model u_sp = g + a_s + b_p + e_sp, fitted in this order: one vector for everything, one
    per sequence, one per position, and the rest. Each share is the energy that the step explains, so
    they add up to 1 with padding too. Without padding it is the two-way analysis of variance; with
    padding (sequences of unequal length) what sequence and position could both explain goes to the
    sequence. Only the sequence share is collapse of context; a large shared part is anisotropy.
    Zero tokens have no direction and count as padding. All four are nan with fewer than two
    sequences that have a real token: shared and sequence cannot then be told apart.
    Ours.
    """
    x = TokenMatrix.of(tokens, mask)
    if x.values.ndim < 3:
        raise ValueError(f"expected tokens of several sequences (…, S, n, d), got shape {tuple(x.values.shape)}")
    unit = x.directions
    # All S·n tokens as one matrix: its mean is g, its deviations what sequences and positions explain.
    everything = TokenMatrix(unit.values.flatten(-3, -2), unit.real.flatten(-2))
    total = everything.count  # (…), the energy of unit tokens is their number
    m = unit.real.double()  # (…, S, n)
    rest = everything.deviations.double().unflatten(-2, m.shape[-2:])  # (…, S, n, d)

    per_sequence = unit.count.clamp(min=1)  # (…, S)
    a = rest.sum(dim=-2) / per_sequence[..., None]  # (…, S, d)
    sequence = (per_sequence * a.square().sum(dim=-1)).sum(dim=-1)
    rest = torch.where(unit.real[..., None], rest - a[..., None, :], 0.0)

    target = rest.sum(dim=-3)  # (…, n, d)
    usable = target.isfinite().all(dim=-1).all(dim=-1)
    b = _positions(torch.where(usable[..., None, None], target, 0.0), m, per_sequence)
    position = (b * target).sum(dim=(-2, -1)).clamp(min=0)
    fitted = b[..., None, :, :] - torch.einsum("...sp,...pd->...sd", m / per_sequence[..., None], b)[..., None, :]
    token = torch.where(unit.real[..., None], rest - fitted, 0.0).square().sum(dim=(-3, -2, -1))

    parts = [everything.mean_norm.square(), sequence, position, token]
    parts[3] = torch.where(usable, parts[3], torch.nan)
    enough = (unit.count > 0).sum(dim=-1) > 1
    return EnergySplit(*(torch.where(enough & usable, part / total, torch.nan) for part in parts))


def _positions(target: Tensor, m: Tensor, per_sequence: Tensor) -> Tensor:
    """Position vectors b by least squares after the sequences: (D − Σ_s m_s m_sᵀ/n_s) b = Σ_s rest_s, (…, n, d).

    The matrix is a graph Laplacian: singular along shifts of b, which explain nothing. Without padding it is
    S(I − 11ᵀ/n), and the right side, of rests without a mean, is left as it is: b = target / S. That takes no n²
    numbers and no n³ steps, which a long context does not have.
    """
    if bool((m == 1).all()):
        return target / m.shape[-2]
    laplacian = torch.diag_embed(m.sum(dim=-2)) - torch.einsum("...sp,...sq->...pq", m, m / per_sequence[..., None])
    return torch.linalg.pinv(laplacian, hermitian=True) @ target
