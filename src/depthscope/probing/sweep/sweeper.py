"""Chooses the form of a sweep, and keeps the buffers that its sweeps share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from depthscope.measures import PARTS, Scratch, TokenMatrix, TokenNorms, mean_angle
from depthscope.measures.tokens import are_outliers, ratios_to_median
from depthscope.probing.sweep import device, eager, kernel

# The numbers of a sweep, each (batch,): three of every `TokenNorms`.
FIELDS = (
    *("norms.count", "norms.mean_norm", "norms.deviation_norm"),
    *("directions.count", "directions.mean_norm", "directions.deviation_norm"),
    *("ordinary.count", "ordinary.mean_norm", "ordinary.deviation_norm"),
    *("largest_norm", "outliers", "turn"),
)
TURN = FIELDS.index("turn")  # the mean angle to the tokens before, in radians; nan where there was nothing to compare


@dataclass(frozen=True, eq=False)
class Kept:
    """What is kept of tokens that others will be compared with: the tokens themselves and their norms, or unit tokens.

    It stands in a buffer, until that one's turn has come again.
    """

    tokens: Tensor  # (batch, n, d)
    norms: Tensor | None = None  # (batch, n), 0 for those without a direction; None: the tokens have length 1
    directed: Tensor | None = None  # (batch, n), of unit tokens: true for those that have a direction; None: all

    @property
    def unit(self) -> Tensor:
        """The unit tokens, 0 for those without a direction."""
        if self.norms is None:
            return self.tokens
        divisors = torch.where(self.norms == 0, 1.0, self.norms).unsqueeze(-1)
        unit = self.tokens.double() / divisors
        return torch.where((self.norms == 0).unsqueeze(-1), 0.0, unit).float()

    @property
    def has_direction(self) -> Tensor | None:
        """True for tokens that have one, (batch, n); None: all have."""
        return self.directed if self.norms is None else self.norms != 0


@dataclass
class Swept:
    """What a sweep has found besides its fields."""

    token_norms: Tensor  # (batch, n), 0 at padding
    kept: Kept | None = None
    compared: Kept | None = None  # what `turn` is the angle to

    def outliers(self, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which tokens are, and the norms of all over the median, both (batch, n)."""
        ratios = ratios_to_median(self.token_norms, real)
        return are_outliers(ratios), ratios


class Sweeper:
    """Sweeps over the tokens of one pass after the other; `forms` names those that were needed."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self.forms: dict[str, None] = {}
        self.trouble = ""  # with the kernel

    @cached_property
    def _compiled(self) -> Callable[..., None] | None:
        """The kernel; asked for by the first tokens that it could read, since compiling takes seconds."""
        found = kernel.kernel()
        self.trouble = found.trouble
        return found.loops

    def sweep(
        self, tokens: Tensor, real: Tensor | None, out: Tensor, *, keep: str = "", before: Kept | None = None
    ) -> Swept:
        """All numbers of tokens (batch, n, d), written to `out` (fields, batch).

        `real` (batch, n) is true for real tokens; `keep` names the buffer in which the tokens are kept for a
        comparison, "" where there will be none, and `before` is what these are compared with.
        """
        if real is not None:
            real = real.to(tokens.device)
            real = (real if real.dtype is torch.bool else real != 0).expand(tokens.shape[:-1])
        if before is not None and before.tokens.shape != tokens.shape:
            before = None
        if kernel.can_sweep(tokens) and self._compiled is not None:
            return self._by_kernel(tokens, real, out, keep, before)
        if eager.can_sweep(tokens):
            swept = eager.sweep(tokens, real, out, self._scratch, keep, _units_of(before))
            if swept is not None:
                return self._done("eager", swept, keep, before)
        if device.can_sweep(tokens):
            return self._done("device", device.sweep(tokens, real, out, _units_of(before)), keep, before)
        self.forms["exact"] = None
        return _by_matrix(tokens, real, out, keep, before)

    def _by_kernel(self, tokens: Tensor, real: Tensor | None, out: Tensor, keep: str, before: Kept | None) -> Swept:
        assert self._compiled is not None
        self.forms["kernel"] = None
        buffer = self._scratch.take(keep, tokens, torch.float32) if keep else None
        known = None if before is None or before.norms is None else (before.tokens, before.norms)
        norms = kernel.sweep(self._compiled, tokens, real, out, buffer, known)
        swept = Swept(norms, Kept(buffer, norms) if buffer is not None else None, before if known else None)
        if before is not None and known is None:  # which another form has kept
            assert swept.kept is not None or not keep
            here = swept.kept or Kept(tokens.detach().float(), norms)
            out[TURN] = angle_between(before, here)
            swept.compared = before
        return swept

    def _done(self, form: str, found: tuple[Tensor, Tensor, Tensor | None], keep: str, before: Kept | None) -> Swept:
        self.forms[form] = None
        norms, unit, directed = found
        return Swept(norms, Kept(unit, directed=directed) if keep else None, before)


def _units_of(before: Kept | None) -> tuple[Tensor, Tensor | None] | None:
    return None if before is None else (before.unit, before.has_direction)


def angle_between(before: Kept, after: Kept) -> Tensor:
    """The mean angle of the tokens that have a direction at both ends, in radians, (batch,)."""
    masks = [mask for mask in (before.has_direction, after.has_direction) if mask is not None]
    return mean_angle(before.unit, after.unit, masks[0] & masks[-1] if masks else None)


def _by_matrix(tokens: Tensor, real: Tensor | None, out: Tensor, keep: str, before: Kept | None) -> Swept:
    x = TokenMatrix(tokens.detach(), real)
    numbers: list[Tensor] = []
    for part in (PARTS[name](x, x) for name in PARTS):
        numbers += [part.count, part.mean_norm, part.deviation_norm] if isinstance(part, TokenNorms) else [part]
    unit = Kept(x.directions.values, directed=x.directions.mask) if keep or before is not None else None
    turn = torch.full_like(numbers[0], torch.nan)
    if before is not None and unit is not None:
        turn = angle_between(before, unit)
    torch.stack([*numbers, turn], out=out)
    return Swept(x.token_norms, unit if keep else None, before)
