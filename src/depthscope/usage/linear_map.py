"""A block as the best linear map of its tokens: fitted on one half of the sequences, judged on the other.

What is fitted is what the block *adds*, u = output − input ≈ xA + b, by least squares: min Σ ‖u_t − x_t A − b‖².
Without a ridge it is the same as fitting the output; where the tokens do not determine A (fewer tokens than features),
the least A is taken, so that what is not known is left to the skip. After arXiv 2603.15389, which looks at the loss.

Streamed: means, centred sums of squares and products in float64, O(d²) per block; no token is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.hooks import Machine, Visit
from depthscope.inputs import Batch, call
from depthscope.measures import median
from depthscope.progress import Tick
from depthscope.usage.followed import Means, listen_to_blocks

# Tokens to fit per feature: with N of them for d features, what a block does that is not linear reaches the map as
# noise of d/(N − d) of its energy, so that the error on other text comes out 15 % too large at 4, 41 % at 2, 6 % at 9.
ENOUGH = 4.0
_ROOM = 2**30  # bytes of sums that are kept at a time: more blocks than fit there are fitted in further passes
_WELL = 1e-11  # least square of a Cholesky pivot of a correlation matrix: below it float64 has lost too many digits


@dataclass(frozen=True)
class LinearMap:
    """u = xA + b for tokens as rows, in float64."""

    matrix: Tensor  # (d, d)
    constant: Tensor  # (d)

    def __call__(self, x: Tensor) -> Tensor:
        """What is added to x (…, d)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ self.matrix.to(wide) + self.constant.to(wide)


class LeastSquares:
    """Centred sums over batches (Chan, Golub & LeVeque 1983): what was seen is moved to the common mean, so that no
    large numbers are subtracted."""

    def __init__(self, width: int, device: torch.device | None = None):
        self.count = 0.0
        self.mean_x, self.mean_u = (torch.zeros(width, dtype=torch.float64, device=device) for _ in range(2))
        self.xx, self.xu = (torch.zeros(width, width, dtype=torch.float64, device=device) for _ in range(2))

    def add(self, x: Tensor, u: Tensor) -> None:
        """Tokens (k, d) and what is added to them (k, d)."""
        k = float(len(x))
        if not k:
            return
        x, u = x.double(), u.double()
        mean_x, mean_u = x.mean(dim=0), u.mean(dim=0)
        x, u = x - mean_x, u - mean_u
        self.xx.addmm_(x.mT, x)
        self.xu.addmm_(x.mT, u)
        step_x, step_u = mean_x - self.mean_x, mean_u - self.mean_u
        total = self.count + k
        between = self.count * k / total
        self.xx.addr_(step_x, step_x, alpha=between)
        self.xu.addr_(step_x, step_u, alpha=between)
        self.mean_x += step_x * (k / total)
        self.mean_u += step_u * (k / total)
        self.count = total

    @property
    def is_finite(self) -> bool:
        """Whether all that was seen is: nan or infinity determine no map."""
        return all(bool(part.isfinite().all()) for part in (self.mean_x, self.mean_u, self.xx, self.xu))

    def solve(self, ridge: float = 0.0) -> LinearMap:
        """A and b. `ridge` is added to the diagonal of the tokens' correlation matrix; 0 unless asked for.

        Features are first scaled to variance 1, since one feature of a trained model may be a thousand times the
        others. Cholesky where that is well conditioned, else by eigenvalues, without those that are rounding noise.
        """
        scale = self.xx.diagonal().sqrt()
        scale = torch.where(scale > 0, scale, 1.0)
        correlation = self.xx / scale[:, None] / scale
        correlation.diagonal().add_(ridge)
        target = self.xu / scale[:, None]
        factor, failed = torch.linalg.cholesky_ex(correlation)
        if int(failed) == 0 and factor.diagonal().square().min() > _WELL:
            solved = torch.cholesky_solve(target, factor)
        else:
            values, vectors = torch.linalg.eigh(correlation)
            noise = values[-1] * len(values) * torch.finfo(torch.float64).eps * 16
            inverse = torch.where(values > noise, 1 / values, 0.0)
            solved = vectors @ (inverse[:, None] * (vectors.mT @ target))
        matrix = solved / scale[:, None]
        return LinearMap(matrix, self.mean_u - self.mean_x @ matrix)


def passes_to_fit(depth: int, width: int) -> int:
    """How often the fitting half is run: once, unless the sums of all blocks do not fit into memory."""
    return -(-depth // _at_a_time(width))


def fit_each(
    model: nn.Module,
    anatomy: Anatomy,
    calls: list[Batch],
    *,
    depth: int,
    width: int,
    ridge: float = 0.0,
    progress: Tick | None = None,
) -> dict[int, LinearMap]:
    """By block, the map of its real tokens; of the blocks whose input and output are as wide as block 1's, and
    finite."""
    maps: dict[int, LinearMap] = {}
    step = _at_a_time(width)
    for first in range(1, depth + 1, step):
        sums: dict[int, LeastSquares] = {}

        def see(block: int, x: Tensor, u: Tensor, first: int = first, sums: dict[int, LeastSquares] = sums) -> None:
            if first <= block < first + step and x.shape[-1] == width:
                sums.setdefault(block, LeastSquares(width, x.device)).add(x, u)

        for batch in calls:
            _run(model, anatomy, batch, see, None)
            if progress is not None:
                progress()
        maps |= {block: found.solve(ridge) for block, found in sums.items() if found.is_finite}
    return maps


def errors(
    model: nn.Module, anatomy: Anatomy, calls: list[Batch], maps: dict[int, LinearMap], most: int | None
) -> dict[int, float]:
    """By block, the median over tokens of ‖u − xA − b‖ / ‖u‖: 0 is linear, 1 is no better than skipping the block.

    A token that the block adds nothing to counts as 0 if the map adds nothing either, and is else left out.
    """
    means = Means()

    def see(block: int, x: Tensor, u: Tensor) -> None:
        if block not in maps:
            return
        size = torch.linalg.vector_norm(u.double(), dim=-1)
        missed = torch.linalg.vector_norm(u.double() - maps[block](x).double(), dim=-1)
        error = torch.where(size > 0, missed / size, torch.where(missed > 0, torch.nan, 0.0))
        means.add(block, "error", median(error), float(len(x)))

    for batch in calls:
        _run(model, anatomy, batch, see, most)
    return {block: means.get(block, "error") for block in maps}


def _run(
    model: nn.Module, anatomy: Anatomy, batch: Batch, see: Callable[[int, Tensor, Tensor], None], most: int | None
) -> None:
    """One pass; `see(block, x, u)` is told the real tokens that enter each block, and what it adds to them, (k, d)."""

    def hear(visit: Visit, entered: Tensor, left: Tensor) -> None:
        if entered.shape == left.shape:
            see(visit.number, entered, left - entered)

    with Machine(model, anatomy, listen_to_blocks(most, hear)):
        call(model, batch)


def _at_a_time(width: int) -> int:
    return max(1, _ROOM // (16 * width * width))


def halves(calls: list[Batch], samples: int, token_axis: int) -> tuple[list[Batch], list[Batch]]:
    """The calls in two: the first half of the batches and the rest; a single batch is cut between its sequences.

    Refused where a single batch cannot be cut: one sequence, or inputs whose batch axis is not the first.
    """
    if len(calls) > 1:
        middle = len(calls) // 2
        return calls[:middle], calls[middle:]
    if samples < 2 or token_axis != 1:
        raise ValueError("a linear map is fitted on one half of the text and judged on the other: give two batches")
    middle = samples // 2

    def cut(value: object, part: slice) -> object:
        return value[part] if isinstance(value, Tensor) and value.ndim and value.shape[0] == samples else value

    batch = calls[0]
    first, second = (
        Batch(tuple(cut(v, part) for v in batch.args), {name: cut(v, part) for name, v in batch.kwargs.items()})
        for part in (slice(0, middle), slice(middle, None))
    )
    return [first], [second]
