"""Tracks through a matrix of weights, where the time goes: all but one, which is what is left of the whole."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.decomposition.path_tensor import NotFollowed
from depthscope.decomposition.tracks import Tracks

FEWEST = 4  # tracks for which leaving one out is worth while
ROWS = 8  # of the track that is left over, which are computed to check it
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def through_weights(tracks: Tracks, weight: Tensor, whole: Tensor, left_over: int | None) -> Tracks:
    """A_k Wᵀ of every track; `whole` is what the model computed, XWᵀ without its bias.

    Since Σ_k A_k = X, one of the products is known from the others: the one at `left_over`, the largest track, so that
    the rounding of the others is small beside it. Some of its rows are computed all the same: if they are not what is
    left over, that is refused.
    """
    values = tracks.values
    count, width, made = len(values), weight.shape[1], weight.shape[0]
    known = whole.dtype == values.dtype == weight.dtype and values.dtype in TOLERANCE
    if left_over is None or count < FEWEST or not known or values.requires_grad:
        return tracks.map(lambda each: F.linear(each, weight.to(each.dtype)))
    place = min(left_over, count - 1)
    given, result = values.reshape(count, -1, width), values.new_empty(count, whole.numel() // made, made)
    rest = whole.reshape(-1, made).clone()
    for part in (slice(0, place), slice(place + 1, count)):
        if len(given[part]):
            torch.mm(given[part].flatten(0, 1), weight.T, out=result[part].view(-1, made))
            rest -= result[part].sum(dim=0)
    result[place] = rest
    rows = torch.linspace(0, len(rest) - 1, min(ROWS, len(rest)), device=rest.device).long()
    error = float((rest[rows] - given[place, rows] @ weight.T).abs().amax())
    if not error <= TOLERANCE[values.dtype] * float(result[:, rows].abs().amax()):
        raise NotFollowed(f"'linear' does not add up: what is left of it is {error:.1e} from the track itself")
    return Tracks(result.view(count, *whole.shape), tracks.start)
